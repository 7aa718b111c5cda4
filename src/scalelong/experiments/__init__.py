"""Experiments: train variants under equal conditions, compare them over seeds, and measure their robustness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "scalelong.experiments.compare": ("Result", "run_comparison"),
        "scalelong.experiments.comparison": ("Comparison",),
        "scalelong.experiments.plan": ("DistanceSpec", "Variant", "scaling_variants"),
    },
)

if TYPE_CHECKING:
    from scalelong.experiments.compare import Result as Result
    from scalelong.experiments.compare import run_comparison as run_comparison
    from scalelong.experiments.comparison import Comparison as Comparison
    from scalelong.experiments.plan import DistanceSpec as DistanceSpec
    from scalelong.experiments.plan import Variant as Variant
    from scalelong.experiments.plan import scaling_variants as scaling_variants
