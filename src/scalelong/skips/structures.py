"""The known structures: how each family of networks names its encoder, its decoder and the modules that join a skip.

A finder takes a network and returns its sites, outermost first, or None if the structure is not its own. No
third-party package is imported. Widths are read from both sides of each join: the consumer's input width minus the
backbone's.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from scalelong._modules import parameters_of
from scalelong.skips.sites import Site


def find_uvit(net: nn.Module) -> list[Site] | None:
    """U-ViT: `in_blocks`, `mid_block`, `out_blocks` called as `blk(x, skip)`."""
    inner, outer, middle, table = _parts(net, "in_blocks", "out_blocks", "mid_block", "pos_embed")
    if not _lists(inner, outer) or not _modules(middle) or len(inner) != len(outer):
        return None
    if not all(_is_linear(getattr(block, "skip_linear", None)) for block in outer):
        return None
    tokens = table.shape[1] if isinstance(table, nn.Parameter) and table.ndim == 3 else None
    extras = getattr(net, "extras", None)  # tokens of time, label and text before the patches
    sites = [
        Site(f"out_blocks.{k}", 1, channels=block.skip_linear.in_features // 2, dim=-1, tokens=tokens,
             source=f"in_blocks.{len(outer) - 1 - k}", backbone=block.skip_linear.in_features // 2,
             extras=extras if isinstance(extras, int) else None, op="cat")
        for k, block in enumerate(outer)
    ]  # fmt: skip
    return sites[::-1]


def find_residual_tuples(net: nn.Module) -> list[Site] | None:
    """diffusers and MONAI: `up_blocks` take the encoder's outputs as a tuple or list, the last one first."""
    downs, ups = _parts(net, "down_blocks", "up_blocks")
    if not _lists(downs, ups) or not len(ups):
        return None
    names = [_tuple_argument(block) for block in ups]
    if "" in names or not all(len(_resnets(block)) for block in [*downs, *ups]):
        return None
    backbone = _channels(_resnets(downs[-1])[-1])[1]
    consumed: list[Site] = []  # innermost first, in the decoder's order
    for b, (block, name) in enumerate(zip(ups, names, strict=True)):
        joins = 0
        for r, resnet in enumerate(block.resnets):
            width_in, width_out = _channels(resnet)
            if width_in is None or backbone is None or width_in < backbone:
                return None
            if width_in > backbone:  # room for a skip; K-blocks have it in their first resnet or nowhere
                joins += 1
                path = f"up_blocks.{b}.resnets.{r}"
                norm, shortcut = _norm_and_shortcut(resnet, path)
                consumed.append(
                    Site(path, name, item=-joins, channels=width_in - backbone, carrier=f"up_blocks.{b}",
                         norm=norm, shortcut=shortcut, backbone=backbone, op="cat")
                )  # fmt: skip
            backbone = width_out
    return _with_sources(net, consumed[::-1])


def find_skip_blocks(net: nn.Module) -> list[Site] | None:
    """Hunyuan-DiT: the second half of `blocks` has a `skip_linear` and takes `skip`."""
    blocks: Any = getattr(net, "blocks", None)
    if not _lists(blocks):
        return None
    takes = [k for k, block in enumerate(blocks) if _is_linear(getattr(block, "skip_linear", None))]
    if not takes or not all("skip" in parameters_of(blocks[k]) for k in takes):
        return None
    if takes != list(range(len(blocks) - len(takes), len(blocks))) or len(takes) > len(blocks) // 2:
        return None
    sites = []
    for source, k in enumerate(reversed(takes)):
        norm = f"blocks.{k}.skip_norm" if _modules(getattr(blocks[k], "skip_norm", None)) else None
        backbone = blocks[k].skip_linear.out_features
        width = blocks[k].skip_linear.in_features - backbone
        shape: dict[str, Any] = {"channels": width, "dim": -1, "backbone": backbone, "extras": 0, "op": "cat"}
        sites.append(Site(f"blocks.{k}", "skip", **shape, source=f"blocks.{source}", norm=norm))
    return sites


def find_output_blocks(net: nn.Module) -> list[Site] | None:
    """guided-diffusion: the root feeds [backbone, skip] to `output_blocks`."""
    inner, outer, middle = _parts(net, "input_blocks", "output_blocks", "middle_block")
    if not _lists(inner, outer) or len(inner) != len(outer) or not _modules(middle):
        return None
    sources = [f"input_blocks.{k}" for k in range(len(inner))]
    return _concatenated(middle, [(f"output_blocks.{k}", block) for k, block in enumerate(outer)], sources)


def find_levels(net: nn.Module) -> list[Site] | None:
    """ddim, latent-diffusion `Model`: `up[level].block[k]` takes [backbone, skip], from the last level to the first."""
    downs, ups, middle, first = _parts(net, "down", "up", "mid", "conv_in")
    if not _lists(downs, ups) or not _modules(middle, first) or not all(_lists(*_parts(m, "block")) for m in ups):
        return None
    joins = [(f"up.{k}.block.{b}", m) for k in reversed(range(len(ups))) for b, m in enumerate(ups[k].block)]
    sources = ["conv_in"]
    for k, level in enumerate(downs):
        for b in range(len(level.block)):
            attention = b < len(getattr(level, "attn", ()))
            sources.append(f"down.{k}.attn.{b}" if attention else f"down.{k}.block.{b}")
        sources += [f"down.{k}.downsample"] if hasattr(level, "downsample") else []
    return _concatenated(getattr(middle, "block_2", middle), joins, sources)


def find_block_dicts(net: nn.Module) -> list[Site] | None:
    """EDM, EDM2, CorrDiff: the root feeds [backbone, skip] to the blocks of the dictionary `dec` that have room."""
    encoder, decoder = _parts(net, "enc", "dec")
    if not all(isinstance(blocks, nn.ModuleDict) and len(blocks) for blocks in (encoder, decoder)):
        return None
    outputs = [name for name in encoder if "aux" not in name]  # "aux" modules change a skip or read the backbone
    joins = [(f"dec.{name}", block) for name, block in decoder.items() if "aux" not in name]
    return _concatenated(encoder[outputs[-1]], joins, [f"enc.{name}" for name in outputs])


def find_flat_ups(net: nn.Module) -> list[Site] | None:
    """lucidrains' `KarrasUnet`: blocks of the list `ups` with room for a skip take [backbone, skip]."""
    downs, middle, ups, first = _parts(net, "downs", "mids", "ups", "input_block")
    if not _lists(downs, middle, ups) or not _modules(first) or not len(middle):
        return None
    sources = ["input_block", *(f"downs.{k}" for k in range(len(downs)))]
    return _concatenated(middle[-1], [(f"ups.{k}", block) for k, block in enumerate(ups)], sources)


def find_up_blocks(net: nn.Module) -> list[Site] | None:
    """Kandinsky 3: the root feeds [backbone, skip] to `up_blocks`, which start with `resnets_in`."""
    downs, ups = _parts(net, "down_blocks", "up_blocks")
    if not _lists(downs, ups) or not all(
        _lists(*_parts(block, "resnets_in", "resnets_out")) for block in [*downs, *ups]
    ):
        return None
    backbone, consumed = _channels(downs[-1].resnets_out[-1])[1], []
    for k, block in enumerate(ups):
        width = _channels(block.resnets_in[0])[0]
        if width is None or backbone is None or width < backbone:
            return None
        if width > backbone:
            source = f"down_blocks.{len(ups) - 1 - k}"
            consumed.append(Site(f"up_blocks.{k}", 0, channels=width - backbone, trailing=True, source=source))
        backbone = _channels(block.resnets_out[-1])[1]
    return consumed[::-1] if len(consumed) == len(downs) - 1 else None


def find_stages(net: nn.Module) -> list[Site] | None:
    """lucidrains: `downs` and `ups` of stages that hold blocks, attention and resampling; the last join is `final_…`.

    Resampling changes the width in several ways, so the skip's width is read from the encoder's mirror stage. The
    first block of a stage takes a skip; a later one does if its input is wider than the previous output.
    """
    downs, ups, first = _parts(net, "downs", "ups", "init_conv")
    final = next((name for name in ("final_res_block", "final_conv") if _modules(getattr(net, name, None))), "")
    if not _lists(downs, ups) or not _modules(first) or not final or not 0 < len(ups) <= len(downs):
        return None
    if not all(isinstance(stage, nn.ModuleList) for stage in [*downs, *ups]):
        return None
    kinds = {type(m) for _, m in _units(downs[0], "") if not isinstance(m, nn.Sequential) and _channels(m)[0]}
    kind = next((type(m) for _, m in _units(ups[0], "") if type(m) in kinds), None)  # the block that both sides use
    if kind is None:
        return None
    consumed = list[Site]()
    for s, stage in enumerate(ups):
        mirror = len(downs) - 1 - s
        sources = _stage_outputs(downs[mirror], f"downs.{mirror}", kind)
        skip, before = _channels(net.get_submodule(sources[0]))[1] if sources else None, None
        for path, block in (unit for unit in _units(stage, f"ups.{s}") if type(unit[1]) is kind):
            width, after = _channels(block)
            if width is None or skip is None or (before is None and width <= skip):
                return None
            if before is None or width == before + skip:
                consumed.append(_joined(path, block, skip, sources.pop() if sources else None))
            elif width != before:
                return None
            before = after
    if getattr(net, "init_conv_to_final_conv_residual", True):  # imagen's option, off by default
        layers = [m for m in first.modules() if isinstance(m, nn.modules.conv._ConvNd)]
        parallel = len({m.in_channels for m in layers}) == 1  # kernels of several sizes, concatenated
        skip = sum(m.out_channels for m in layers) if parallel else _channels(first)[1]
        source = "init_temporal_attn" if _modules(getattr(net, "init_temporal_attn", None)) else "init_conv"
        reads = _channels(getattr(net, final))[0]
        backbone = next((w for _, m in reversed(_units(ups[-1], "")) if (w := _channels(m)[1]) is not None), None)
        if reads is None or reads != backbone:  # else it has no room for a skip
            consumed.append(_joined(final, getattr(net, final), skip or 0, source))
    return consumed[::-1]


def _stage_outputs(stage: nn.Module, path: str, kind: type | None) -> list[str]:
    """Return the modules of an encoder stage whose outputs may be skips: blocks, then the last before resampling."""
    units = _units(stage, path)
    blocks = [k for k, unit in enumerate(units) if type(unit[1]) is kind]
    if not blocks:
        return []
    nested = [units[k][0] for k in blocks if units[k][0].count(".") > path.count(".") + 1]  # a list within the stage
    after = units[blocks[-1] : len(units) - (blocks[0] == 0 and blocks[-1] < len(units) - 1)]
    last = [name for name, module in after if any(True for _ in module.parameters())][-1]  # not an Identity
    return [*(nested or [units[k][0] for k in blocks[:-1]]), last]


def find_nested_stages(net: nn.Module) -> list[Site] | None:
    """DiC: blocks of `dec_blocks[stage]` that are wider at their input than at their output take [backbone, skip]."""
    encoder, decoder = _parts(net, "enc_blocks", "dec_blocks")
    if not _lists(encoder, decoder) or len(encoder) != len(decoder) or not all(map(_lists, [*encoder, *decoder])):
        return None
    consumed = list[Site]()
    for s, stage in enumerate(decoder):
        mirror = len(encoder) - 1 - s
        sources = [f"enc_blocks.{mirror}.{k}" for k in range(len(encoder[mirror]))][:: -getattr(net, "skip_stride", 1)]
        for path, block in _units(stage, f"dec_blocks.{s}"):
            width, after = _channels(block)
            if width is None or after is None:
                return None
            if width > after:
                source = sources.pop(0) if sources else None
                if source is not None and _channels(net.get_submodule(source))[1] != width - after:
                    return None  # the block also narrows the backbone
                consumed.append(_joined(path, block, width - after, source))
    return consumed[::-1]


def find_reductions(net: nn.Module) -> list[Site] | None:
    """U-DiT, DiCo, FCDM: a 1×1 convolution `reduce_chan…k` of level k takes [backbone, skip]."""
    sites = []
    for name, layer in net.named_children():
        if name.startswith("reduce_chan") and name[-1].isdigit() and isinstance(layer, nn.modules.conv._ConvNd):
            level = int(name[-1])
            encoder, down = _parts(net, f"encoder_level_{level}", f"down{level}_{level + 1}")
            if not _lists(encoder) or not _modules(down):
                return None
            skip, source = _channels(down)[0], f"encoder_level_{level}.{len(encoder) - 1}"
            sites.append((level, Site(name, 0, channels=skip, trailing=True, source=source)))
    return [site for _, site in sorted(sites, key=lambda pair: pair[0])] or None


def find_decoder_stages(net: nn.Module) -> list[Site] | None:
    """nnU-Net: `decoder.stages[k]` takes [output of `decoder.transpconvs[k]`, skip]."""
    stages, ups = _parts(getattr(net, "decoder", net), "stages", "transpconvs")
    if not _lists(stages, ups) or len(stages) != len(ups) or not len(ups):
        return None
    sites = []
    for k, (stage, up) in enumerate(zip(stages, ups, strict=True)):
        width, backbone = _channels(stage)[0], _channels(up)[1]
        if width is None or backbone is None or width <= backbone:
            return None
        source = f"encoder.stages.{len(ups) - 1 - k}"
        sites.append(Site(f"decoder.stages.{k}", 0, channels=width - backbone, trailing=True, source=source))
    return sites[::-1]


def find_nested(net: nn.Module) -> list[Site] | None:
    """MONAI `UNet`: `Sequential(down, SkipConnection(inner), up)`; `AttentionUnet`: layers with `merge`.

    Both concatenate the skip first.
    """
    sites = []
    for path, module in net.named_modules():  # outermost first
        dot = f"{path}." if path else ""
        if isinstance(module, nn.Sequential) and len(module) == 3 and _parts(module[1], "mode", "dim") == ["cat", 1]:
            skip = _channels(module[0])[1]
            sites.append(Site(f"{dot}2", 0, channels=skip, leading=True, source=f"{dot}0"))
        elif _modules(*_parts(module, "attention", "upconv", "merge", "submodule")):
            gate: Any = module.attention
            skip = _channels(getattr(gate, "W_x", gate))[0]
            parent, _, k = path.rpartition(".")
            source = f"{parent}.{int(k) - 1}" if k.isdigit() else None  # what runs before this layer
            sites.append(Site(f"{dot}merge", 0, channels=skip, leading=True, source=source))
    return sites or None


def find_hybrid_decoders(net: nn.Module) -> list[Site] | None:
    """Demucs: layers of `decoder` and `tdecoder` add the argument `skip`; `HDemucs` decodes from zeros, so that its
    innermost `skip` is the backbone itself."""
    decoder, encoder = _parts(net, "decoder", "encoder")
    if not _lists(decoder, encoder) or not all(_skip_argument(layer) == "skip" for layer in decoder):
        return None
    if not all(hasattr(layer, "conv_tr") and hasattr(layer, "empty") for layer in decoder):
        return None  # a decoder of another kind
    times: Any = getattr(net, "tdecoder", None) if isinstance(getattr(net, "tdecoder", None), nn.ModuleList) else []
    offset = len(decoder) - len(times)
    consumed = []
    for k, layer in enumerate(decoder):
        for name, part in [
            (f"decoder.{k}", layer),
            *([(f"tdecoder.{k - offset}", times[k - offset])] if k >= offset else []),
        ]:
            zeros = k == 0 and not hasattr(net, "crosstransformer") and name == "decoder.0"
            if not getattr(part, "empty", False) and not zeros:
                source = f"{name.replace('decoder', 'encoder').split('.')[0]}.{len(decoder) - 1 - k}"
                consumed.append(Site(name, "skip", channels=getattr(part, "chin", None), source=source, op="add"))
    return consumed[::-1]


def find_upsampling_blocks(net: nn.Module) -> list[Site] | None:
    """MONAI `UNETR`, `SwinUNETR`, `DynUNet`, `VNet`: blocks that upsample and then join their argument `skip`.

    The room for a skip is what the second layer reads beyond the output of the upsampling. The widths also prove the
    order in which the blocks run: the reverse order must be impossible.
    """
    found = [(path, block, name) for path, block in net.named_modules() if (name := _skip_argument(block))]
    forwards = _rooms(found)
    if not forwards or (len(forwards) > 1 and _rooms(found[::-1])):
        return None
    return [Site(path, name, channels=room, op="cat") for path, name, room in forwards[::-1]]


def _rooms(blocks: list[tuple[str, nn.Module, str]]) -> list[tuple[str, str, int]] | None:
    rooms, before = [], None
    for path, block, name in blocks:
        units = [m for m in block.children() if _channels(m)[0] is not None]
        if len(units) < 2 or not any("Transpose" in type(m).__name__ for m in units[0].modules()):
            return None
        (width, up), reads, after = _channels(units[0]), _channels(units[1])[0], _channels(units[-1])[1]
        if up is None or reads is None or reads <= up or before not in (None, width):
            return None
        rooms.append((path, name, reads - up))
        before = after
    return rooms


def find_encoder_features(net: nn.Module) -> list[Site] | None:
    """segmentation-models: `decoder.blocks[k]` takes a feature of the encoder, which lists its `out_channels`."""
    encoder, decoder = _parts(net, "encoder", "decoder")
    (blocks,), (widths,) = _parts(decoder, "blocks"), _parts(encoder, "out_channels")
    if not _lists(blocks) or not isinstance(widths, (list, tuple)) or len(widths) < len(blocks) + 1:
        return None
    names = [_skip_argument(block) for block in blocks]
    if not names or "" in names or len({type(block) for block in blocks}) > 1:  # MAnet also gates with the skip
        return None
    consumed = [
        Site(f"decoder.blocks.{k}", name, channels=widths[-2 - k], source="encoder")
        for k, name in enumerate(names[:-1])  # the last block has no skip, nor has one whose feature is a placeholder
        if widths[-2 - k]
    ]
    return consumed[::-1]


def find_mirrored_blocks(net: nn.Module) -> list[Site] | None:
    """k-diffusion's first U-Net: every block of `u_blocks` but the first takes `skip`; `skip_stages` do not run."""
    inner: Any = getattr(net, "u_net", net)
    downs, ups = _parts(inner, "d_blocks", "u_blocks")
    if not _lists(downs, ups) or len(downs) != len(ups) or not all(_skip_argument(block) == "skip" for block in ups):
        return None
    path, last = "u_net." if inner is not net else "", len(ups) - 1
    return [
        Site(
            f"{path}u_blocks.{last - k}",
            "skip",
            channels=_channels(downs[k])[1],
            source=f"{path}d_blocks.{k}",
            op="cat",
        )
        for k in range(getattr(inner, "skip_stages", 0), last)
    ]


def find_first_blocks(net: nn.Module) -> list[Site] | None:
    """Stable Cascade: the first block of every up level but the innermost takes `x_skip`."""
    downs, ups, scalers = _parts(net, "down_blocks", "up_blocks", "up_upscalers")
    if not _lists(downs, ups, scalers) or not all(_lists(level) and len(level) for level in [*downs, *ups]):
        return None
    consumed = []
    for k, level in enumerate(ups[1:], start=1):
        mixer, depthwise = _parts(level[0], "channelwise", "depthwise")
        if not _modules(mixer, depthwise) or not (name := _skip_argument(level[0])):
            return None
        room = (_channels(mixer)[0] or 0) - (_channels(depthwise)[1] or 0)
        if room > 0:
            source = len(ups) - 1 - k
            path = f"down_blocks.{source}.{len(downs[source]) - 1}"
            consumed.append(Site(f"up_blocks.{k}.0", name, channels=room, source=path, op="cat"))
    return consumed[::-1]


def find_upcats(net: nn.Module) -> list[Site] | None:
    """MONAI `BasicUNet`: `upcat_k(x, x_e)` for k = 1, 2, …"""
    n = sum(name.startswith("upcat_") for name, _ in net.named_children())
    names = [f"upcat_{k}" for k in range(1, n + 1)]
    sources = ["conv_0", *(f"down_{k}" for k in range(1, n))]
    if not n or not _modules(*_parts(net, *names, *sources)):
        return None
    sites = []
    for name, source in zip(names, sources, strict=True):
        width, joined = _channels(net.get_submodule(source))[1], _channels(getattr(_get(net, name), "convs", net))[0]
        backbone = joined - width if joined is not None and width is not None and joined > width else None
        sites.append(Site(name, "x_e", channels=width, source=source, backbone=backbone, op="cat"))
    return sites


STRUCTURES: dict[str, Callable[[nn.Module], list[Site] | None]] = {
    "in_blocks, mid_block, out_blocks with skip_linear": find_uvit,
    "up_blocks that take res_hidden_states_tuple or res_hidden_states_list": find_residual_tuples,
    "blocks with skip_linear that take skip": find_skip_blocks,
    "input_blocks, middle_block, output_blocks": find_output_blocks,
    "down, mid, up with block lists": find_levels,
    "dictionaries enc and dec": find_block_dicts,
    "downs, mids, ups": find_flat_ups,
    "downs and ups of stages, init_conv and final_res_block or final_conv": find_stages,
    "down_blocks and up_blocks with resnets_in and resnets_out": find_up_blocks,
    "down_blocks, up_blocks, up_upscalers with x_skip": find_first_blocks,
    "enc_blocks and dec_blocks of stages": find_nested_stages,
    "encoder_level_k and reduce_chan_levelk": find_reductions,
    "d_blocks and u_blocks that take skip": find_mirrored_blocks,
    "upcat_1, upcat_2, …": find_upcats,
    "nested Sequential(down, SkipConnection, up) or layers with attention, upconv, merge": find_nested,
    "decoder.stages and decoder.transpconvs": find_decoder_stages,
    "decoder.blocks that take a feature of encoder.out_channels": find_encoder_features,
    "decoder and tdecoder layers that add skip": find_hybrid_decoders,
    "blocks that upsample and take skip": find_upsampling_blocks,
}


def _parts(net: nn.Module, *names: str) -> list[Any]:
    return [getattr(net, name, None) for name in names]


def _lists(*values: object) -> bool:
    return all(isinstance(value, (nn.ModuleList, nn.Sequential)) for value in values)


def _modules(*values: object) -> bool:
    return all(isinstance(value, nn.Module) for value in values)


def _is_linear(layer: object) -> bool:
    """Whether a layer is an `nn.Linear`, possibly wrapped by PEFT."""
    return isinstance(getattr(layer, "base_layer", layer), nn.Linear)


def _tuple_argument(block: nn.Module) -> str:
    names = parameters_of(block)
    known = ("res_hidden_states_tuple", "res_hidden_states_list", "res_hidden_states_tuple_base")
    return next((name for name in known if name in names), "")


def _skip_argument(block: nn.Module) -> str:
    """Return the name of the argument of `forward` that a skip is passed in, "" if it has none."""
    names = list(parameters_of(block))[1:]
    return next((name for name in ("skip", "skipx", "x_skip", "skip_connection") if name in names), "")


def _resnets(block: nn.Module) -> Any:
    """Return the list of a block's ResNet blocks; ControlNet-XS has those of the base network beside the control's."""
    return getattr(block, "resnets", getattr(block, "base_resnets", ()))


def _units(modules: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return the modules of a list and of the lists in it, in order, with their paths."""
    units = []
    for name, module in modules.named_children():
        nested = isinstance(module, nn.ModuleList)
        units += _units(module, f"{path}.{name}") if nested else [(f"{path}.{name}", module)]
    return units


def _joined(path: str, block: nn.Module, width: int, source: str | None = None) -> Site:
    """Return the site of a block that takes [backbone, skip]."""
    first = (block[0], f"{path}.0") if isinstance(block, nn.Sequential) else (block, path)
    norm, shortcut = _norm_and_shortcut(*first)
    joined = _channels(block)[0]
    backbone = joined - width if joined is not None and joined > width > 0 else None
    return Site(path, 0, channels=width, trailing=True, source=source, norm=norm, shortcut=shortcut, backbone=backbone)


def _concatenated(before: nn.Module, blocks: list[tuple[str, nn.Module]], sources: list[str]) -> list[Site] | None:
    """Return the sites of those blocks that read more than `before` or the previous block gives: [backbone, skip].

    `sources` are the outputs of the encoder, outermost first; every one must be consumed.
    """
    backbone, consumed = _channels(before)[1], list[Site]()
    for path, block in blocks:
        width, after = _channels(block)
        if width is None or backbone is None or width < backbone or len(consumed) > len(sources):
            return None
        if width > backbone:
            consumed.append(_joined(path, block, width - backbone, [None, *sources][-1 - len(consumed)]))
        backbone = after
    return consumed[::-1] if len(consumed) == len(sources) else None


def _channels(module: nn.Module) -> tuple[int | None, int | None]:
    """Return input and output channels of a block: its own attributes, or those of its first and last layer."""
    if isinstance(module, nn.Sequential) and len(module):
        ins = next((c for c in (_channels(m)[0] for m in module) if c is not None), None)
        outs = next((c for c in (_channels(m)[1] for m in reversed(module)) if c is not None), None)
        return ins, outs
    for name_in in ("in_channels", "channels"):
        width_in, width_out = getattr(module, name_in, None), getattr(module, "out_channels", None)
        if isinstance(width_in, int) and isinstance(width_out, int):
            last = getattr(getattr(module, "conv2", None), "out_channels", None)  # K-blocks: not their out_channels
            return width_in, last if isinstance(last, int) else width_out
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if layers := [m for m in module.modules() if isinstance(m, nn.modules.conv._ConvNd)]:
        return layers[0].in_channels, layers[-1].out_channels
    if kernels := [k for m in module.modules() if isinstance(k := m._parameters.get("weight"), Tensor) and k.ndim > 2]:
        return kernels[0].shape[1], kernels[-1].shape[0]  # EDM2's and lucidrains' own convolutions
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return (linears[0].in_features, linears[-1].out_features) if linears else (None, None)


def _norm_and_shortcut(block: nn.Module, path: str) -> tuple[str | None, str | None]:
    """Return the first norm of the concatenation in a ResNet block, and the shortcut beside it."""
    modules = dict(block.named_modules(remove_duplicate=False))
    if "spatial_res_block" in modules:
        return _norm_and_shortcut(modules["spatial_res_block"], f"{path}.spatial_res_block")
    shortcuts = ("conv_shortcut", "skip_connection", "nin_shortcut", "res_conv", "skip", "conv.skip")
    shortcut = next((n for n in shortcuts if n in modules), None)
    for norm in ("norm0", "norm1", "in_layers.0", "block1.norm", "conv.norm0"):
        module = modules.get(norm)
        gains = [p.numel() for p in module.parameters(recurse=False)][:1] if module is not None else [0]
        if gains in ([], [_channels(block)[0]]):  # one gain per channel that it sees
            return f"{path}.{norm}", f"{path}.{shortcut}" if shortcut else None
    return None, None


def _with_sources(net: nn.Module, sites: list[Site]) -> list[Site]:
    """Name the modules that make the skips, if the widths of encoder outputs and skips agree."""
    downs: Any = net.down_blocks
    enter = [n for n in ("conv_in", "base_conv_in", "transformer_in") if _modules(_get(net, n))]
    each = [(enter[-1], _channels(_get(net, enter[0]))[1])] if enter else []
    blocks = []  # the last layer of each block
    for b, block in enumerate(downs):  # every layer, and the downsampling
        layers = [(f"down_blocks.{b}.{_last(block, r)}.{r}", _channels(m)[1]) for r, m in enumerate(_resnets(block))]
        names = ("downsamplers.0", "downsampler", "skip_conv", "base_downsamplers")
        after = [name for name in names if _modules(_get(block, name))]
        each += [*layers, *((f"down_blocks.{b}.{name}", layers[-1][1]) for name in after[-1:])]
        blocks.append(layers[-1])
    for outputs in (each, blocks[: len(sites)], blocks[-len(sites) :]):
        if [width for _, width in outputs] == [site.channels for site in sites]:
            return [replace(site, source=source) for site, (source, _) in zip(sites, outputs, strict=True)]
    return sites


def _last(block: nn.Module, r: int) -> str:
    """Return which of a down-block's lists makes the output of layer r: the last that has such a module."""
    names = (
        "resnets",
        "temp_convs",
        "attentions",
        "temp_attentions",
        "motion_modules",
        "base_resnets",
        "base_attentions",
    )
    return [name for name in names if _modules(_get(block, f"{name}.{r}"))][-1]


def _get(module: nn.Module, path: str) -> Any:
    """Return a submodule by its path, None if there is none."""
    for name in path.split("."):
        module = getattr(module, "_modules", {}).get(name)  # type: ignore[assignment]
    return module
