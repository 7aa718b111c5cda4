"""Specs: frozen, validated and JSON-ready descriptions of every scaling, with their behaviour. No torch import.

To add a scaling, write one subclass of `Scaling` (or `FixedScaling`) with a `kind`. Its class definition registers
it, so that JSON files, `parse_scaling` and the command line know its name.
Skip index i runs from 1 (outermost) to N (innermost).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from scalelong.errors import InvalidValueError, ScalingWarning, UnsupportedNetworkError, invalid, unknown
from scalelong.scaling.base import (
    _REGISTRY,
    TOO_LARGE,
    FixedScaling,
    Notice,
    Scaling,
    SkipShape,
    check_bool,
    construct,
    count,
    finite,
    integer,
    numbers,
    one_of,
)
from scalelong.scaling.base import PAPER_MEAN as PAPER_MEAN
from scalelong.scaling.base import SMALLEST as SMALLEST
from scalelong.scaling.base import UPPER as UPPER
from scalelong.scaling.base import kappa_notices as kappa_notices

if TYPE_CHECKING:
    from scalelong.scaling.modules import SkipScaling

AUTO = "auto"  # instead of kappa: chosen for the data and the network


@dataclass(frozen=True)
class NoScaling(FixedScaling):
    """κ_i = 1: the paper's standard U-Net.

    Examples:
        >>> scalelong.NoScaling().coefficients(3)
        (1.0, 1.0, 1.0)
    """

    kind: ClassVar[str] = "none"
    phase: ClassVar[str] = "any"
    is_identity: ClassVar[bool] = True

    def coefficients(self, n: int) -> tuple[float, ...]:
        return (1.0,) * count(n)


@dataclass(frozen=True)
class UniformScaling(FixedScaling):
    """κ_i = value.

    Args:
        value: κ of every skip. The default 1/√2 is the paper's "1/√2-CS".

    Examples:
        >>> scalelong.UniformScaling(0.5).coefficients(3)
        (0.5, 0.5, 0.5)
    """

    value: float = 2**-0.5
    kind: ClassVar[str] = "uniform"
    kappa_option: ClassVar[str | None] = "value"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", finite("value", self.value, positive=True))

    @property
    def label(self) -> str:
        return "uniform" if self == UniformScaling() else f"uniform-{self.value:g}"

    def coefficients(self, n: int) -> tuple[float, ...]:
        return (self.value,) * count(n)

    def geometric(self, n: int) -> tuple[float, float]:
        return math.log(self.value), 0.0

    def notices(self, n: int, mean_ratio: float | None = None) -> list[Notice]:
        large = Notice("warning", f"κ_i = {self.value:g} {TOO_LARGE}")
        return [*super().notices(n, mean_ratio), *([large] if self.value > 1 else [])]


@dataclass(frozen=True)
class ConstantScaling(FixedScaling):
    """CS, Eq. 8: κ_i = κ^(i−1).

    Args:
        kappa: κ. The paper recommends 0.5 to 0.95; `estimate_kappa` proposes one for your data, and
            "auto" chooses one when a network is scaled with an example input (docs/tune.md).
        reverse: κ_i = κ^(N−i+1), Table 4's order.
        innermost: Instead of `kappa`, κ_N itself: κ_i = innermost^((i−1)/(N−1)), the same end points at any depth.

    Examples:
        >>> scalelong.ConstantScaling(0.5).coefficients(4)
        (1.0, 0.5, 0.25, 0.125)
        >>> scalelong.ConstantScaling(0.5, reverse=True).coefficients(4)
        (0.0625, 0.125, 0.25, 0.5)
        >>> scalelong.ConstantScaling(innermost=0.25).base(num := 3), scalelong.ConstantScaling(0.7).base(num)
        (0.5, 0.7)
    """

    kappa: float | str | None = None
    reverse: bool = False
    innermost: float | None = None
    kind: ClassVar[str] = "cs"
    aliases: ClassVar[dict[str, dict[str, Any]]] = {
        "cs-reverse": {"reverse": True},
        "cs-innermost": {},
        "auto": {"kappa": AUTO},
    }
    kappa_option: ClassVar[str | None] = "kappa"

    def __post_init__(self) -> None:
        check_bool("reverse", self.reverse)
        name = "kappa" if self.innermost is None else "innermost"
        if name == "innermost" and (self.kappa is not None or self.reverse):
            raise InvalidValueError(f"innermost = {self.innermost!r} excludes kappa and reverse; give one of them")
        if getattr(self, name) is None:
            raise invalid("kappa", "given for scaling 'cs'", None, "use cs:0.7 or cs-innermost:0.1, for example")
        if self.unresolved:
            if self.reverse:
                raise invalid("reverse", 'False with kappa="auto"', True)
            return
        if isinstance(self.kappa, str):
            raise invalid("kappa", 'a finite number > 0 or "auto"', self.kappa)
        object.__setattr__(self, name, value := finite(name, getattr(self, name), positive=True))
        if value > 1:
            warnings.warn(f"{name} = {value:g} {TOO_LARGE}", ScalingWarning, stacklevel=3)

    def __repr__(self) -> str:
        if self.innermost is not None:
            return f"ConstantScaling(innermost={self.innermost})"
        return f"ConstantScaling(kappa={self.kappa!r}, reverse={self.reverse})"

    @property
    def unresolved(self) -> bool:
        """Whether kappa is still "auto"."""
        return self.kappa == AUTO

    @property
    def label(self) -> str:
        if self.innermost is not None:
            return f"cs-innermost-{self.innermost:g}"
        return f"cs{'-reverse' if self.reverse else ''}-{self.kappa if self.unresolved else format(self.kappa, 'g')}"

    @property
    def word(self) -> str:
        value = self.kappa if self.innermost is None else self.innermost
        name = "cs-innermost" if self.innermost is not None else "cs-reverse" if self.reverse else "cs"
        return f"{name}:{value if self.unresolved else format(value, 'g')}"

    @classmethod
    def short_options(cls, name: str, text: str) -> dict[str, Any] | None:
        if text.strip() == AUTO and name == cls.kind:
            return {"kappa": AUTO}
        options = super().short_options(name, text)
        return {"innermost": options["kappa"]} if options and name == "cs-innermost" else options

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if value is not None}

    def base(self, n: int) -> float:
        """Return κ of a network with `n` long skips.

        Args:
            n: N, the number of long skips.

        Returns:
            κ; with `innermost` the κ whose power N − 1 it is.
        """
        if self.innermost is not None:
            return self.innermost ** (1 / max(1, n - 1))
        if isinstance(self.kappa, float):
            return self.kappa
        raise InvalidValueError(
            f"{self} has no coefficients yet: scalelong.apply(net, {AUTO!r}, example=(x, t)) chooses kappa"
        )

    def coefficients(self, n: int) -> tuple[float, ...]:
        if self.innermost is not None:
            return tuple(self.innermost ** (k / max(1, n - 1)) for k in range(count(n)))
        powers = range(count(n), 0, -1) if self.reverse else range(count(n))
        return tuple(self.base(n) ** power for power in powers)

    def geometric(self, n: int) -> tuple[float, float]:
        log_kappa = math.log(self.base(n))
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

    Examples:
        >>> net = scalelong.apply(scalelong.StackedUNet(32, 3), scalelong.LearnableScaling(init="identity"))
        >>> sum(p.numel() for p in scalelong.parameters(net))
        162
        >>> [row.coefficient for row in scalelong.describe(net, torch.randn(2, 32)).rows]
        [1.0, 1.0, 1.0]
    """

    calibration: str = "se"
    reduction: int = 16
    activation: str = "elu"
    shared: bool = True
    gate: str | None = None
    init: str = "paper"
    kind: ClassVar[str] = "ls"
    distills: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("calibration", self.calibration, ("se", "ie", "scalar"))
        one_of("activation", self.activation, ("elu", "relu", "mish"))
        one_of("init", self.init, ("paper", "identity"))
        if self.gate is not None:
            one_of("gate", self.gate, ("tokens", "channels"))
        integer("reduction", self.reduction)
        check_bool("shared", self.shared)

    @property
    def label(self) -> str:
        return self.label_against(LearnableScaling())

    def label_against(self, usual: Scaling) -> str:
        return self.changed_label(usual)

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.modules import CalibratedSkips, ScalarSkips

        scalar = self.calibration == "scalar"
        return ScalarSkips(self, "kappa", [1.0] * len(shapes)) if scalar else CalibratedSkips(self, shapes)


@dataclass(frozen=True)
class ExplicitScaling(FixedScaling):
    """κ_1…κ_N listed one by one.

    Args:
        coefficients: κ_1…κ_N, outermost first. A zero cuts the skip, a negative number flips its sign.

    Examples:
        >>> scalelong.ExplicitScaling([1, 0.7, 0]).coefficients(3)
        (1.0, 0.7, 0.0)
    """

    values: tuple[float, ...] = field(init=False)
    kind: ClassVar[str] = "explicit"
    argument: ClassVar[str | None] = "coefficients"
    example: ClassVar[str] = "1,0.7,0.5"
    phase: ClassVar[str] = "any"

    @classmethod
    def short_options(cls, name: str, text: str) -> dict[str, Any] | None:
        values = numbers(text)
        return None if values is None else {"coefficients": values}

    def __init__(self, coefficients: Sequence[float]) -> None:
        try:
            items = [] if isinstance(coefficients, (str, bytes)) else list(coefficients)
        except TypeError:
            items = []
        values = tuple(finite(f"coefficients[{k}]", value) for k, value in enumerate(items))
        if not values:
            raise invalid("coefficients", "a list of numbers, κ_1 to κ_N", coefficients)
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
        return (1.0,) * count(n)


@dataclass(frozen=True)
class StableScaling(BlockScaling):
    """Table 3's baseline "stable τ": x + τ·f(x) in every residual branch, κ_i = 1.

    Args:
        tau: τ.

    Examples:
        >>> scalelong.StableScaling(0.1).label
        'stable-0.1'
    """

    tau: float = 0.1
    kind: ClassVar[str] = "stable"
    argument: ClassVar[str | None] = "tau"
    example: ClassVar[str] = "0.1"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", finite("tau", self.tau, positive=True))

    @property
    def label(self) -> str:
        return f"stable-{self.tau:g}"

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.modules import FixedSkips

        return FixedSkips(self, (self.tau,) * len(shapes))


@dataclass(frozen=True)
class ReZeroScaling(BlockScaling):
    """Table 3's baseline ReZero: x + α·f(x) with one learned α per residual branch, 0 at first, κ_i = 1.

    Examples:
        >>> net = scalelong.UViT(8, 4, embed_dim=16, depth=2, num_heads=2, scaling=scalelong.ReZeroScaling())
        >>> [p.tolist() for p in scalelong.parameters(net)]  # one α per block
        [[0.0, 0.0, 0.0]]
    """

    kind: ClassVar[str] = "rezero"

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.modules import ScalarSkips

        return ScalarSkips(self, "alpha", [0.0] * len(shapes))


def scaling_names() -> list[str]:
    """Return the command-line names of all registered scalings."""
    return list(_REGISTRY)


def parse_scaling(scaling: str | dict[str, Any] | Scaling | None, **options: Any) -> Scaling:
    """Return a spec from its short name and options, as the command line does.

    `NAME:VALUE` sets the one option that matters: `norm:rms`, `sparse:3`, `freeu:sdxl`; `explicit:1,0.7,0.5` lists
    κ_1…κ_N, outermost first.

    Args:
        scaling: A short name, a spec, its `to_dict()`, or None for `NoScaling()`.
        **options: Fields of the spec; `kappa` is that of CS or the value of uniform. None is ignored.

    Returns:
        The spec.

    Examples:
        >>> scalelong.parse_scaling("cs", kappa=0.7) == scalelong.parse_scaling("cs:0.7")
        True
        >>> scalelong.parse_scaling("freeu:sd1.5")
        FreeU(b1=1.5, b2=1.6, s1=0.9, s2=0.2, version=1)
    """
    options = {key: value for key, value in options.items() if value is not None}
    if isinstance(scaling, str):
        name, colon, text = scaling.strip().lower().partition(":")
        return construct(name, options | (_short_form(scaling, name, text, options) if colon else {}))
    if options:
        raise invalid("scaling", f"a name if options are given ({', '.join(sorted(options))})", scaling)
    if scaling is None:
        return NoScaling()
    if isinstance(scaling, dict):
        return Scaling.from_dict(scaling)
    if isinstance(scaling, Scaling):
        return scaling
    raise invalid("scaling", "a spec such as ConstantScaling(0.7), or a name such as 'ls'", scaling)


def split_scalings(text: str) -> list[str]:
    """Split a list of short forms at its commas: `none,explicit:1,0.7,ls` → `none`, `explicit:1,0.7`, `ls`."""
    words: list[str] = []
    for word in filter(None, map(str.strip, text.split(","))):
        if words and ":" in words[-1] and numbers(word):  # a further value of the entry before
            words[-1] += f",{word}"
        else:
            words.append(word)
    return words


def _short_form(scaling: str, name: str, text: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the option that VALUE sets in `NAME:VALUE`."""
    if name not in _REGISTRY:
        raise unknown("scaling", name, scaling_names())
    spec = _REGISTRY[name][0]
    if spec.argument is None:
        names = (f"{n}:{spec.example}" for n, (spec, _) in _REGISTRY.items() if spec.argument)
        raise invalid("a scaling with a value", f"one of {', '.join(names)}", scaling)
    if {spec.argument, "kappa"} & options.keys():
        raise InvalidValueError(f"scaling {scaling!r} already sets {spec.argument}; give the value once")
    short = spec.short_options(name, text)
    if short is None:
        raise invalid("scaling", f"{name}:{spec.example}, with a value of this kind", scaling)
    return short


import scalelong.scaling.methods  # noqa: E402, F401  (registers the other methods, after the paper's)
