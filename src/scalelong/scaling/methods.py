"""Specs of the other ways to treat a long skip, each with its source: for training, fine-tuning and inference.

s is the skip, x the backbone at the join. No torch import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from scalelong.errors import InvalidValueError, UnsupportedNetworkError, invalid, unknown
from scalelong.scaling.base import FixedScaling, Notice, Scaling, SkipShape, count, finite, integer, numbers, one_of

if TYPE_CHECKING:
    from scalelong.scaling.modules import SkipScaling


# ------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class NormScaling(Scaling):
    """Normalize the skip, or [x, s] together, over the channels before the join (Hunyuan-DiT's `skip_norm`).

    Args:
        kind: "layer" (LayerNorm) or "rms" (RMSNorm).
        over: "skip" or "both".
        gain: "learned" (one per channel from 1, for "layer" also an offset from 0) or a fixed number.
        init: "unit", or "identity": the gain starts at the RMS measured on `apply(…, example=…)`, so that a trained
            network moves little. `describe` reports by how much.
        norm: Another name of `kind`, the one that JSON files use.

    Examples:
        >>> scalelong.NormScaling("rms", over="both").label
        'norm-rms-over-both'
        >>> scalelong.NormScaling(init="identity").needs_example
        True
    """

    norm: str = "layer"
    over: str = "skip"
    gain: str | float = "learned"
    init: str = "unit"
    kind: ClassVar[str] = "norm"
    argument: ClassVar[str | None] = "kind"
    example: ClassVar[str] = "rms"
    family: ClassVar[str] = "norm"
    factor: ClassVar[bool] = False

    def __init__(
        self,
        kind: str | None = None,
        over: str = "skip",
        gain: str | float = "learned",
        init: str = "unit",
        *,
        norm: str | None = None,
    ) -> None:
        norm = kind or norm or "layer"  # the field cannot be called `kind`, which is the spec's own name
        one_of("kind", norm, ("layer", "rms"))
        one_of("over", over, ("skip", "both"))
        one_of("init", init, ("unit", "identity"))
        if gain != "learned":
            gain = finite("gain", float(gain) if isinstance(gain, str) and numbers(gain) else gain, positive=True)
            if init == "identity":
                raise InvalidValueError(f"init='identity' measures the gain, so gain must be 'learned', got {gain!r}")
        for name, value in (("norm", norm), ("over", over), ("gain", gain), ("init", init)):
            object.__setattr__(self, name, value)

    @property
    def word(self) -> str:
        return f"{self.kind}:{self.norm}"

    def __repr__(self) -> str:
        return f"NormScaling(kind={self.norm!r}, over={self.over!r}, gain={self.gain!r}, init={self.init!r})"

    @property
    def label(self) -> str:
        return self.changed_label(NormScaling()).replace("norm-norm-", "norm-")

    @property
    def joins(self) -> tuple[str, ...]:  # type: ignore[override]
        """The joins that it makes sense for: a norm over both needs a concatenation."""
        return ("cat", "add") if self.over == "skip" else ("cat",)

    @property
    def needs_example(self) -> bool:
        return self.init == "identity"

    @property
    def built(self) -> NormScaling:
        return replace(self, init="unit")

    @classmethod
    def short_options(cls, name: str, text: str) -> dict[str, Any] | None:
        return {"kind": text}

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.method_modules import NormSkips

        return NormSkips(self, shapes)


@dataclass(frozen=True)
class MagnitudePreserving(Scaling):
    """[w_x·x, w_s·s] with C = √((N_x+N_s)/((1−t)²+t²)), w_x = C(1−t)/√N_x, w_s = C·t/√N_s (EDM2).

    Args:
        t: Share of the skip, from 0 to 1.

    Examples:
        >>> x = torch.randn(2, 3, 8, 8)
        >>> net = scalelong.UViT(8, 4, embed_dim=16, depth=2, num_heads=2, scaling=scalelong.MagnitudePreserving(0.3))
        >>> net(x, 500).shape
        torch.Size([2, 3, 8, 8])
    """

    t: float = 0.5
    kind: ClassVar[str] = "mp"
    argument: ClassVar[str | None] = "t"
    example: ClassVar[str] = "0.5"
    factor: ClassVar[bool] = False
    joins: ClassVar[tuple[str, ...]] = ("cat",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "t", _fraction("t", self.t))

    @property
    def label(self) -> str:
        return self.changed_label(MagnitudePreserving())

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.method_modules import MagnitudePreservingSkips

        return MagnitudePreservingSkips(self)


@dataclass(frozen=True)
class GatedScaling(Scaling):
    """g_i·s with one learned g_i = exp(ζ_i) >= 0 per skip, 1 at first.

    Examples:
        >>> net = scalelong.apply(scalelong.StackedUNet(32, 3), scalelong.GatedScaling())
        >>> [row.coefficient for row in scalelong.describe(net).rows]
        [1.0, 1.0, 1.0]
    """

    kind: ClassVar[str] = "gate"

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.method_modules import GatedSkips

        return GatedSkips(self, len(shapes))


@dataclass(frozen=True)
class LerpScaling(Scaling):
    """lerp(s, x, f_i) = (1−f_i)·s + f_i·x instead of s + x, with one learned f_i per skip (HDiT).

    Args:
        weight: f_i at first, from 0 to 1.

    Examples:
        >>> net = scalelong.apply(scalelong.StackedUNet(32, 3), scalelong.LerpScaling(0.5))
        >>> sum(p.numel() for p in scalelong.parameters(net))
        3
    """

    weight: float = 0.5
    kind: ClassVar[str] = "lerp"
    argument: ClassVar[str | None] = "weight"
    example: ClassVar[str] = "0.5"
    factor: ClassVar[bool] = False
    joins: ClassVar[tuple[str, ...]] = ("add",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", _fraction("weight", self.weight))

    @property
    def label(self) -> str:
        return self.changed_label(LerpScaling())

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.method_modules import LerpSkips

        return LerpSkips(self, len(shapes))


@dataclass(frozen=True)
class SparseScaling(FixedScaling):
    """Keep the skips i = 1, 1 + stride, 1 + 2·stride, … counted from outside, and cut the others (DiC).

    Args:
        stride: Distance of the skips that are kept.

    Examples:
        >>> scalelong.SparseScaling(2).coefficients(5)
        (1.0, 0.0, 1.0, 0.0, 1.0)
    """

    stride: int = 3
    kind: ClassVar[str] = "sparse"
    argument: ClassVar[str | None] = "stride"
    example: ClassVar[str] = "3"

    def __post_init__(self) -> None:
        integer("stride", self.stride)

    @property
    def label(self) -> str:
        return self.changed_label(SparseScaling())

    def coefficients(self, n: int) -> tuple[float, ...]:
        return tuple(float(k % self.stride == 0) for k in range(count(n)))

    def notices(self, n: int, mean_ratio: float | None = None) -> list[Notice]:
        return []  # it cuts skips on purpose


@dataclass(frozen=True)
class SelfConditioning(Scaling):
    """Pooled features of one block condition the later ones, through the network's own conditioning path (DDAE++).

    W·mean(features) is added to the time token at the input of every later decoder block of a U-ViT, and to the time
    embedding of every later block of a diffusers U-Net. W = 0 at first: the network starts as it is. κ_i = 1.

    Args:
        block: The block whose features are used, such as "mid_block"; `scalelong probe` proposes one.

    Examples:
        >>> both = scalelong.compose(scalelong.ConstantScaling(0.7), scalelong.SelfConditioning("mid_block"))
        >>> net = scalelong.UViT(8, 4, embed_dim=16, depth=2, num_heads=2, scaling=both)
        >>> net(torch.randn(2, 3, 8, 8), 500).shape
        torch.Size([2, 3, 8, 8])
    """

    block: str
    kind: ClassVar[str] = "self-conditioning"
    argument: ClassVar[str | None] = "block"
    example: ClassVar[str] = "mid_block"
    family: ClassVar[str] = "conditioning"

    def __post_init__(self) -> None:
        if not isinstance(self.block, str) or not self.block:
            raise invalid("block", "the name of a block, such as 'mid_block'", self.block)

    @property
    def label(self) -> str:
        return f"self-conditioning-{self.block}"

    @classmethod
    def short_options(cls, name: str, text: str) -> dict[str, Any] | None:
        return {"block": text}

    def coefficients(self, n: int) -> tuple[float, ...]:
        return (1.0,) * count(n)

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.method_modules import ConditionedSkips

        return ConditionedSkips(self)


# ---------------------------------------------------------------------------------------------- fine-tuning


@dataclass(frozen=True)
class SkipAdapter(Scaling):
    """s + W₂·GELU(W₁·s) over the channels, W₂ = 0 at first (SCEdit). Only W₁ and W₂ train.

    Args:
        rank: Width of W₁'s output.

    Examples:
        >>> net = scalelong.apply(scalelong.StackedUNet(32, 3), scalelong.SkipAdapter(4))
        >>> sum(p.numel() for p in net.parameters() if p.requires_grad)  # 3 · 2 · 32 · 4
        768
    """

    rank: int = 16
    kind: ClassVar[str] = "adapter"
    argument: ClassVar[str | None] = "rank"
    example: ClassVar[str] = "16"
    phase: ClassVar[str] = "fine-tuning"
    family: ClassVar[str] = "adapter"
    factor: ClassVar[bool] = False
    freezes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        integer("rank", self.rank)

    @property
    def label(self) -> str:
        return self.changed_label(SkipAdapter())

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.method_modules import AdapterSkips

        return AdapterSkips(self, shapes)


# ------------------------------------------------------------------------------------------------ inference


@dataclass(frozen=True)
class SkipTuning(FixedScaling):
    """ρ_i·s on a trained network, ρ linear from `innermost` to `outermost` (Skip-Tuning, ICML 2024).

    Args:
        innermost: ρ of the innermost skip.
        outermost: ρ of the outermost skip.
        timesteps: (first, last) timestep of the range within which it acts, in the network's own units; None: always.

    Examples:
        >>> net = scalelong.apply(scalelong.StackedUNet(32, 3).eval(), scalelong.SkipTuning(0.8))
        >>> [row.coefficient for row in scalelong.describe(net).rows]
        [1.0, 0.9, 0.8]
    """

    innermost: float = 0.8
    outermost: float = 1.0
    timesteps: tuple[float, float] | None = None
    kind: ClassVar[str] = "skip-tuning"
    argument: ClassVar[str | None] = "innermost"
    example: ClassVar[str] = "0.8"
    phase: ClassVar[str] = "inference"
    family: ClassVar[str] = "tuning"

    def __post_init__(self) -> None:
        for name in ("innermost", "outermost"):
            value = finite(name, getattr(self, name))
            if value < 0:
                raise invalid(name, "a finite number >= 0", value)
            object.__setattr__(self, name, value)
        if self.timesteps is not None:
            expected = "(first, last) with first <= last, or None"
            if not isinstance(self.timesteps, (tuple, list)) or len(self.timesteps) != 2:
                raise invalid("timesteps", expected, self.timesteps)
            first, last = (finite("timesteps", t) for t in self.timesteps)
            if first > last:
                raise invalid("timesteps", expected, self.timesteps)
            object.__setattr__(self, "timesteps", (first, last))

    @property
    def label(self) -> str:
        within = "" if self.timesteps is None else "-timesteps-{:g}-{:g}".format(*self.timesteps)
        outer = "" if self.outermost == 1.0 else f"-outermost-{self.outermost:g}"
        return f"skip-tuning-{self.innermost:g}{outer}{within}"

    def coefficients(self, n: int) -> tuple[float, ...]:
        if count(n) == 1:
            return (self.innermost,)
        shares = (k / (n - 1) for k in range(n))
        return tuple((1 - share) * self.outermost + share * self.innermost for share in shares)

    def notices(self, n: int, mean_ratio: float | None = None) -> list[Notice]:
        return []  # Σκ² is about training

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.method_modules import TimedSkips

        return super().build(shapes) if self.timesteps is None else TimedSkips(self, self.coefficients(len(shapes)))


FREEU_SETTINGS = {  # (b1, b2, s1, s2) of https://github.com/ChenyangSi/FreeU
    "sd1.4": (1.3, 1.4, 0.9, 0.2), "sd1.5": (1.5, 1.6, 0.9, 0.2), "sd2.1": (1.4, 1.6, 0.9, 0.2),
    "sdxl": (1.3, 1.4, 0.9, 0.2),
}  # fmt: skip


@dataclass(frozen=True)
class FreeU(Scaling):
    """FreeU: half of the backbone's channels times b, the skip's lowest frequencies times s, in two decoder stages.

    The two stages are the innermost ones: the two lowest resolutions at which skips join, or the two innermost skips of
    a network of tokens.

    Args:
        b1: Factor on the backbone of the innermost stage.
        b2: Factor on the backbone of the next one.
        s1: Factor on the low frequencies of the innermost stage's skips.
        s2: Factor on those of the next one.
        version: 2 replaces b by 1 + (b−1)·m with the mean m over channels, scaled to 0…1 per sample.

    Examples:
        >>> scalelong.FreeU.named("sdxl").factors
        (1.3, 1.4, 0.9, 0.2)
    """

    b1: float = 1.3
    b2: float = 1.4
    s1: float = 0.9
    s2: float = 0.2
    version: int = 1
    kind: ClassVar[str] = "freeu"
    argument: ClassVar[str | None] = "b1"
    example: ClassVar[str] = "sdxl"
    phase: ClassVar[str] = "inference"
    family: ClassVar[str] = "freeu"
    factor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("b1", "b2", "s1", "s2"):
            value = finite(name, getattr(self, name))
            if value < 0:
                raise invalid(name, "a finite number >= 0", value)
            object.__setattr__(self, name, value)
        if isinstance(self.version, bool) or self.version not in (1, 2):
            raise invalid("version", "1 or 2", self.version)

    @classmethod
    def named(cls, name: str, version: int = 1) -> FreeU:
        """Return the published settings of a model.

        Args:
            name: "sd1.4", "sd1.5", "sd2.1" or "sdxl".
            version: 1 or 2.

        Returns:
            The spec.
        """
        if name not in FREEU_SETTINGS:
            raise unknown("FreeU setting", name, FREEU_SETTINGS)
        return cls(*FREEU_SETTINGS[name], version)

    @classmethod
    def short_options(cls, name: str, text: str) -> dict[str, Any] | None:
        values = FREEU_SETTINGS.get(text) or numbers(text)
        if values is None:
            raise unknown("FreeU setting", text, FREEU_SETTINGS)
        return dict(zip(("b1", "b2", "s1", "s2"), values, strict=True)) if len(values) == 4 else None

    @property
    def factors(self) -> tuple[float, float, float, float]:
        """(b1, b2, s1, s2)."""
        return self.b1, self.b2, self.s1, self.s2

    @property
    def label(self) -> str:
        return self.changed_label(FreeU())

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.method_modules import FreeUSkips

        for i, shape in enumerate(shapes, start=1):
            if shape.dim == -1 and shape.extras is None:
                problem = f"long skip {i} has none: its features are at axis -1 and no map of patches is known"
                hint = "declare it with SkipShape(…, extras=number of tokens before the map)"
                raise UnsupportedNetworkError(f"FreeU filters a map of features, but {problem}; {hint}")
        return FreeUSkips(self, shapes)


# ---------------------------------------------------------------------------------------------- composition


@dataclass(frozen=True)
class ComposedScaling(Scaling):
    """Several treatments of one skip, in this order. Made by `compose`."""

    scalings: tuple[Scaling, ...]
    kind: ClassVar[str] = "compose"

    def __post_init__(self) -> None:
        if not isinstance(self.scalings, (tuple, list)):
            raise invalid("scalings", "a list of scalings", self.scalings)
        parts = tuple(Scaling.from_dict(part) if isinstance(part, dict) else part for part in self.scalings)
        object.__setattr__(self, "scalings", parts)
        if len(parts) < 2 or not all(isinstance(part, Scaling) for part in parts):
            raise invalid("scalings", "two scalings or more", parts)
        for k, part in enumerate(parts):
            if part.acts_on != "skips" or isinstance(part, ComposedScaling):
                raise InvalidValueError(f"{part} cannot be composed: it does not act on long skips")
            if part.unresolved:
                raise InvalidValueError(f"{part} cannot be composed: apply it alone first and compose what it chose")
            for before in parts[:k]:
                if before.family == part.family:
                    both = "both weight the skip against the backbone" if part.family == "weight" else "are of one kind"
                    raise InvalidValueError(f"{before} and {part} cannot be composed: they {both}; use one of them")
                if part.family == "norm" and before.family in ("weight", "tuning"):
                    hint = f"use compose({part.kind}, {before.kind})"
                    raise InvalidValueError(f"{part} after {before} divides its factor out again; {hint}")

    @property
    def phase(self) -> str:  # type: ignore[override]
        phases = {part.phase for part in self.scalings}
        return next((phase for phase in ("inference", "fine-tuning") if phase in phases), "training")

    @property
    def factor(self) -> bool:  # type: ignore[override]
        return all(part.factor for part in self.scalings)

    @property
    def joins(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(op for op in ("cat", "add") if all(op in part.joins for part in self.scalings))

    @property
    def freezes(self) -> bool:  # type: ignore[override]
        return any(part.freezes for part in self.scalings)

    @property
    def needs_example(self) -> bool:
        return any(part.needs_example for part in self.scalings)

    @property
    def built(self) -> ComposedScaling:
        return ComposedScaling(tuple(part.built for part in self.scalings))

    @property
    def label(self) -> str:
        return "+".join(part.label for part in self.scalings)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "scalings": [part.to_dict() for part in self.scalings]}

    def coefficients(self, n: int) -> tuple[float, ...] | None:
        product: list[float] = [1.0] * n
        for part in self.scalings:
            kappas = part.coefficients(n)
            if kappas is None or getattr(part, "timesteps", None) is not None:
                return None
            product = [a * b for a, b in zip(product, kappas, strict=True)]
        return tuple(product)

    def notices(self, n: int, mean_ratio: float | None = None) -> list[Notice]:
        return [notice for part in self.scalings for notice in part.notices(n, mean_ratio)]

    def build(self, shapes: Sequence[SkipShape]) -> SkipScaling:
        from scalelong.scaling.method_modules import ComposedSkips

        return ComposedSkips(self, shapes)


def compose(*scalings: Scaling) -> Scaling:
    """Return a spec that applies several scalings to each skip, in this order.

    One of each family: a weight of the skip (CS, LS, gate, mp, …), a norm, an adapter, Skip-Tuning, FreeU,
    self-conditioning. A norm comes before what multiplies the skip, because it would divide the factor out again.

    Args:
        *scalings: Two specs or more; `NoScaling` is left out.

    Returns:
        The composed spec.

    Examples:
        >>> both = scalelong.compose(scalelong.ConstantScaling(0.5), scalelong.SkipTuning(0.8))
        >>> both.label, both.coefficients(3)
        ('cs-0.5+skip-tuning-0.8', (1.0, 0.45, 0.2))
    """
    parts = [part for part in scalings if not (isinstance(part, Scaling) and part.is_identity)]
    return parts[0] if len(parts) == 1 else ComposedScaling(tuple(parts))


def _fraction(name: str, value: Any) -> float:
    number = finite(name, value)
    if not 0 <= number <= 1:
        raise invalid(name, "a number from 0 to 1", value)
    return number
