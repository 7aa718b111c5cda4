"""The paper's Section 3 on the network of Eq. 3: formulas, measurements and verdicts (`scalelong theory`)."""

from scalelong.theory.propagation import Shape, four_scalings
from scalelong.theory.report import TheoryReport, Verdict, measure_theory, verdicts

__all__ = ["Shape", "TheoryReport", "Verdict", "four_scalings", "measure_theory", "verdicts"]
