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
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scalelong.errors import InvalidValueError, invalid
from scalelong.skips import apply, parameters
from scalelong.skips.application import unwrapped
from scalelong.skips.hooks import scaling_of

ABC = {"input": (0.0, 0.0, 0.0), "hidden": (0.0, 0.5, 1.0), "output": (1.0, 0.0, 0.0), "finite": (0.0, 0.0, 0.0)}
# The arguments that grow with the width, the width itself first. Heads keep their width: UNet2DModel's
# attention_head_dim is that width, UNet2DConditionModel's is the number of heads.
WIDTHS = {
    "UViT": ("embed_dim", "num_heads"),
    "UNet2DModel": ("block_out_channels",),
    "UNet2DConditionModel": ("block_out_channels", "attention_head_dim"),
}
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


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
    shapes = _shapes(root, other)
    modules, calibration = dict(root.named_modules()), {id(p) for p in parameters(root)}
    rows = []
    for name, parameter in root.named_parameters():
        shape, former = tuple(parameter.shape), shapes[name]
        path, _, kind = name.rpartition(".")
        role = _role(modules[path], kind, shape, former)
        m = width or next((a / b for a, b in reversed(list(zip(shape, former, strict=True))) if a != b), 1.0)
        # How the std of what the constructor drew depends on the width: U-ViT's linear layers have one std at every
        # width; PyTorch's default for weights and biases is 1/√fan_in.
        fan_in_grows = isinstance(modules[path], _WEIGHTED + _TRANSPOSED) and _role(
            modules[path], "weight", modules[path].weight.shape, shapes[f"{path}.weight"]
        ) in ("hidden", "output")
        one_std = _is(root, "UViT") and isinstance(modules[path], nn.Linear) and id(parameter) not in calibration
        drawn = 0.5 if fan_in_grows and not one_std else 0.0
        a, b, c = ABC[role]
        end, inside = (depth if _branch(path) == where else 1.0 for where in ("end", "inside"))
        # Gradients of all but the output layer pass through its weights, which are ∝ 1/m.
        eps = 1 / m if role in ("input", "hidden") else 1.0
        rows.append(Role(name, shape, role, m ** -(a + c) / end, m ** (drawn - a - b) / end, eps / inside))
    return Roles(tuple(rows))


def init_(
    net: nn.Module, base_width: int | None = None, base_depth: int | None = None, *,
    base: nn.Module | None = None, zero_output: bool = True,
) -> nn.Module:  # fmt: skip
    """Rescale freshly drawn weights of `net` to μP, in place, and return it. Call it once, after `apply`.

    It assumes the weights as the constructors of `UViT` or of PyTorch's layers draw them.

    Args:
        net: The network.
        base_width: As in `roles`.
        base_depth: As in `roles`.
        base: As in `roles`.
        zero_output: Start the output layer at zero, at every width. Without it the network at its base width is bit
            for bit the standard one.

    Returns:
        `net` itself.

    Examples:
        >>> net = scalelong.mup.init_(scalelong.UViT(8, 4, embed_dim=64, depth=2, num_heads=4), base_width=16)
        >>> net.decoder_pred.weight.abs().sum()
        tensor(0., grad_fn=<SumBackward0>)
    """
    table, own = roles(net, base_width, base_depth, base=base), {id(p) for p in parameters(net)}
    with torch.no_grad():
        named = dict(unwrapped(net, allow_wrappers=True).named_parameters())
        outputs = {row.name.removesuffix(".weight") for row in table.rows if row.role == "output"}
        for row in table.rows:
            if zero_output and row.name.rpartition(".")[0] in outputs and id(named[row.name]) not in own:
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
    same at every width. The learning rate of the first group is `lr` itself.

    Args:
        net: The network.
        lr: Learning rate tuned at the base width.
        weight_decay: Weight decay at the base width.
        base_width: As in `roles`.
        base_depth: As in `roles`.
        base: As in `roles`.
        eps: Adam's ε at the base width; the groups then have one that follows the size of their gradients.

    Returns:
        The groups, the largest learning rate first.

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
    ordered = sorted(((key, params) for key, params in groups.items() if params), key=lambda item: -item[0][0])
    return [
        {"params": params, "lr": lr * factor, "weight_decay": weight_decay / factor}
        | ({} if eps is None else {"eps": eps * own_eps})
        for (factor, own_eps), params in ordered
    ]


def _shapes(root: nn.Module, other: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter in `other`. Numbers in names may differ: LS names modules by their width."""
    own, others = list(root.named_parameters()), list(other.named_parameters())
    for (name, p), (name_2, p_2) in zip(own, others, strict=False):
        if re.sub(r"\d+", "#", name) != re.sub(r"\d+", "#", name_2) or p.ndim != p_2.ndim:
            raise InvalidValueError(f"{name} has no counterpart in the base network ({name_2}); build both alike")
    if len(own) != len(others):
        raise InvalidValueError(f"the base network has {len(others)} parameters, not {len(own)}; build both alike")
    return {name: tuple(p.shape) for (name, _), (_, p) in zip(own, others, strict=True)}


def _role(module: nn.Module, kind: str, shape: tuple[int, ...], former: tuple[int, ...]) -> str:
    grows = [a != b for a, b in zip(shape, former, strict=True)]
    if sum(grows) == 0:
        return "finite"
    if sum(grows) > 1:
        return "hidden"
    fan_in = 0 if isinstance(module, _TRANSPOSED) else 1 if isinstance(module, _WEIGHTED) else None
    return "output" if kind == "weight" and fan_in is not None and grows[fan_in] else "input"


def _branch(path: str) -> str:
    """Where a module of a U-ViT stands in a residual branch: its last layer ("end"), before it ("inside"), or ""."""
    if path.endswith((".attn.proj", ".mlp.fc2")):
        return "end"
    return "inside" if any(part in path.split(".") for part in ("norm1", "attn", "norm2", "mlp")) else ""


def _is(net: nn.Module, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(net).__mro__)  # FSDP2 makes a subclass of its own


def _class(net: nn.Module) -> type[nn.Module]:
    known = next((cls for cls in type(net).__mro__ if cls.__name__ in WIDTHS), None)
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
        return other if scaler is None else apply(other, scaler.spec)
