"""Specs: frozen, validated and JSON-ready descriptions of every scaling, with their behaviour. No torch import.

To add a scaling, write one subclass of `Scaling` (or `FixedScaling`) with a `kind`. Its class definition registers
it, so that JSON files, `parse_scaling` and the command line know its name.
Skip index i runs from 1 (outermost) to N (innermost).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from scalelong._text import number
from scalelong.errors import InvalidValueError, ScalingWarning, UnsupportedNetworkError, invalid, unknown

if TYPE_CHECKING:
    from scalelong.scaling.modules import SkipScaling

UPPER = 5.0  # the paper's "rough upper bound of 5", below which 97 % of its ratios lie
TOO_LARGE = (
    "is greater than 1, which makes training less stable (the paper's Fig. 13); the paper recommends 0.5 to 0.95"
)
SMALLEST = 0.01  # a skip with a smaller κ_i is almost cut
PAPER_MEAN = 1.22  # the paper's mean ratio over CIFAR-10, CelebA and ImageNet

_REGISTRY: dict[str, tuple[type[Scaling], dict[str, Any]]] = {}  # name -> (spec class, options implied by the name)


@dataclass(frozen=True)
class SkipShape:
    """The shape of one long skip, as far as it is known before the network runs.

    Args:
        channels: Feature width.
        dim: Axis of the features: 1 for images and volumes, -1 for tokens (B, L, D).
        tokens: Sequence length, if a learned position table fixes it.
    """

    channels: int | None
    dim: int = 1
    tokens: int | None = None


@dataclass(frozen=True)
class Notice:
    """A remark about a choice of coefficients. `level` is "info" or "warning"."""

    level: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Scaling:
    """Base class of all specs.

    Attributes:
        kind: Name in JSON files and on the command line.
        aliases: Further command-line names, with the options they imply.
        kappa_option: The field that `--kappa` sets, or None.
        argument: The field that VALUE in the short form `NAME:VALUE` sets, or None; `kappa_option` by default.
        acts_on: "skips" (long skips) or "blocks" (outputs of residual branches, Table 3's baselines).
        is_identity: Whether this spec changes nothing.
        label: Short name for folders and tables, such as `cs-0.7`.
    """

    kind: ClassVar[str] = ""
    aliases: ClassVar[dict[str, dict[str, Any]]] = {}
    kappa_option: ClassVar[str | None] = None
    argument: ClassVar[str | None] = None
    acts_on: ClassVar[str] = "skips"
    is_identity: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            cls.argument = cls.argument or cls.kappa_option
            _REGISTRY[cls.kind] = (cls, {})
            _REGISTRY.update({alias: (cls, options) for alias, options in cls.aliases.items()})

    @property
    def label(self) -> str:
        return self.kind

    def label_against(self, usual: Scaling) -> str:
        """Return the label, with what differs from `usual` instead of from the defaults."""
        return self.label

    def coefficients(self, n: int) -> tuple[float, ...] | None:
        """Return κ_1…κ_N of `n` long skips, outermost first, or None if they are learned."""
        return None

    def notices(self, n: int, mean_ratio: float | None = None) -> list[Notice]:
        """Return remarks about this spec on a network with `n` long skips (see `kappa_notices`)."""
        return []

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        """Build the module that executes this spec on long skips (or blocks) of these shapes, outermost first."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Scaling:
        if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
            raise invalid("scaling", "an object with a 'kind'", values)
        kinds = [name for name, (spec, _) in _REGISTRY.items() if name == spec.kind]  # without aliases
        if values["kind"] not in kinds:
            raise unknown("scaling", values["kind"], kinds)
        return _construct(values["kind"], {str(key): value for key, value in values.items() if key != "kind"})


@dataclass(frozen=True)
class FixedScaling(Scaling):
    """A scaling whose κ_1…κ_N are constants."""

    def coefficients(self, n: int) -> tuple[float, ...]:
        raise NotImplementedError

    def geometric(self, n: int) -> tuple[float, float] | None:
        """Return (log a, log r) if κ_i = a·r^(i−1), for closed forms of sums over κ_i; None otherwise."""
        return (0.0, 0.0) if self.is_identity else None

    def notices(self, n: int, mean_ratio: float | None = None) -> list[Notice]:
        return [] if self.is_identity else kappa_notices(self.coefficients(n), getattr(self, "kappa", None), mean_ratio)

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.modules import FixedSkips

        return FixedSkips(self, self.coefficients(len(shapes)))


@dataclass(frozen=True)
class NoScaling(FixedScaling):
    """κ_i = 1: the paper's standard U-Net."""

    kind: ClassVar[str] = "none"
    is_identity: ClassVar[bool] = True

    def coefficients(self, n: int) -> tuple[float, ...]:
        return (1.0,) * _count(n)


@dataclass(frozen=True)
class UniformScaling(FixedScaling):
    """κ_i = value. The default 1/√2 is the paper's "1/√2-CS"."""

    value: float = 2**-0.5
    kind: ClassVar[str] = "uniform"
    kappa_option: ClassVar[str | None] = "value"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _finite("value", self.value, positive=True))

    @property
    def label(self) -> str:
        return "uniform" if self == UniformScaling() else f"uniform-{self.value:g}"

    def coefficients(self, n: int) -> tuple[float, ...]:
        return (self.value,) * _count(n)

    def geometric(self, n: int) -> tuple[float, float]:
        return math.log(self.value), 0.0

    def notices(self, n: int, mean_ratio: float | None = None) -> list[Notice]:
        large = Notice("warning", f"κ_i = {self.value:g} {TOO_LARGE}")
        return [*super().notices(n, mean_ratio), *([large] if self.value > 1 else [])]


@dataclass(frozen=True)
class ConstantScaling(FixedScaling):
    """CS, Eq. 8: κ_i = κ^(i−1). `reverse=True` is Table 4's κ_i = κ^(N−i+1)."""

    kappa: float
    reverse: bool = False
    kind: ClassVar[str] = "cs"
    aliases: ClassVar[dict[str, dict[str, Any]]] = {"cs-reverse": {"reverse": True}}
    kappa_option: ClassVar[str | None] = "kappa"

    def __post_init__(self) -> None:
        object.__setattr__(self, "kappa", _finite("kappa", self.kappa, positive=True))
        _check_bool("reverse", self.reverse)
        if self.kappa > 1:
            warnings.warn(f"kappa = {self.kappa:g} {TOO_LARGE}", ScalingWarning, stacklevel=3)

    @property
    def label(self) -> str:
        return f"cs{'-reverse' if self.reverse else ''}-{self.kappa:g}"

    def coefficients(self, n: int) -> tuple[float, ...]:
        powers = range(_count(n), 0, -1) if self.reverse else range(_count(n))
        return tuple(self.kappa**power for power in powers)

    def geometric(self, n: int) -> tuple[float, float]:
        log_kappa = math.log(self.kappa)
        return (n * log_kappa, -log_kappa) if self.reverse else (0.0, log_kappa)


@dataclass(frozen=True)
class LearnableScaling(Scaling):
    """LS, Eqs. 9–13: κ_i = σ(ζ(GAP(x_i))) with the calibration network ζ of Table 2.

    Args:
        calibration: "se" (two matrices with a bottleneck), "ie" (a scale and a shift) or "scalar" (κ_i is the
            parameter itself).
        reduction: SE's bottleneck is max(1, width // reduction) wide.
        activation: SE's activation: "elu", "relu" or "mish". The paper uses "relu". Its few hidden units are often all
            inactive from the start; then κ_i ignores its input and stays so. The default cannot die.
        shared: Whether all skips share one ζ.
        gate: "tokens" or "channels". None selects tokens if their number is fixed, else channels.
        init: "paper" (PyTorch's initialization: κ starts near 0.5) or "identity" (κ = 2σ(ζ), exactly 1 at first).
    """

    calibration: str = "se"
    reduction: int = 16
    activation: str = "elu"
    shared: bool = True
    gate: str | None = None
    init: str = "paper"
    kind: ClassVar[str] = "ls"

    def __post_init__(self) -> None:
        for name, options in (
            ("calibration", ("se", "ie", "scalar")), ("activation", ("elu", "relu", "mish")),
            ("init", ("paper", "identity")), ("gate", ("tokens", "channels")),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in options and (name, value) != ("gate", None):
                raise unknown(name, str(value), options)
        if isinstance(self.reduction, bool) or not isinstance(self.reduction, int) or self.reduction < 1:
            raise invalid("reduction", "an integer >= 1", self.reduction)
        _check_bool("shared", self.shared)

    @property
    def label(self) -> str:
        return self.label_against(LearnableScaling())

    def label_against(self, usual: Scaling) -> str:
        changed = {k: v for k, v in vars(self).items() if v != getattr(usual, k)}
        return "-".join(["ls", *(f"{name}-{value}" for name, value in changed.items())])

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.modules import CalibratedSkips, ScalarSkips

        scalar = self.calibration == "scalar"
        return ScalarSkips(self, "kappa", [1.0] * len(shapes)) if scalar else CalibratedSkips(self, shapes)


@dataclass(frozen=True)
class ExplicitScaling(FixedScaling):
    """κ_1…κ_N listed one by one, outermost first. A zero cuts the skip."""

    values: tuple[float, ...]
    kind: ClassVar[str] = "explicit"
    argument: ClassVar[str | None] = "coefficients"

    def __init__(self, coefficients: Sequence[float]) -> None:
        try:
            items = [] if isinstance(coefficients, (str, bytes)) else list(coefficients)
        except TypeError:
            items = []
        values = tuple(_finite(f"coefficients[{k}]", value) for k, value in enumerate(items))
        if not values or min(values) < 0:
            raise invalid("coefficients", "a list of numbers >= 0, κ_1 to κ_N", coefficients)
        object.__setattr__(self, "values", values)

    @property
    def label(self) -> str:
        return "-".join(["explicit", *(f"{value:g}" for value in self.values)])

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "coefficients": list(self.values)}

    def coefficients(self, n: int) -> tuple[float, ...]:
        if len(self.values) != n:
            raise UnsupportedNetworkError(f"coefficients has {len(self.values)} values but there are {n} long skips")
        return self.values


@dataclass(frozen=True)
class BlockScaling(Scaling):
    """Base class of Table 3's baselines. They scale the outputs of blocks, x + τ·f(x), and leave κ_i = 1."""

    acts_on: ClassVar[str] = "blocks"

    def coefficients(self, n: int) -> tuple[float, ...]:
        return (1.0,) * _count(n)


@dataclass(frozen=True)
class StableScaling(BlockScaling):
    """ "stable τ": x + τ·f(x) with a fixed τ."""

    tau: float = 0.1
    kind: ClassVar[str] = "stable"
    argument: ClassVar[str | None] = "tau"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", _finite("tau", self.tau, positive=True))

    @property
    def label(self) -> str:
        return f"stable-{self.tau:g}"

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.modules import FixedSkips

        return FixedSkips(self, (self.tau,) * len(shapes))


@dataclass(frozen=True)
class ReZeroScaling(BlockScaling):
    """ReZero: x + α·f(x) with one learned α per block, initialized to 0."""

    kind: ClassVar[str] = "rezero"

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.modules import ScalarSkips

        return ScalarSkips(self, "alpha", [0.0] * len(shapes))


def scaling_names() -> list[str]:
    """Return the command-line names of all registered scalings."""
    return list(_REGISTRY)


def parse_scaling(scaling: str | dict[str, Any] | Scaling | None, **options: Any) -> Scaling:
    """Return a spec from its short name and options: `parse_scaling("cs", kappa=0.7)` or `parse_scaling("cs:0.7")`.

    `NAME:VALUE` works for uniform, cs, cs-reverse and stable; `explicit:1,0.7,0.5` lists κ_1…κ_N, outermost first.
    Options that are None are ignored. Also accepts a spec, its `to_dict()`, and None for `NoScaling()`.
    """
    options = {key: value for key, value in options.items() if value is not None}
    if isinstance(scaling, str):
        name, colon, text = scaling.strip().lower().partition(":")
        return _construct(name, options | (_short_form(scaling, name, text, options) if colon else {}))
    if options:
        raise invalid("scaling", f"a name if options are given ({', '.join(sorted(options))})", scaling)
    if scaling is None:
        return NoScaling()
    if isinstance(scaling, dict):
        return Scaling.from_dict(scaling)
    if isinstance(scaling, Scaling):
        return scaling
    raise invalid("scaling", "a spec such as ConstantScaling(0.7), or a name such as 'ls'", scaling)


def kappa_notices(
    coefficients: Sequence[float], kappa: float | None = None, mean_ratio: float | None = None
) -> list[Notice]:
    """Check κ_1…κ_N: is Σκ² within [mean ratio, min(5, N)], and is a skip almost cut?

    Args:
        coefficients: κ_1…κ_N.
        kappa: Base of CS, if there is one; it enables the second check.
        mean_ratio: Mean of ‖ε‖²/‖x_t‖² over the data. None takes the paper's 1.22.
    """
    n, total = len(coefficients), math.fsum(kappa_i**2 for kappa_i in coefficients)
    cap = min(UPPER, float(n))
    mean, whose = (PAPER_MEAN, "the paper's") if mean_ratio is None else (mean_ratio, "the data's")
    side = ""
    if total < min(mean, cap) * (1 - 1e-9):
        side = f"below {whose} mean ratio {number(mean, 3)}: the output may be too small for the noise"
    elif total > cap * (1 + 1e-9):
        side = f"above {cap:g}, the upper end of the paper's range: features may oscillate more"
    notices = [Notice("info", f"Σκ² = {total:.2f} is {side}")] if side else []
    if kappa is not None and n > 1 and min(coefficients) < SMALLEST:
        text = (
            f"kappa = {kappa:g} with {n} long skips scales one of them by {min(coefficients):.2g}, which almost cuts "
            f"it; use kappa >= {SMALLEST ** (1 / (n - 1)):.2f} to keep every κ_i >= {SMALLEST:g}"
        )
        notices.append(Notice("warning", text))
    return notices


def split_scalings(text: str) -> list[str]:
    """Split a list of short forms at its commas: `none,explicit:1,0.7,ls` → `none`, `explicit:1,0.7`, `ls`."""
    words: list[str] = []
    for word in filter(None, map(str.strip, text.split(","))):
        if words and ":" in words[-1] and _numbers(word):  # a further value of the entry before
            words[-1] += f",{word}"
        else:
            words.append(word)
    return words


def _short_form(scaling: str, name: str, text: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the option that VALUE sets in `NAME:VALUE`."""
    if name not in _REGISTRY:
        raise unknown("scaling", name, scaling_names())
    field = _REGISTRY[name][0].argument
    if field is None:
        names = (f"{n}:{_example(n)}" for n, (spec, _) in _REGISTRY.items() if spec.argument)
        raise invalid("a scaling with a value", f"one of {', '.join(names)}", scaling)
    if {field, "kappa"} & options.keys():
        raise InvalidValueError(f"scaling {scaling!r} already sets {field}; give the value once")
    values = _numbers(text)
    if values is None or (field != "coefficients" and len(values) != 1):
        raise invalid("scaling", f"{name}:{_example(name)} with numbers", scaling)
    return {field: values if field == "coefficients" else values[0]}


def _example(name: str) -> str:
    return {"coefficients": "1,0.7,0.5", "tau": "0.1"}.get(_REGISTRY[name][0].argument or "", "0.7")


def _numbers(text: str) -> list[float] | None:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        return None


def _construct(name: str, options: dict[str, Any]) -> Scaling:
    if name not in _REGISTRY:
        raise unknown("scaling", name, scaling_names())
    spec, implied = _REGISTRY[name]
    if spec.kappa_option and "kappa" in options:
        options = {spec.kappa_option if key == "kappa" else key: value for key, value in options.items()}
    parameters = inspect.signature(spec).parameters
    for option in options:
        if option not in parameters:
            raise unknown(f"option of scaling {name!r}:", option, list(parameters) or ["none"])
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.name not in options:
            hint = f"use {name}:{_example(name)}, for example"
            raise invalid(parameter.name, f"given for scaling {name!r}", None, hint)
    return spec(**options | implied)


def _finite(name: str, value: Any, positive: bool = False) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or (positive and number <= 0):
        raise invalid(name, "a finite number > 0" if positive else "a finite number", value)
    return number


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise invalid(name, "True or False", value)


def _count(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise invalid("the number of long skips", "an integer >= 1", n)
    return n
