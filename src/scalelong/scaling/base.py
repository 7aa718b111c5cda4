"""The base classes of all specs: `Scaling`, `FixedScaling`, the registry of names, and the checks of their fields.

No torch import. Skip index i runs from 1 (outermost) to N (innermost).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from scalelong._text import number
from scalelong.errors import invalid, unknown

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
        backbone: Feature width of the backbone that the skip joins.
        extras: Number of tokens before those that form a map of patches; None if the tokens form no map.
        op: How the skip joins the backbone: "cat", "add" or None if that is not known.

    Examples:
        A network that calls `scale_skip` declares its skips, outermost first:

        >>> net = torch.nn.Module()
        >>> net.long_skips = (scalelong.SkipShape(64, op="cat"), scalelong.SkipShape(128, op="cat"))
        >>> [site.channels for site in scalelong.find_skips(net)]
        [64, 128]
    """

    channels: int | None
    dim: int = 1
    tokens: int | None = None
    backbone: int | None = None
    extras: int | None = None
    op: str | None = None


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
        example: A VALUE for messages.
        acts_on: "skips" (long skips) or "blocks" (outputs of residual branches, Table 3's baselines).
        phase: When it is meant to act: "training", "fine-tuning", "inference" or "any".
        family: What it does to a skip; `compose` takes one of a family.
        factor: Whether it multiplies the skip by κ_i and does nothing else.
        joins: The joins that it makes sense for: "cat", "add" or both.
        freezes: Whether only its own parameters train.
        distills: Whether it computes κ_i from the input, so that `distill` can replace it by their means.
        is_identity: Whether this spec changes nothing.

    Examples:
        >>> spec = scalelong.ConstantScaling(0.5)
        >>> spec.label, spec.coefficients(4)
        ('cs-0.5', (1.0, 0.5, 0.25, 0.125))
        >>> spec.to_dict()
        {'kind': 'cs', 'kappa': 0.5, 'reverse': False}
        >>> spec.from_dict({"kind": "cs", "kappa": 0.5}) == spec
        True
        >>> [notice.text for notice in spec.notices(12)]
        ['kappa = 0.5 with 12 long skips scales one of them by 0.00049, ...']
        >>> spec.short_options("cs", "0.7"), spec.needs_example
        ({'kappa': 0.7}, False)
        >>> spec.build([scalelong.SkipShape(8)] * 4)(torch.ones(1, 8), 2)  # κ_2
        0.5
        >>> scalelong.LearnableScaling(reduction=4).changed_label(scalelong.LearnableScaling())
        'ls-reduction-4'
        >>> scalelong.LearnableScaling(reduction=4).label_against(scalelong.LearnableScaling(reduction=4))
        'ls'
    """

    kind: ClassVar[str] = ""
    aliases: ClassVar[dict[str, dict[str, Any]]] = {}
    kappa_option: ClassVar[str | None] = None
    argument: ClassVar[str | None] = None
    example: ClassVar[str] = "0.7"
    acts_on: ClassVar[str] = "skips"
    phase: ClassVar[str] = "training"
    family: ClassVar[str] = "weight"
    factor: ClassVar[bool] = True
    joins: ClassVar[tuple[str, ...]] = ("cat", "add")
    freezes: ClassVar[bool] = False
    distills: ClassVar[bool] = False
    is_identity: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            cls.argument = cls.argument or cls.kappa_option
            _REGISTRY[cls.kind] = (cls, {})
            _REGISTRY.update({alias: (cls, options) for alias, options in cls.aliases.items()})

    @property
    def label(self) -> str:
        """Short name for folders and tables, such as `cs-0.7`."""
        return self.kind

    @property
    def word(self) -> str:
        """Return the short form that `parse_scaling` reads: `cs:0.7`, `explicit:1,0.7`. Other options are left out."""
        value = self.to_dict().get(self.argument) if self.argument else None
        items = value if isinstance(value, list) else [value]
        text = ",".join(f"{item:.12g}" if isinstance(item, float) else str(item) for item in items)
        return self.kind if value is None else f"{self.kind}:{text}"

    def label_against(self, usual: Scaling) -> str:
        """Return the label, with what differs from `usual` instead of from the defaults.

        Args:
            usual: The spec that the label is compared with, such as a preset's.

        Returns:
            The label.
        """
        return self.label

    def changed_label(self, usual: Scaling) -> str:
        """Return the kind and every field that differs from `usual`.

        Args:
            usual: A spec of the same class.

        Returns:
            The label, such as `norm-over-both`.
        """
        changed = {k: v for k, v in vars(self).items() if v != getattr(usual, k)}
        return "-".join(
            [self.kind, *(f"{k}-{v:g}" if isinstance(v, float) else f"{k}-{v}" for k, v in changed.items())]
        )

    @property
    def unresolved(self) -> bool:
        """Whether its coefficients are chosen when a network is scaled: `ConstantScaling("auto")`."""
        return False

    @property
    def needs_example(self) -> bool:
        """Whether its initial weights or coefficients are measured on an example input."""
        return self.unresolved

    @property
    def built(self) -> Scaling:
        """The spec of the same module once it is built: initial weights that were measured are among its weights."""
        return self

    @classmethod
    def short_options(cls, name: str, text: str) -> dict[str, Any] | None:
        """Return the options that VALUE sets in `NAME:VALUE`.

        Args:
            name: The name before the colon, an alias included.
            text: The VALUE after it.

        Returns:
            Options of the class, or None if VALUE does not fit.
        """
        values = numbers(text)
        if cls.argument is None or values is None or len(values) != 1:
            return None
        return {cls.argument: int(text) if text.strip().isdecimal() else values[0]}

    def coefficients(self, n: int) -> tuple[float, ...] | None:
        """Return κ_1…κ_N, outermost first.

        Args:
            n: N, the number of long skips.

        Returns:
            N numbers, or None if they are learned.
        """
        return None

    def notices(self, n: int, mean_ratio: float | None = None) -> list[Notice]:
        """Return remarks about this spec on a network (see `kappa_notices`).

        Args:
            n: N, the number of long skips.
            mean_ratio: Mean of ‖ε‖²/‖x_t‖² over the data. None takes the paper's 1.22.

        Returns:
            Remarks of level "info" or "warning".
        """
        return []

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        """Build the module that executes this spec.

        Args:
            shapes: The long skips (or blocks) it acts on, outermost first.

        Returns:
            The module: `module(skip, i)` returns κ_i, or the new skip if the spec is not a factor.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as JSON-ready values.

        Returns:
            `kind` and the fields.
        """
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Scaling:
        """Return the spec that `to_dict` described.

        Args:
            values: `kind` and the fields.

        Returns:
            The spec.
        """
        if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
            raise invalid("scaling", "an object with a 'kind'", values)
        kinds = [name for name, (spec, _) in _REGISTRY.items() if name == spec.kind]  # without aliases
        if values["kind"] not in kinds:
            raise unknown("scaling", values["kind"], kinds)
        return construct(values["kind"], {str(key): value for key, value in values.items() if key != "kind"})


@dataclass(frozen=True)
class FixedScaling(Scaling):
    """A scaling whose κ_1…κ_N are constants.

    Examples:
        >>> scalelong.UniformScaling(0.5).coefficients(3)
        (0.5, 0.5, 0.5)
        >>> scalelong.NoScaling().geometric(3)  # κ_i = e^0 · (e^0)^(i−1)
        (0.0, 0.0)
    """

    def coefficients(self, n: int) -> tuple[float, ...]:
        raise NotImplementedError

    def geometric(self, n: int) -> tuple[float, float] | None:
        """Return (log a, log r) if κ_i = a·r^(i−1), for closed forms of sums over κ_i.

        Args:
            n: N, the number of long skips.

        Returns:
            (log a, log r), or None if the coefficients are not geometric.
        """
        return (0.0, 0.0) if self.is_identity else None

    def notices(self, n: int, mean_ratio: float | None = None) -> list[Notice]:
        return [] if self.is_identity else kappa_notices(self.coefficients(n), getattr(self, "kappa", None), mean_ratio)

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.modules import FixedSkips

        return FixedSkips(self, self.coefficients(len(shapes)))


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
        power = n if coefficients[0] < coefficients[-1] else n - 1  # the smallest is κ^N if CS is reversed
        least = math.ceil(100 * SMALLEST ** (1 / power) - 1e-9) / 100  # rounded up, so that it passes this check
        text = (
            f"kappa = {kappa:g} with {n} long skips scales one of them by {min(coefficients):.2g}, which almost cuts "
            f"it; use kappa >= {least:.2f} to keep every κ_i >= {SMALLEST:g}"
        )
        notices.append(Notice("warning", text))
    return notices


def construct(name: str, options: dict[str, Any]) -> Scaling:
    """Build the spec that is registered under a name."""
    if name not in _REGISTRY:
        raise unknown("scaling", name, list(_REGISTRY))
    spec, implied = _REGISTRY[name]
    if spec.kappa_option and "kappa" in options:
        options = {spec.kappa_option if key == "kappa" else key: value for key, value in options.items()}
    parameters = inspect.signature(spec).parameters
    for option in options:
        if option not in parameters:
            raise unknown(f"option of scaling {name!r}:", option, list(parameters) or ["none"])
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.name not in options:
            hint = f"use {name}:{spec.example}, for example"
            raise invalid(parameter.name, f"given for scaling {name!r}", None, hint)
    return spec(**options | implied)


def numbers(text: str) -> list[float] | None:
    """Return comma-separated numbers, None if there is anything else."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        return None


def finite(name: str, value: Any, positive: bool = False) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or (positive and number <= 0):
        raise invalid(name, "a finite number > 0" if positive else "a finite number", value)
    return number


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise invalid(name, "True or False", value)


def count(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise invalid("the number of long skips", "an integer >= 1", n)
    return n


def integer(name: str, value: Any, least: int = 1) -> int:
    """Return a checked integer field."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise invalid(name, f"an integer >= {least}", value)
    return value


def one_of(name: str, value: Any, options: Sequence[str]) -> None:
    """Check a field that is one of a few words."""
    if value not in options:
        raise unknown(name, str(value), options)
