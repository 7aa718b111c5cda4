"""Experiments over training, evaluation and stability: variants trained under equal conditions and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "scalelong.experiments.compare": ("Result", "run_comparison"),
        "scalelong.experiments.comparison": ("Comparison",),
        "scalelong.experiments.distance": ("DistanceSpec",),
        "scalelong.experiments.plan": ("Variant", "scaling_variants"),
    },
)

if TYPE_CHECKING:
    from scalelong.experiments.compare import Result as Result
    from scalelong.experiments.compare import run_comparison as run_comparison
    from scalelong.experiments.comparison import Comparison as Comparison
    from scalelong.experiments.distance import DistanceSpec as DistanceSpec
    from scalelong.experiments.plan import Variant as Variant
    from scalelong.experiments.plan import scaling_variants as scaling_variants
