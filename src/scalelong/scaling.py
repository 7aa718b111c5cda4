"""What κ is: specs (frozen, validated, JSON-ready) of every scaling, and the modules that execute them.

A spec says what is wanted and knows nothing of a network. `build(spec, shapes)` makes the one module that
gives κ_i for a skip tensor; `scalelong.skips` decides where in a network it acts.
Skip index i runs from 1 (outermost) to N (innermost).
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scalelong.errors import ScaleLongError, ScalingWarning, unknown

# ------------------------------------------------------------------------------------------------ specs


@dataclass(frozen=True)
class Scaling:
    """The base of every spec. `kind` is its name in JSON and on the command line."""

    kind: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Scaling:
        if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
            raise ScaleLongError(f"a scaling is an object with a 'kind', not {values!r}")
        options = {str(key): value for key, value in values.items() if key != "kind"}
        return _construct(values["kind"], options)

    @staticmethod
    def from_json(text: str) -> Scaling:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ScaleLongError(f"a scaling must be JSON: {error}") from error
        return Scaling.from_dict(values)


@dataclass(frozen=True)
class FixedScaling(Scaling):
    """A scaling whose κ_1…κ_N are constants."""

    def coefficients(self, n: int) -> tuple[float, ...]:
        """κ_1…κ_N for N = `n` long skips, outermost first."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoScaling(FixedScaling):
    """κ_i = 1: the paper's standard U-Net."""

    kind: ClassVar[str] = "none"

    def coefficients(self, n: int) -> tuple[float, ...]:
        return (1.0,) * _count(n)


@dataclass(frozen=True)
class UniformScaling(FixedScaling):
    """κ_i = value; the default 1/√2 is the paper's "1/√2-CS"."""

    value: float = 2**-0.5
    kind: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _positive("value", self.value))

    def coefficients(self, n: int) -> tuple[float, ...]:
        return (self.value,) * _count(n)


@dataclass(frozen=True)
class ConstantScaling(FixedScaling):
    """CS, Eq. 8: κ_i = κ^(i−1). `reverse=True` is Table 4's κ_i = κ^(N−i+1)."""

    kappa: float
    reverse: bool = False
    kind: ClassVar[str] = "cs"

    def __post_init__(self) -> None:
        object.__setattr__(self, "kappa", _positive("kappa", self.kappa))
        if not isinstance(self.reverse, bool):
            raise ScaleLongError(f"reverse is true or false, not {self.reverse!r}")
        if self.kappa > 1:
            warnings.warn(
                f"kappa = {self.kappa:g} is above 1, which makes training less stable (the paper's Fig. 13); "
                "its range is 0.5 to 0.95",
                ScalingWarning,
                stacklevel=3,
            )

    def coefficients(self, n: int) -> tuple[float, ...]:
        if self.reverse:
            return tuple(self.kappa ** (n - i + 1) for i in range(1, _count(n) + 1))
        return tuple(self.kappa ** (i - 1) for i in range(1, _count(n) + 1))


@dataclass(frozen=True)
class ExplicitScaling(FixedScaling):
    """κ_1…κ_N given one by one, outermost first. 0 cuts a skip."""

    values: tuple[float, ...]
    kind: ClassVar[str] = "explicit"

    def __init__(self, coefficients: Sequence[float]) -> None:
        try:
            given = [] if isinstance(coefficients, (str, bytes)) else list(coefficients)
        except TypeError:
            given = []
        values = tuple(_number(f"coefficients[{k}]", value) for k, value in enumerate(given))
        if not values or min(values) < 0:
            raise ScaleLongError(f"coefficients is a list of numbers, κ_1 to κ_N, none below 0, not {coefficients!r}")
        object.__setattr__(self, "values", values)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "coefficients": list(self.values)}

    def coefficients(self, n: int) -> tuple[float, ...]:
        if len(self.values) != n:
            raise ScaleLongError(f"coefficients has {len(self.values)} numbers but the network has {n} long skips")
        return self.values


@dataclass(frozen=True)
class LearnableScaling(Scaling):
    """LS, Eqs. 9–13: κ_i = σ(ζ(GAP(x_i))) with the calibration network ζ of Table 2.

    calibration: "se" (two matrices with a bottleneck), "ie" (a scale and a shift), "scalar" (κ_i itself learned).
    gate: "tokens" or "channels"; None takes tokens where their number is fixed, channels elsewhere.
    init: "paper" (PyTorch's own: κ starts near 0.5) or "identity" (κ = 2σ(ζ), exactly 1 at first).
    """

    calibration: str = "se"
    reduction: int = 16
    activation: str = "relu"
    shared: bool = True
    gate: str | None = None
    init: str = "paper"
    kind: ClassVar[str] = "ls"

    def __post_init__(self) -> None:
        _one_of("calibration", self.calibration, ("se", "ie", "scalar"))
        _one_of("activation", self.activation, tuple(ACTIVATIONS))
        _one_of("init", self.init, ("paper", "identity"))
        if self.gate is not None:
            _one_of("gate", self.gate, ("tokens", "channels"))
        if isinstance(self.reduction, bool) or not isinstance(self.reduction, int) or self.reduction < 1:
            raise ScaleLongError(f"reduction is a whole number from 1 up, not {self.reduction!r}")
        if not isinstance(self.shared, bool):
            raise ScaleLongError(f"shared is true or false, not {self.shared!r}")


@dataclass(frozen=True)
class BlockScaling(Scaling):
    """The baselines of Table 3 scale the outputs of blocks, x + τ·f(x), and leave the long skips alone."""


@dataclass(frozen=True)
class StableScaling(BlockScaling):
    """ "stable τ": x + τ·f(x) with τ fixed."""

    tau: float = 0.1
    kind: ClassVar[str] = "stable"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", _positive("tau", self.tau))


@dataclass(frozen=True)
class ReZeroScaling(BlockScaling):
    """ReZero: x + α·f(x), one α a block, learned from 0."""

    kind: ClassVar[str] = "rezero"


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "elu": nn.ELU, "mish": nn.Mish}

_KINDS: dict[str, type[Scaling]] = {
    spec.kind: spec
    for spec in (
        NoScaling,
        UniformScaling,
        ConstantScaling,
        LearnableScaling,
        ExplicitScaling,
        StableScaling,
        ReZeroScaling,
    )
}
NAMES = ("none", "uniform", "cs", "cs-reverse", "ls", "explicit", "stable", "rezero")


def parse_scaling(scaling: str | dict[str, Any] | Scaling | None, **options: Any) -> Scaling:
    """A spec from its short name and options: `parse_scaling("cs", kappa=0.7)`.

    Options that are None count as not given. A spec, a `to_dict()` and None (no scaling) pass through.
    """
    options = {key: value for key, value in options.items() if value is not None}
    if isinstance(scaling, str):
        name = scaling.strip().lower()
        if name == "cs-reverse":
            return _construct("cs", {**options, "reverse": True})
        if name == "uniform" and "kappa" in options:
            options["value"] = options.pop("kappa")
        return _construct(name, options)
    if options:
        raise ScaleLongError(f"options {sorted(options)} go with a scaling's name, not with {scaling!r}")
    if scaling is None:
        return NoScaling()
    if isinstance(scaling, dict):
        return Scaling.from_dict(scaling)
    if isinstance(scaling, Scaling):
        return scaling
    raise ScaleLongError(f"a scaling is a spec such as ConstantScaling(0.7) or a name, not {scaling!r}")


def _construct(kind: str, options: dict[str, Any]) -> Scaling:
    if kind not in _KINDS:
        raise unknown("scaling", kind, NAMES)
    spec = _KINDS[kind]
    fields = ["coefficients"] if spec is ExplicitScaling else [f.name for f in dataclasses.fields(spec)]
    for option in options:
        if option not in fields:
            raise unknown(f"option of scaling {kind!r}:", option, fields or ["none"])
    if spec is ConstantScaling and "kappa" not in options:
        raise ScaleLongError("scaling 'cs' needs kappa, a number in (0, 1] such as 0.7")
    if spec is ExplicitScaling and "coefficients" not in options:
        raise ScaleLongError("scaling 'explicit' needs coefficients, κ_1 to κ_N")
    return spec(**options)


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str, bytes)):
        raise ScaleLongError(f"{name} is a number, not {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ScaleLongError(f"{name} is a number, not {value!r}") from error
    if not math.isfinite(number):
        raise ScaleLongError(f"{name} is a finite number, not {number}")
    return number


def _positive(name: str, value: Any) -> float:
    number = _number(name, value)
    if number <= 0:
        raise ScaleLongError(f"{name} is a number above 0, not {number:g}")
    return number


def _one_of(name: str, value: Any, options: tuple[str, ...]) -> None:
    if value not in options:
        raise unknown(name, str(value), options)


def _count(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ScaleLongError(f"the number of long skips is a whole number from 1 up, not {n!r}")
    return n


# ---------------------------------------------------------------------------------------------- modules


@dataclass(frozen=True)
class SkipShape:
    """What is known of one long skip before it is seen.

    channels: its feature width. dim: the axis that holds it (1 for maps and volumes, −1 for tokens (B, L, D)).
    tokens: their number, where a learned position table fixes it.
    """

    channels: int | None
    dim: int = 1
    tokens: int | None = None


class SkipScaling(nn.Module):
    """κ of every long skip of one network: `forward(x_i, i)` gives κ_i, a float or a tensor that broadcasts."""

    spec: Scaling
    sites: tuple[Any, ...] = ()  # where it acts: set by `scalelong.skips` when it joins a network
    placement: str = "join"

    def forward(self, skip: Tensor, i: int) -> float | Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return repr(self.spec)


class FixedSkips(SkipScaling):
    """Constants: no parameter, no buffer, no key in a state dict."""

    def __init__(self, spec: FixedScaling, n: int) -> None:
        super().__init__()
        self.spec = spec
        self.coefficients = spec.coefficients(n)

    def forward(self, skip: Tensor, i: int) -> float:
        return self.coefficients[i - 1]


class ScalarSkips(SkipScaling):
    """Table 2's "learnable κ_i": one number a skip, from 1."""

    def __init__(self, spec: LearnableScaling, n: int) -> None:
        super().__init__()
        self.spec = spec
        self.kappa = nn.Parameter(torch.ones(n))

    def forward(self, skip: Tensor, i: int) -> Tensor:
        return self.kappa[i - 1].to(skip.dtype)


class CalibratedSkips(SkipScaling):
    """Eq. 9: κ_i = σ(ζ(GAP(x_i))), one coefficient a gated unit (token or channel) and sample."""

    def __init__(self, spec: LearnableScaling, shapes: Sequence[SkipShape]) -> None:
        super().__init__()
        self.spec = spec
        self.gates = tuple(_gate(spec, i, shape) for i, shape in enumerate(shapes, start=1))
        self.widths = tuple(_gated_width(gate, i, shapes[i - 1]) for i, gate in enumerate(self.gates, start=1))
        self.dims = tuple(shape.dim for shape in shapes)
        self.amplitude = 2.0 if spec.init == "identity" else 1.0  # κ = 2σ(0) = 1
        self.networks = _calibration_networks(spec, self.widths)

    def forward(self, skip: Tensor, i: int) -> Tensor:
        width, gated = (
            self.widths[i - 1],
            1 if self.gates[i - 1] == "tokens" else self.dims[i - 1] % skip.ndim,
        )
        if skip.shape[gated] != width:
            raise ScaleLongError(
                f"long skip {i} has {skip.shape[gated]} {self.gates[i - 1]} but its calibration network was made "
                f"for {width} (shape {tuple(skip.shape)})"
            )
        pooled_dims = [d for d in range(1, skip.ndim) if d != gated]
        pooled = skip.mean(pooled_dims) if pooled_dims else skip  # GAP: (B, width); no dims would mean all of them
        zeta = self.networks(pooled, i)  # (B, width)
        kappa = torch.sigmoid(zeta)
        if self.amplitude != 1.0:
            kappa = self.amplitude * kappa
        shape = [skip.shape[0], *([1] * (skip.ndim - 1))]
        shape[gated] = width
        return kappa.view(shape).to(skip.dtype)


class SqueezeExcitation(nn.Module):
    """Eq. 11: W_1 ψ(W_2 x) with a bottleneck, the hidden width given."""

    def __init__(self, width_in: int, hidden: int, width_out: int, activation: str) -> None:
        super().__init__()
        self.layer1 = nn.Linear(width_in, hidden)
        self.act = ACTIVATIONS[activation]()
        self.layer2 = nn.Linear(hidden, width_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.act(self.layer1(x)))


class ImplicitExcitation(nn.Module):
    """IE: scale·x + shift, from scale 0 and shift −1 (0 where κ must start at 1)."""

    def __init__(self, width: int, identity: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))
        self.shift = nn.Parameter(torch.full((width,), 0.0 if identity else -1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


class OwnNetworks(nn.Module):
    """`shared=False`: each skip has its own ζ, of its own width."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(networks)  # each[0] belongs to i = 1

    def forward(self, pooled: Tensor, i: int) -> Tensor:
        return self.each[i - 1](pooled)


class WidthNetworks(nn.Module):
    """One network a distinct width (IE has nothing to share across widths)."""

    def __init__(self, widths: Sequence[int], networks: dict[int, nn.Module]) -> None:
        super().__init__()
        self.keys = tuple(str(width) for width in widths)
        self.by_width = nn.ModuleDict({str(width): network for width, network in networks.items()})

    def forward(self, pooled: Tensor, i: int) -> Tensor:
        return self.by_width[self.keys[i - 1]](pooled)


class SharedNetwork(nn.Module):
    """One ζ for all skips; where widths differ, at the smallest, between an encoder and a decoder a width."""

    def __init__(self, spec: LearnableScaling, widths: Sequence[int]) -> None:
        super().__init__()
        smallest, distinct = min(widths), sorted(set(widths))
        self.keys = tuple(str(width) for width in widths)
        self.zeta = _zeta(spec, smallest)
        self.encoders, self.decoders = nn.ModuleDict(), nn.ModuleDict()
        if len(distinct) > 1:
            for width in distinct:
                hidden = max(1, width // max(1, width // 4))  # r_i = ⌊N_i/4⌋ is the ratio
                self.encoders[str(width)] = SqueezeExcitation(width, hidden, smallest, spec.activation)  # Eq. 12
                self.decoders[str(width)] = SqueezeExcitation(smallest, hidden, width, spec.activation)  # Eq. 13

    def forward(self, pooled: Tensor, i: int) -> Tensor:
        if not self.encoders:
            return self.zeta(pooled)
        key = self.keys[i - 1]
        return self.decoders[key](self.zeta(self.encoders[key](pooled)))


class ScaledBranches(SkipScaling):
    """Table 3's baselines: `forward(x, i)` gives the factor on the output of block i's branches."""

    def __init__(self, spec: BlockScaling, blocks: int) -> None:
        super().__init__()
        self.spec = spec
        if isinstance(spec, ReZeroScaling):
            self.alpha = nn.Parameter(torch.zeros(blocks))

    def forward(self, skip: Tensor, i: int) -> float | Tensor:
        if isinstance(self.spec, StableScaling):
            return self.spec.tau
        return self.alpha[i - 1].to(skip.dtype)


def build(spec: Scaling, shapes: Sequence[SkipShape]) -> SkipScaling:
    """The module that executes `spec` for long skips of these shapes, outermost first."""
    if isinstance(spec, FixedScaling):
        return FixedSkips(spec, len(shapes))
    if isinstance(spec, BlockScaling):
        return ScaledBranches(spec, len(shapes))
    if isinstance(spec, LearnableScaling):
        if spec.calibration == "scalar":
            return ScalarSkips(spec, len(shapes))
        return CalibratedSkips(spec, shapes)
    raise ScaleLongError(f"{type(spec).__name__} is not a scaling that this package knows")


def scale(x: Tensor, kappa: float | Tensor) -> Tensor:
    """κ·x, never in place; κ = 1 gives x itself."""
    if isinstance(kappa, float) and kappa == 1.0:
        return x
    return x * kappa


def _gate(spec: LearnableScaling, i: int, shape: SkipShape) -> str:
    if spec.gate == "tokens" and shape.tokens is None:
        raise ScaleLongError(
            f'gate="tokens" needs a fixed number of tokens, which long skip {i} does not have; '
            'gate="channels" works for any length'
        )
    return spec.gate or ("channels" if shape.tokens is None else "tokens")


def _gated_width(gate: str, i: int, shape: SkipShape) -> int:
    width = shape.tokens if gate == "tokens" else shape.channels
    if width is None:
        raise ScaleLongError(f"the number of channels of long skip {i} is unknown; give it in its Site(channels=…)")
    return width


def _calibration_networks(spec: LearnableScaling, widths: Sequence[int]) -> nn.Module:
    networks: nn.Module
    if not spec.shared:
        networks = OwnNetworks([_zeta(spec, width) for width in widths])
    elif spec.calibration == "ie":
        networks = WidthNetworks(widths, {width: _zeta(spec, width) for width in sorted(set(widths))})
    else:
        networks = SharedNetwork(spec, widths)
    if spec.init == "identity" and spec.calibration == "se":
        _zero_last_layers(networks)
    return networks


def _zeta(spec: LearnableScaling, width: int) -> nn.Module:
    if spec.calibration == "ie":
        return ImplicitExcitation(width, identity=spec.init == "identity")
    return SqueezeExcitation(width, max(1, width // spec.reduction), width, spec.activation)


def _zero_last_layers(networks: nn.Module) -> None:
    """ζ(x) = 0 for every x, with a gradient: the layer before the sigmoid is zero."""
    last: list[nn.Module]
    if isinstance(networks, SharedNetwork):
        last = list(networks.decoders.values()) or [networks.zeta]
    else:
        assert isinstance(networks, OwnNetworks)
        last = list(networks.each)
    for network in last:
        assert isinstance(network, SqueezeExcitation)
        nn.init.zeros_(network.layer2.weight)
        nn.init.zeros_(network.layer2.bias)
