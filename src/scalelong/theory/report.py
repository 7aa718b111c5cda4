"""The whole measurement: every statement of Section 3 on the network of Eq. 3, in both initialisations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scalelong.errors import ScaleLongError
from scalelong.process import PROCESSES
from scalelong.progress import track
from scalelong.scaling import FixedScaling
from scalelong.theory.fits import exponent
from scalelong.theory.propagation_rows import (
    FitRow,
    InputRow,
    PropagationRow,
    SweepRow,
    fit_row,
    input_row,
    propagation_row,
    sweep_row,
)
from scalelong.theory.robustness_rows import RobustnessRow, ViolationRow, robustness_rows, violation_rows
from scalelong.theory.samples import Shape, four_scalings, sample_networks
from scalelong.theory.stacked import INITS

NARROWEST = 16  # below, a layer's ReLUs are often all closed and the network is dead
ROBUSTNESS_WIDTH = 128  # Jacobians are decomposed whole, which is cubic in the width


@dataclass(frozen=True)
class TheoryReport:
    """Everything that `scalelong theory` prints and draws.

    spread_exponents: p of spread ∝ m^p for each initialisation; Theorem 3.1 says −1/2.
    """

    shape: Shape
    seeds: int
    kappa: float
    propagation: tuple[PropagationRow, ...]
    fits: tuple[FitRow, ...]
    sweeps: tuple[SweepRow, ...]
    spread_exponents: dict[str, float]
    inputs: tuple[InputRow, ...]
    robustness: tuple[RobustnessRow, ...]
    violations: tuple[ViolationRow, ...]

    @property
    def scalings(self) -> dict[str, FixedScaling]:
        return four_scalings(self.kappa)

    def fit(self, init: str) -> FitRow:
        return next(row for row in self.fits if row.init == init)

    def width_sweep(self, init: str) -> list[SweepRow]:
        """The rows that differ from the centre in width alone, narrow to wide."""
        same = (self.shape.skips, self.shape.depth)
        rows = [r for r in self.sweeps if r.init == init and (r.shape.skips, r.shape.depth) == same]
        return sorted(rows, key=lambda row: row.shape.width)

    def skip_sweep(self, init: str) -> list[SweepRow]:
        """The rows that differ from the centre in the number of skips alone, few to many."""
        same = (self.shape.width, self.shape.depth)
        rows = [r for r in self.sweeps if r.init == init and (r.shape.width, r.shape.depth) == same]
        return sorted(rows, key=lambda row: row.shape.skips)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def measure_theory(
    seeds: int = 32, width: int = 256, skips: int = 6, depth: int = 2, kappa: float = 0.7
) -> TheoryReport:
    """Build networks over seeds, run and differentiate them, and hold the results against the formulas."""
    for name, value, least in (
        ("seeds", seeds, 2),
        ("width", width, 2 * NARROWEST),
        ("skips", skips, 1),
        ("depth", depth, 1),
    ):
        if value < least:
            raise ScaleLongError(f"{name} is {value}; it must be at least {least}")
    centre, scalings = Shape(width, skips, depth), four_scalings(kappa)
    shapes = [
        centre,
        *(Shape(width // k, skips, depth) for k in (2, 4, 8) if width // k >= NARROWEST),
        *(Shape(width, n, depth) for n in sorted({1, skips // 3, 2 * skips // 3} - {0, skips}) or [2]),
        *(Shape(width, skips, d) for d in (1, 2, 3) if d != depth),
    ]
    jobs = [(init, shape) for shape in shapes for init in INITS]
    sampled = {
        (init, shape): sample_networks(init, shape, scalings, seeds)
        for init, shape in track(jobs, "measuring propagation")
    }
    sweeps = tuple(sweep_row(init, shape, scalings, samples) for (init, shape), samples in sampled.items())
    narrow = Shape(min(width, ROBUSTNESS_WIDTH), skips, depth)
    robustness = [robustness_rows(init, narrow, scalings, max(2, seeds // 4)) for init in track(INITS, "Jacobians")]
    report = TheoryReport(
        shape=centre,
        seeds=seeds,
        kappa=kappa,
        propagation=tuple(
            propagation_row(init, name, spec, centre, sampled[init, centre][name])
            for init in INITS
            for name, spec in scalings.items()
        ),
        fits=tuple(fit_row(init, centre, scalings, sampled[init, centre]) for init in INITS),
        sweeps=sweeps,
        spread_exponents={},
        inputs=tuple(input_row(process, width, 4000) for process in PROCESSES),
        robustness=tuple(row for rows in robustness for row in rows),
        violations=violation_rows(kappa),
    )
    for init in INITS:
        rows = report.width_sweep(init)
        widths, spreads = [row.shape.width for row in rows], [row.spread for row in rows]
        report.spread_exponents[init] = exponent(widths, spreads)
    return report
