"""μP: tune the learning rate on a narrow network, train the wide one with it (Yang et al., 2022).

A parameter's role follows from which of its dimensions grow with the width n. With m = n / base_width, W = m^−a·W̃,
an initial std ∝ m^−b and a learning rate of Adam ∝ m^−c:

    role     what grows            (a, b, c)    for example
    input    fan_out, or a vector  (0, 0, 0)    patch, position, label and context embeddings, biases, norm gains
    hidden   fan_in and fan_out    (0, ½, 1)    qkv, proj, fc1, fc2, the time MLP, skip_linear (fan_in 2n)
    output   fan_in                (1, 0, 0)    decoder_pred; starts at zero
    finite   nothing               (0, 0, 0)    the last 3×3 convolution

Adam sees no difference between (1, 0, 0) and (0, 1, 1), so `output` is implemented as the latter: nothing is multiplied
in `forward`, no tensor carries an attribute, and initial weights and parameter groups are all there is. The same holds
for CompleteP's factor 1/m_L on residual branches (Dey et al., 2025), which moves into the last layer of each branch.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scalelong.errors import InvalidValueError, invalid
from scalelong.skips import parameters
from scalelong.skips.application import apply_quietly, unwrapped
from scalelong.skips.hooks import scaling_of

ABC = {"input": (0.0, 0.0, 0.0), "hidden": (0.0, 0.5, 1.0), "output": (1.0, 0.0, 0.0), "finite": (0.0, 0.0, 0.0)}
# The arguments that grow with the width, the width itself first. Heads keep their width: UNet2DModel's
# attention_head_dim is that width, UNet2DConditionModel's is the number of heads.
WIDTHS = {
    "UViT": ("embed_dim", "num_heads"),
    "UNet2DModel": ("block_out_channels",),
    "UNet2DConditionModel": ("block_out_channels", "attention_head_dim"),
}
READ_OUT = {"UViT": "decoder_pred", "UNet2DModel": "conv_out", "UNet2DConditionModel": "conv_out"}
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class Role:
    """What a parameter is to μP, and how it differs from the standard parametrization at this width and depth.

    `lr`, `init` and `eps` are factors on the learning rate, the initial values and Adam's ε.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    lr: float
    init: float
    eps: float


@dataclass(frozen=True)
class Roles:
    """The roles of all parameters, by name; `print(roles(net))` shows them as a table."""

    rows: tuple[Role, ...]

    def __getitem__(self, name: str) -> Role:
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("parameter", "shape", "role", "(a, b, c)", "lr", "init", "ε")]
        for row in self.rows:
            abc = "({:g}, {:g}, {:g})".format(*ABC[row.role])
            factors = (f"× {value:.4g}" for value in (row.lr, row.init, row.eps))
            lines.append((row.name, "×".join(map(str, row.shape)) or "scalar", row.role, abc, *factors))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, tuple("─" * width for width in widths))
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def roles(
    net: nn.Module, base_width: int | None = None, base_depth: int | None = None, *, base: nn.Module | None = None
) -> Roles:
    """Return the role of every parameter, from the names and shapes of `net` alone.

    It works on the meta device, after loading, and inside DDP, FSDP2 and torch.compile.

    Args:
        net: A `UViT` or a diffusers `UNet2DModel` or `UNet2DConditionModel`; any other network together with `base`.
        base_width: Width at which μP equals the standard parametrization: `embed_dim` of a U-ViT, the first of
            `block_out_channels` of a U-Net. Default: the network's own, where every factor is 1.
        base_depth: Depth of a U-ViT at which CompleteP (α = 1) equals the standard parametrization. Default: its own.
        base: The same network at its base width, on any device, instead of `base_width`. What differs in shape grows.

    Returns:
        The roles by name; they print as a table.

    Examples:
        >>> net = scalelong.UViT(8, 4, embed_dim=64, depth=2, num_heads=4)
        >>> row = scalelong.mup.roles(net, base_width=16)["mid_block.attn.qkv.weight"]
        >>> row.role, row.lr
        ('hidden', 0.25)
    """
    root = unwrapped(net, allow_wrappers=True)
    if base is not None and base_width is not None:
        raise InvalidValueError("base_width and base exclude each other; pass one of them")
    other = _doubled(root) if base is None else unwrapped(base, allow_wrappers=True)
    width = None if base is not None else _multiplier("base_width", _argument(root, 0), base_width)
    depth = _multiplier("base_depth", _depth(root), base_depth) if base_depth is not None else 1.0
    sizes, shapes = _shapes(root, root), _shapes(root, other)
    modules, calibration = dict(root.named_modules()), {id(p) for p in parameters(root)}
    rows = []
    for name, parameter in root.named_parameters():
        shape, former = tuple(parameter.shape), shapes[name]
        path, _, kind = name.rpartition(".")
        module, fan_in = modules[path], _fan_in(modules[path], kind, shape)
        role = _role(shape, former, fan_in)
        m = width or _growth(shape, former, fan_in)
        # How the std of what the constructor drew depends on the width: U-ViT's linear layers have one at every width.
        drawn = 1.0
        if not (_is(root, "UViT") and isinstance(module, nn.Linear)) or id(parameter) in calibration:
            fan, base_fan = (_drawn_fan(module, name, known) for known in (sizes, shapes))
            drawn = 1.0 if fan == base_fan else width or fan / base_fan
        a, b, c = ABC[role]
        end, inside = (depth if _branch(path) == where else 1.0 for where in ("end", "inside"))
        # Gradients of all but the output layer pass through its weights, which are ∝ 1/m.
        eps = 1 / m if role in ("input", "hidden") else 1.0
        init = math.sqrt(drawn / m ** (2 * (a + b))) / end
        rows.append(Role(name, shape, role, m ** -(a + c) / end, init, eps / inside))
    return Roles(tuple(rows))


def init_(
    net: nn.Module, base_width: int | None = None, base_depth: int | None = None, *,
    base: nn.Module | None = None, zero_output: bool | str | Sequence[str] = True,
) -> nn.Module:  # fmt: skip
    """Rescale freshly drawn weights of `net` to μP, in place, and return it. Call it once, after `apply`.

    It assumes the weights as the constructors of `UViT` or of PyTorch's layers draw them: linear and convolutional
    layers, `nn.MultiheadAttention`, RNN, GRU and LSTM. Any other parameter counts as drawn with one std at every width.

    Args:
        net: The network.
        base_width: As in `roles`.
        base_depth: As in `roles`.
        base: As in `roles`.
        zero_output: Start the network's read-out at zero: `decoder_pred` of a U-ViT, `conv_out` of a diffusers U-Net;
            with `base`, the last registered layer of role output, or the modules whose paths you pass. Without it the
            network at its base width is bit for bit the standard one.

    Returns:
        `net` itself.

    Examples:
        >>> net = scalelong.mup.init_(scalelong.UViT(8, 4, embed_dim=64, depth=2, num_heads=4), base_width=16)
        >>> net.decoder_pred.weight.abs().sum()
        tensor(0., grad_fn=<SumBackward0>)
    """
    table, root = roles(net, base_width, base_depth, base=base), unwrapped(net, allow_wrappers=True)
    named, zeroed = dict(root.named_parameters()), _zeroed(root, table, zero_output)
    with torch.no_grad():
        for row in table.rows:
            if row.name.rpartition(".")[0] in zeroed:
                named[row.name].zero_()
            elif row.init != 1.0:
                named[row.name].mul_(row.init)
    return net


def param_groups(
    net: nn.Module, lr: float, weight_decay: float = 0.0, base_width: int | None = None, base_depth: int | None = None,
    *, base: nn.Module | None = None, eps: float | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return parameter groups for Adam or AdamW in which every role has its learning rate.

    Weight decay grows as the learning rate shrinks, so that their product, which decoupled weight decay applies, is the
    same at every width.

    Args:
        net: The network.
        lr: Learning rate tuned at the base width.
        weight_decay: Weight decay at the base width.
        base_width: As in `roles`.
        base_depth: As in `roles`.
        base: As in `roles`.
        eps: Adam's ε at the base width; the groups then have one that follows the size of their gradients.

    Returns:
        The groups: the one with `lr` itself first, then by falling learning rate.

    Examples:
        >>> net = scalelong.UViT(8, 4, embed_dim=64, depth=2, num_heads=4)
        >>> optimizer = torch.optim.AdamW(scalelong.mup.param_groups(net, 2e-4, 0.03, base_width=16))
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.0002, 5e-05]
    """
    if not lr > 0:
        raise invalid("lr", "a number > 0", lr)
    if not weight_decay >= 0:
        raise invalid("weight_decay", "a number >= 0", weight_decay)
    named = dict(unwrapped(net, allow_wrappers=True).named_parameters())
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list, {(1.0, 1.0): []})
    for row in roles(net, base_width, base_depth, base=base).rows:
        if named[row.name].requires_grad:
            groups[row.lr, row.eps if eps is not None else 1.0].append(named[row.name])
    # The first group's learning rate is the one that training logs.
    ordered = sorted(((k, params) for k, params in groups.items() if params), key=lambda x: (x[0][0] != 1.0, -x[0][0]))
    return [
        {"params": params, "lr": lr * factor, "weight_decay": weight_decay / factor}
        | ({} if eps is None else {"eps": eps * own_eps})
        for (factor, own_eps), params in ordered
    ]


def _shapes(root: nn.Module, other: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter in `other`. Numbers in names may differ: LS names modules by their width."""
    own, others = (list(net.named_parameters(remove_duplicate=False)) for net in (root, other))
    for (name, p), (name_2, p_2) in zip(own, others, strict=False):
        if re.sub(r"\d+", "#", name) != re.sub(r"\d+", "#", name_2) or p.ndim != p_2.ndim:
            raise InvalidValueError(f"{name} has no counterpart in the base network ({name_2}); build both alike")
    if len(own) != len(others):
        raise InvalidValueError(f"the base network has {len(others)} parameters, not {len(own)}; build both alike")
    return {name: tuple(p.shape) for (name, _), (_, p) in zip(own, others, strict=True)}


def _role(shape: tuple[int, ...], former: tuple[int, ...], fan_in: int | None) -> str:
    grows = [a != b for a, b in zip(shape, former, strict=True)]
    if sum(grows) == 0:
        return "finite"
    if sum(grows) > 1:
        return "hidden"
    return "output" if fan_in is not None and grows[fan_in] else "input"


def _fan_in(module: nn.Module, kind: str, shape: tuple[int, ...]) -> int | None:
    """The dimension of a parameter that its layer sums over; None for a vector or an embedding."""
    if isinstance(module, _WEIGHTED + _TRANSPOSED):
        return None if kind != "weight" else 0 if isinstance(module, _TRANSPOSED) else 1
    return 1 if isinstance(module, (nn.MultiheadAttention, *_RECURRENT)) and len(shape) == 2 else None


def _growth(shape: tuple[int, ...], former: tuple[int, ...], fan_in: int | None) -> float:
    """How much the fan-in has grown, or else the last dimension that has."""
    if fan_in is not None and shape[fan_in] != former[fan_in]:
        return shape[fan_in] / former[fan_in]
    return next((a / b for a, b in reversed(list(zip(shape, former, strict=True))) if a != b), 1.0)


def _drawn_fan(module: nn.Module, name: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """A number ∝ 1/std² of what PyTorch draws for a parameter, by the shapes of its module's parameters."""
    path, dot, kind = name.rpartition(".")
    if isinstance(module, _WEIGHTED + _TRANSPOSED) and "weight" in module._parameters:
        return shapes[f"{path}{dot}weight"][1]  # of biases too, and of a ConvTranspose, whose fan_in is dimension 0
    if isinstance(module, _RECURRENT):
        return shapes[f"{path}{dot}{next(iter(module._parameters))}"][0]  # of weight_ih: gates · hidden_size
    if isinstance(module, nn.MultiheadAttention) and kind != "in_proj_bias":  # Xavier: fan_in + fan_out
        return shapes[name][-1] if kind in ("bias_k", "bias_v") else sum(shapes[name])
    return 1


def _zeroed(root: nn.Module, table: Roles, zero_output: bool | str | Sequence[str]) -> set[str]:
    """The paths of the modules that start at zero."""
    if zero_output is True:
        if (known := _known(root)) is not None:
            return {READ_OUT[known.__name__]}
        # A gate or an adapter to a fixed width has the role of an output too, and would stay dead at zero.
        named, calibration = dict(root.named_parameters()), {id(p) for p in parameters(root)}
        rows = [row for row in table.rows if row.role == "output" and id(named[row.name]) not in calibration]
        return {row.name.rpartition(".")[0] for row in rows[-1:]}
    paths = [zero_output] if isinstance(zero_output, str) else list(zero_output or ())
    modules = dict(root.named_modules())
    for path in paths:
        if not getattr(modules.get(path), "_parameters", None):
            raise invalid("zero_output", "True, False or paths of modules with weights", path)
    return set(paths)


def _branch(path: str) -> str:
    """Where a module of a U-ViT stands in a residual branch: its last layer ("end"), before it ("inside"), or ""."""
    if path.endswith((".attn.proj", ".mlp.fc2")):
        return "end"
    return "inside" if any(part in path.split(".") for part in ("norm1", "attn", "norm2", "mlp")) else ""


def _known(net: nn.Module) -> type[nn.Module] | None:
    """The class of ours or of diffusers that `net` is, not one of another package with the same name."""
    ours = (cls for cls in type(net).__mro__ if cls.__module__.partition(".")[0] in ("scalelong", "diffusers"))
    return next((cls for cls in ours if cls.__name__ in WIDTHS), None)  # FSDP2 makes a subclass of its own


def _is(net: nn.Module, name: str) -> bool:
    return (known := _known(net)) is not None and known.__name__ == name


def _class(net: nn.Module) -> type[nn.Module]:
    known = _known(net)
    if known is None:
        hint = "pass base=, the same network at its base width (it may be on the meta device)"
        raise InvalidValueError(
            f"the width of a {type(net).__name__} is not known to mup ({', '.join(WIDTHS)}); {hint}"
        )
    return known


def _argument(net: nn.Module, index: int) -> int:
    value: Any = net.config[WIDTHS[_class(net).__name__][index]]  # type: ignore[index]
    return int(value[0] if isinstance(value, (tuple, list)) else value)


def _depth(net: nn.Module) -> int:
    if not _is(net, "UViT"):
        raise invalid("base_depth", "None for a network other than UViT", type(net).__name__)
    return int(net.config["depth"])  # type: ignore[index]


def _multiplier(name: str, own: int, base: int | None) -> float:
    if base is not None and (isinstance(base, bool) or not isinstance(base, int) or base < 1):
        raise invalid(name, "an integer >= 1", base)
    return own / (base or own)


def _doubled(root: nn.Module) -> nn.Module:
    """The same network at twice the width, without memory: what differs in shape is what grows."""
    cls = _class(root)
    names = [name for name in inspect.signature(cls).parameters if name in root.config and name != "scaling"]  # type: ignore[operator]
    config: dict[str, Any] = {name: root.config[name] for name in names}  # type: ignore[index]
    for name in WIDTHS[cls.__name__]:
        value = config[name]
        config[name] = tuple(2 * v for v in value) if isinstance(value, (tuple, list)) else 2 * value
    scaler = scaling_of(root)
    with torch.device("meta"):
        other = cls(**config)
        return other if scaler is None else apply_quietly(other, scaler.spec.built)
