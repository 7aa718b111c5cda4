"""Modules: they compute κ_i for a skip tensor. `spec.build(shapes)` makes one; `scalelong.skips` attaches it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from scalelong.errors import UnsupportedNetworkError
from scalelong.scaling.base import FixedScaling, Scaling, SkipShape
from scalelong.scaling.specs import LearnableScaling


class SkipScaling(nn.Module):
    """What acts on every long skip of one network.

    `forward(skip, i)` returns κ_i, a float or a tensor that broadcasts. If the spec is not a factor, it returns the new
    skip instead; a module with `two_sided` is called with the backbone too and returns the new (skip, backbone).
    """

    spec: Scaling
    two_sided: bool = False
    observes: bool = False  # monitors do: `observe(backbone, i)` sees the other tensor of a join
    timed: bool = False  # `observe_timestep(t)` is called before each pass, `forget_timestep()` after it
    sites: tuple[Any, ...] = ()  # where it acts; set by `scalelong.skips`
    placement: str = "join"
    reached: set[int] | None = None  # the skips of the first training pass, None after it
    frozen: tuple[str, ...] = ()  # names of the network's parameters that it has frozen
    conditioners: tuple[Any, ...] = ()  # its parts that condition blocks (SelfConditioning)
    moved: float | None = None  # relative change of the network's output, if its initial weights were measured

    def __init__(self, spec: Scaling) -> None:
        super().__init__()
        self.spec, self.reached = spec, set()
        # Read once: a compiled graph must not depend on the spec, which `set_coefficients` replaces.
        self.is_factor, self.acts_on, self.joins = spec.factor, spec.acts_on, spec.joins
        self.register_forward_pre_hook(_record_reached)

    def __call__(self, *args: Any) -> Any:
        """Return κ_i; called with one argument, return it: an `nn.Sequential` that is scaled calls all its children."""
        return args[0] if len(args) == 1 else super().__call__(*args)

    def scale(self, skip: Tensor, i: int) -> Tensor:
        """Return κ_i·skip, never in place; κ_i = 1 returns the skip itself."""
        kappa = self(skip, i)
        if not self.is_factor:
            return kappa
        return skip if isinstance(kappa, float) and kappa == 1.0 else skip * kappa

    def join(self, skip: Tensor, backbone: Tensor | None, i: int) -> tuple[Tensor, Tensor | None]:
        """Return skip and backbone as they are to be joined."""
        return self(skip, i, backbone) if self.two_sided else (self.scale(skip, i), backbone)

    def placed(self, sites: tuple[Any, ...], placement: str) -> None:
        """Record where it acts."""
        self.sites, self.placement = sites, placement

    def scalars(self) -> tuple[float, ...] | None:
        """Return κ_1…κ_N if they do not depend on the input."""
        return self.spec.coefficients(len(self.sites)) if self.is_factor and not self.timed else None

    def set(self, spec: Scaling, n: int) -> None:
        """Change the coefficients to those of `spec` on `n` long skips."""
        raise UnsupportedNetworkError(f"{self.spec} has no coefficients that can be set; use apply(…, replace=True)")

    def extra_repr(self) -> str:
        return repr(self.spec)


def _record_reached(scaler: SkipScaling, args: tuple[Tensor, int]) -> None:
    if not torch.compiler.is_compiling() and scaler.training and scaler.reached is not None:
        scaler.reached.add(args[1])


class TunableSkips(SkipScaling):
    """Constants that may change between two passes. They are no parameters and no keys in a state dict.

    Eager code reads Python numbers. A compiled graph reads a buffer, so that other values compile nothing again.
    """

    buffer: Tensor

    def __init__(self, spec: Scaling, values: tuple[float, ...]) -> None:
        super().__init__(spec)
        self.values = values
        self.register_buffer("buffer", torch.tensor(values, dtype=torch.float32, device="cpu"), persistent=False)

    def value(self, k: int) -> Any:
        return self.buffer[k] if torch.compiler.is_compiling() else self.values[k]

    def write(self, values: tuple[float, ...]) -> None:
        self.values = values
        self.buffer.copy_(torch.tensor(values, dtype=self.buffer.dtype))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the buffer with the network, but keep its values: never in half precision, never without data."""
        super()._apply(fn, recurse)
        dtype = torch.float64 if self.buffer.dtype is torch.float64 else torch.float32
        device = "cpu" if self.buffer.is_meta else self.buffer.device
        self.buffer = torch.tensor(self.values, dtype=dtype, device=device)
        return self


class FixedSkips(TunableSkips):
    """κ_i are constants."""

    def forward(self, skip: Tensor, i: int) -> Any:
        return self.value(i - 1)

    @property
    def coefficients(self) -> tuple[float, ...]:
        return self.values

    def set(self, spec: Scaling, n: int) -> None:
        kappas = spec.coefficients(n) if isinstance(spec, FixedScaling) and spec.acts_on == "skips" else None
        if kappas is None or (getattr(spec, "timesteps", None) is not None) != self.timed:
            raise UnsupportedNetworkError(f"{self.spec} can be changed to other constants, not to {spec}")
        self.spec = spec
        self.write(kappas)


class ScalarSkips(SkipScaling):
    """One learned scalar each: κ_i of a skip, initially 1 (Table 2), or ReZero's α of a block, initially 0."""

    def __init__(self, spec: Scaling, name: str, initial: list[float]) -> None:
        super().__init__(spec)
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.tensor(initial)))

    def forward(self, skip: Tensor, i: int) -> Tensor:
        values: Tensor = getattr(self, self.name)
        return values[i - 1].to(skip.dtype)

    def scalars(self) -> tuple[float, ...] | None:
        values: Tensor = getattr(self, self.name)
        return None if values.is_meta or self.acts_on != "skips" else tuple(values.tolist())


class CalibratedSkips(SkipScaling):
    """Eq. 9: κ_i = σ(ζ(GAP(x_i))), one coefficient per sample and gated unit (token or channel)."""

    def __init__(self, spec: LearnableScaling, shapes: Sequence[SkipShape]) -> None:
        super().__init__(spec)
        self.gates, self.widths = zip(*(_gate(spec, i, shape) for i, shape in enumerate(shapes, start=1)), strict=True)
        self.dims = tuple(shape.dim for shape in shapes)
        self.amplitude = 2.0 if spec.init == "identity" else 1.0  # κ = 2σ(0) = 1
        self.networks = CalibrationNetworks(spec, self.widths)
        if spec.init == "identity":
            self.networks.zero_output()

    def forward(self, skip: Tensor, i: int) -> Tensor:
        pooled, gated = self._pooled(skip, i)
        dtype = next(self.networks.parameters()).dtype  # of the network's first parameters, which may not be the skip's
        kappa = torch.sigmoid(self.networks(pooled.to(dtype), i))  # (B, width)
        if self.amplitude != 1.0:
            kappa = self.amplitude * kappa
        shape = [skip.shape[0], *([1] * (skip.ndim - 1))]
        shape[gated] = self.widths[i - 1]
        return kappa.view(shape).to(skip.dtype)

    def _pooled(self, skip: Tensor, i: int) -> tuple[Tensor, int]:
        """Return GAP(x_i), (B, width), and the axis that κ_i gates."""
        width = self.widths[i - 1]
        gated = 1 if self.gates[i - 1] == "tokens" else self.dims[i - 1] % skip.ndim
        if skip.shape[gated] != width:
            found = f"long skip {i} has {skip.shape[gated]} {self.gates[i - 1]} (shape {tuple(skip.shape)})"
            raise UnsupportedNetworkError(f"{found}, but its calibration network was built for {width}")
        pooled_dims = [d for d in range(1, skip.ndim) if d != gated]
        return skip.mean(pooled_dims) if pooled_dims else skip, gated  # no dims would mean all of them

    def is_dead(self, skip: Tensor, i: int) -> Tensor:
        """Return whether κ_i ignores its input and cannot learn from it: neither x_i nor a weight has a gradient.

        A boolean tensor on the skip's device. The module's own gradients are left alone.
        """
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(skip.device.type, enabled=False):
            pooled = self._pooled(skip.detach(), i)[0].clone().float().requires_grad_()
            weights = {k: p.detach().clone().float().requires_grad_() for k, p in self.networks.named_parameters()}
            kappa = torch.sigmoid(functional_call(self.networks, weights, (pooled, i)))
            direction = torch.linspace(0.5, 1.5, kappa.numel(), device=kappa.device).view_as(kappa)
            used = [pooled, *(w for name, w in weights.items() if not name.endswith(("bias", "shift")))]
            gradients = torch.autograd.grad((kappa * direction).sum(), used, allow_unused=True)
        return ~torch.stack([g.any() for g in gradients if g is not None]).any()


class SqueezeExcitation(nn.Module):
    """Eq. 11: W_1 ψ(W_2 x) with a bottleneck of width `hidden`."""

    def __init__(self, width_in: int, hidden: int, width_out: int, activation: str) -> None:
        super().__init__()
        self.layer1 = nn.Linear(width_in, hidden)
        self.act = {"relu": nn.ReLU, "elu": nn.ELU, "mish": nn.Mish}[activation]()
        self.layer2 = nn.Linear(hidden, width_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.act(self.layer1(x)))


class ImplicitExcitation(nn.Module):
    """IE: scale·x + shift, initialized to scale 0 and shift −1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))
        self.shift = nn.Parameter(torch.full((width,), -1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


class CalibrationNetworks(nn.Module):
    """ζ of every skip: one each (`shared=False`), one per distinct width (IE), or one for all.

    If widths differ, the one for all has the smallest, with one encoder and one decoder per width.
    """

    def __init__(self, spec: LearnableScaling, widths: Sequence[int]) -> None:
        super().__init__()
        smallest, distinct = min(widths), sorted(set(widths))
        self.keys = tuple(str(width) for width in widths)
        self.each, self.by_width = nn.ModuleList(), nn.ModuleDict()
        if not spec.shared:
            self.each.extend(_zeta(spec, width) for width in widths)  # each[0] belongs to i = 1
        elif spec.calibration == "ie":  # has nothing to share across widths
            self.by_width.update({str(width): _zeta(spec, width) for width in distinct})
        else:
            self.zeta = _zeta(spec, smallest)
            self.encoders, self.decoders = nn.ModuleDict(), nn.ModuleDict()
            for width in distinct if len(distinct) > 1 else ():
                hidden = max(1, width // max(1, width // 4))  # r_i = ⌊N_i/4⌋ is the ratio
                self.encoders[str(width)] = SqueezeExcitation(width, hidden, smallest, spec.activation)  # Eq. 12
                self.decoders[str(width)] = SqueezeExcitation(smallest, hidden, width, spec.activation)  # Eq. 13

    def forward(self, pooled: Tensor, i: int) -> Tensor:
        key = self.keys[i - 1]
        if self.each:
            return self.each[i - 1](pooled)
        if self.by_width:
            return self.by_width[key](pooled)
        if not self.encoders:
            return self.zeta(pooled)
        return self.decoders[key](self.zeta(self.encoders[key](pooled)))

    def zero_output(self) -> None:
        """Make ζ(x) = 0 for every x, with a gradient: the layer before the sigmoid is zero."""
        network: Any
        for network in self.each or self.by_width.values() or self.decoders.values() or [self.zeta]:
            ie = isinstance(network, ImplicitExcitation)
            for parameter in [network.shift] if ie else network.layer2.parameters():
                nn.init.zeros_(parameter)


def _zeta(spec: LearnableScaling, width: int) -> nn.Module:
    if spec.calibration == "ie":
        return ImplicitExcitation(width)
    return SqueezeExcitation(width, max(1, width // spec.reduction), width, spec.activation)


def _gate(spec: LearnableScaling, i: int, shape: SkipShape) -> tuple[str, int]:
    """Return what skip i's κ gates ("tokens" or "channels") and how many there are."""
    gate = spec.gate or ("channels" if shape.tokens is None else "tokens")
    width = shape.tokens if gate == "tokens" else shape.channels
    if width is None:
        hint = 'use gate="channels"' if gate == "tokens" else "pass it as Site(channels=…)"
        raise UnsupportedNetworkError(f'gate="{gate}" requires the number of {gate} of long skip {i}; {hint}')
    return gate, width
