"""Find the long skips of a network: declared ones, registered adapters, then known structures.

A finder takes a network and returns its sites, outermost first, or None if the structure is not its own. No
third-party package is imported. Widths are read from both sides of each join: the consumer's input width minus the
backbone's.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from scalelong.errors import UnsupportedNetworkError, invalid, suggestion
from scalelong.skips.sites import ROOT, Site, declared_sites

FindSkips = Callable[[nn.Module], Iterable[Site | str]]

_ADAPTERS: dict[str, FindSkips] = {}  # by qualified class name, so that no package needs to be imported


def register_adapter(cls: type[nn.Module] | str, find_skips: FindSkips) -> None:
    """Teach scalelong a network class.

    Args:
        cls: The class or its qualified name. Subclasses are included.
        find_skips: A function from a network to its sites, outermost first. A site is a `Site`, or the path of a
            module whose second argument is the skip.
    """
    if not callable(find_skips):
        raise invalid("find_skips", "a function from a network to its sites", find_skips)
    if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise invalid("cls", "a subclass of torch.nn.Module or its qualified name", cls)
    _ADAPTERS[cls if isinstance(cls, str) else _qualified(cls)] = find_skips


def find_sites(net: nn.Module, sites: Iterable[Site | str] | None = None) -> list[Site]:
    """Return the long skips of a network, outermost first, after checking `sites` if they are given."""
    if (declared := declared_sites(net)) is not None:
        if sites is not None:
            raise UnsupportedNetworkError(f"{type(net).__name__} declares its own long_skips; do not pass sites")
        return declared
    if sites is None:
        adapter = next((a for c in type(net).__mro__ if (a := _ADAPTERS.get(_qualified(c)))), None)
        if adapter is None:
            return _by_structure(net)
        sites = adapter(net)
    if isinstance(sites, (str, Site)) or not isinstance(sites, Iterable):
        raise invalid("sites", "a list with one entry per long skip", sites)
    checked = [Site(site) if isinstance(site, str) else site for site in sites]
    if not checked:
        raise invalid("sites", f"a list with one entry per long skip of {type(net).__name__}", checked)
    names = {ROOT, *(name for name, _ in net.named_modules(remove_duplicate=False) if name)}
    for site in checked:
        if not isinstance(site, Site):
            raise invalid("sites", "scalelong.Site objects or module paths", site)
        for path in (site.path, site.called, site.norm, site.shortcut):
            if path is not None and path not in names:
                raise UnsupportedNetworkError(f"{type(net).__name__} has no module {path!r}{suggestion(path, names)}")
        called = net if site.called == ROOT else net.get_submodule(site.called)
        if getattr(called.forward, "__func__", None) is nn.Module.forward:  # ModuleList, ModuleDict, ParameterList
            problem = f"site {site.called!r} is a {type(called).__name__}, which is never called"
            raise UnsupportedNetworkError(f"{problem}; name the module in it that receives the skip")
    targets = [(s.called, s.argument, s.item, s.join, s.call) for s in checked if s.path != ROOT or s.join]
    if len(set(targets)) != len(targets):
        raise UnsupportedNetworkError("two sites refer to the same argument of the same module")
    return checked


def _by_structure(net: nn.Module) -> list[Site]:
    hint = ""
    for path, module in net.named_modules():  # the network, or one inside a wrapper with the loss or the sampler
        sites = next((found for find in STRUCTURES.values() if (found := find(module))), None)
        if sites and not path:
            return sites
        if sites:
            hint = f"Its submodule {path!r} ({type(module).__name__}) is supported: pass net.{path}. "
            break
    raise UnsupportedNetworkError(
        f"found no long skips in {_qualified(type(net))}. {hint}Known structures: {'; '.join(STRUCTURES)}. For another "
        "network list the skips, outermost first: scalelong.apply(net, scaling, sites=[scalelong.Site('decoder.path', "
        "argument='skip'), …]); or use scalelong.register_adapter(YourClass, find_skips), or scale_skip in its forward"
    )


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def find_uvit(net: nn.Module) -> list[Site] | None:
    """U-ViT: `in_blocks`, `mid_block`, `out_blocks` called as `blk(x, skip)`."""
    inner, outer, middle, table = _parts(net, "in_blocks", "out_blocks", "mid_block", "pos_embed")
    if not _lists(inner, outer) or not _modules(middle) or len(inner) != len(outer):
        return None
    if not all(_is_linear(getattr(block, "skip_linear", None)) for block in outer):
        return None
    tokens = table.shape[1] if isinstance(table, nn.Parameter) and table.ndim == 3 else None
    sites = [
        Site(f"out_blocks.{k}", 1, channels=block.skip_linear.in_features // 2, dim=-1, tokens=tokens,
             source=f"in_blocks.{len(outer) - 1 - k}")
        for k, block in enumerate(outer)
    ]  # fmt: skip
    return sites[::-1]


def find_residual_tuples(net: nn.Module) -> list[Site] | None:
    """diffusers and MONAI: `up_blocks` take the encoder's outputs as a tuple or list, the last one first."""
    downs, ups = _parts(net, "down_blocks", "up_blocks")
    if not _lists(downs, ups) or not len(ups):
        return None
    names = [_tuple_argument(block) for block in ups]
    if "" in names or not all(len(getattr(block, "resnets", ())) for block in [*downs, *ups]):
        return None
    backbone = _channels(downs[-1].resnets[-1])[1]
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
                         norm=norm, shortcut=shortcut)
                )  # fmt: skip
            backbone = width_out
    return _with_sources(net, consumed[::-1])


def find_skip_blocks(net: nn.Module) -> list[Site] | None:
    """Hunyuan-DiT: the second half of `blocks` has a `skip_linear` and takes `skip`."""
    blocks: Any = getattr(net, "blocks", None)
    if not _lists(blocks):
        return None
    takes = [k for k, block in enumerate(blocks) if _is_linear(getattr(block, "skip_linear", None))]
    if not takes or not all("skip" in inspect.signature(blocks[k].forward).parameters for k in takes):
        return None
    if takes != list(range(len(blocks) - len(takes), len(blocks))) or len(takes) > len(blocks) // 2:
        return None
    sites = []
    for source, k in enumerate(reversed(takes)):
        norm = f"blocks.{k}.skip_norm" if _modules(getattr(blocks[k], "skip_norm", None)) else None
        width = blocks[k].skip_linear.in_features - blocks[k].skip_linear.out_features
        sites.append(Site(f"blocks.{k}", "skip", channels=width, dim=-1, source=f"blocks.{source}", norm=norm))
    return sites


def find_output_blocks(net: nn.Module) -> list[Site] | None:
    """guided-diffusion: the root feeds [backbone, skip] to `output_blocks`."""
    inner, outer, middle = _parts(net, "input_blocks", "output_blocks", "middle_block")
    if not _lists(inner, outer) or len(inner) != len(outer) or not _modules(middle):
        return None
    joins = [(f"output_blocks.{k}", block, f"input_blocks.{len(inner) - 1 - k}", block)
             for k, block in enumerate(outer)]  # fmt: skip
    return _concatenated(middle, joins)


def find_paired_ups(net: nn.Module) -> list[Site] | None:
    """lucidrains' `Unet`: `downs`, `ups` of (block, block, attention, resampling), and `final_res_block`."""
    downs, ups, final, first, middle = _parts(net, "downs", "ups", "final_res_block", "init_conv", "mid_block2")
    if not _lists(downs, ups) or len(downs) != len(ups) or not _modules(final, first, middle):
        return None
    if not all(isinstance(stage, nn.ModuleList) and len(stage) == 4 for stage in [*downs, *ups]):
        return None
    joins = []
    for s, stage in enumerate(ups):
        source = f"downs.{len(ups) - 1 - s}"
        joins += [(f"ups.{s}.0", stage[0], f"{source}.2", stage[0]), (f"ups.{s}.1", stage[1], f"{source}.0", stage[3])]
    return _concatenated(middle, [*joins, ("final_res_block", final, "init_conv", final)])


def _concatenated(middle: nn.Module, joins: list[tuple[str, nn.Module, str, nn.Module]]) -> list[Site] | None:
    """Return the sites of blocks that take [backbone, skip]: (path, block, source, last module before the next)."""
    backbone, consumed = _channels(middle)[1], []
    for path, block, source, last in joins:
        width_in = _channels(block)[0]
        if width_in is None or backbone is None or width_in <= backbone:
            return None
        first = (block[0], f"{path}.0") if isinstance(block, nn.Sequential) else (block, path)
        norm, shortcut = _norm_and_shortcut(*first)
        consumed.append(
            Site(path, 0, channels=width_in - backbone, trailing=True, source=source, norm=norm, shortcut=shortcut)
        )
        backbone = _channels(last)[1]
    return consumed[::-1]


def find_upcats(net: nn.Module) -> list[Site] | None:
    """MONAI `BasicUNet`: `upcat_k(x, x_e)` for k = 1, 2, …"""
    n = sum(name.startswith("upcat_") for name, _ in net.named_children())
    names = [f"upcat_{k}" for k in range(1, n + 1)]
    sources = ["conv_0", *(f"down_{k}" for k in range(1, n))]
    if not n or not _modules(*_parts(net, *names, *sources)):
        return None
    return [
        Site(name, "x_e", channels=_channels(net.get_submodule(source))[1], source=source)
        for name, source in zip(names, sources, strict=True)
    ]


STRUCTURES: dict[str, Callable[[nn.Module], list[Site] | None]] = {
    "in_blocks/mid_block/out_blocks with skip_linear (U-ViT)": find_uvit,
    "up_blocks taking res_hidden_states_tuple or res_hidden_states_list (diffusers, MONAI)": find_residual_tuples,
    "blocks with skip_linear taking skip (Hunyuan-DiT)": find_skip_blocks,
    "input_blocks/middle_block/output_blocks (guided-diffusion)": find_output_blocks,
    "downs/ups of four with final_res_block (lucidrains)": find_paired_ups,
    "upcat_1… (MONAI BasicUNet)": find_upcats,
}


def find_branches(net: nn.Module, kind: str) -> list[list[str]]:
    """Return the residual branches of each block of a U-ViT, in the order of the forward pass (Table 3)."""
    n = len(find_uvit(net) or ())
    blocks = [*(f"in_blocks.{k}" for k in range(n)), "mid_block", *(f"out_blocks.{k}" for k in range(n))]
    branches = [[f"{block}.attn", f"{block}.mlp"] for block in blocks]
    if not n or not {path for paths in branches for path in paths} <= {name for name, _ in net.named_modules()}:
        requires = "acts on block outputs and requires a U-ViT (blocks with attn and mlp)"
        raise UnsupportedNetworkError(f"scaling {kind!r} {requires}, got {type(net).__name__}")
    return branches


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
    names = inspect.signature(block.forward).parameters
    return next((name for name in ("res_hidden_states_tuple", "res_hidden_states_list") if name in names), "")


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
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return (linears[0].in_features, linears[-1].out_features) if linears else (None, None)


def _norm_and_shortcut(block: nn.Module, path: str) -> tuple[str | None, str | None]:
    """Return the first norm of the concatenation in a ResNet block, and the shortcut beside it."""
    modules = dict(block.named_modules(remove_duplicate=False))
    if "spatial_res_block" in modules:
        return _norm_and_shortcut(modules["spatial_res_block"], f"{path}.spatial_res_block")
    shortcut = next((n for n in ("conv_shortcut", "skip_connection", "nin_shortcut") if n in modules), None)
    for norm in ("norm1", "in_layers.0"):
        module = modules.get(norm)
        seen = getattr(module, "num_channels", getattr(module, "num_features", None))
        if module is not None and seen in (None, _channels(block)[0]):
            return f"{path}.{norm}", f"{path}.{shortcut}" if shortcut else None
    return None, None


def _with_sources(net: nn.Module, sites: list[Site]) -> list[Site]:
    """Name the modules that make the skips, if the widths of encoder outputs and skips agree."""
    downs, conv_in, first = _parts(net, "down_blocks", "conv_in", "transformer_in")
    each = [("transformer_in" if _modules(first) else "conv_in", _channels(conv_in)[1])] if _modules(conv_in) else []
    blocks = []  # the last layer of each block
    for b, block in enumerate(downs):  # every layer, and the downsampling
        layers = [(f"down_blocks.{b}.{_last(block, r)}.{r}", _channels(m)[1]) for r, m in enumerate(block.resnets)]
        after = [name for name in ("downsamplers.0", "downsampler", "skip_conv") if _modules(_get(block, name))]
        each += [*layers, *((f"down_blocks.{b}.{name}", layers[-1][1]) for name in after[-1:])]
        blocks.append(layers[-1])
    for outputs in (each, blocks[: len(sites)], blocks[-len(sites) :]):
        if [width for _, width in outputs] == [site.channels for site in sites]:
            return [replace(site, source=source) for site, (source, _) in zip(sites, outputs, strict=True)]
    return sites


def _last(block: nn.Module, r: int) -> str:
    """Return which of a down-block's lists makes the output of layer r: the last that has such a module."""
    names = ("resnets", "temp_convs", "attentions", "temp_attentions", "motion_modules")
    return [name for name in names if _modules(_get(block, f"{name}.{r}"))][-1]


def _get(module: nn.Module, path: str) -> Any:
    """Return a submodule by its path, None if there is none."""
    for name in path.split("."):
        module = getattr(module, "_modules", {}).get(name)  # type: ignore[assignment]
    return module
