"""The paper's Section 3 measured: what `scalelong theory` runs."""

from scalelong.theory.report import TheoryReport, measure_theory
from scalelong.theory.samples import Shape, four_scalings

__all__ = ["Shape", "TheoryReport", "four_scalings", "measure_theory"]
