"""`measure_theory` measures every statement of Section 3 in both initializations; `verdicts` says which ones hold."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from scalelong.errors import invalid
from scalelong.process import PROCESSES
from scalelong.progress import track
from scalelong.scaling import FixedScaling
from scalelong.theory.bounds import gradient_path_sums, gradient_statement
from scalelong.theory.fits import exponent
from scalelong.theory.lipschitz import RobustnessRow, ViolationRow, robustness_rows, violation_rows
from scalelong.theory.propagation import (
    FitRow,
    InputRow,
    PropagationRow,
    Shape,
    SweepRow,
    fit_row,
    four_scalings,
    input_row,
    propagation_row,
    sample_networks,
    sweep_row,
)
from scalelong.theory.stacked import INITS

NARROWEST = 16  # in narrower networks all ReLUs of a layer are often closed and the output is 0
MOST_SKIPS = 128
ROBUSTNESS_WIDTH = 128  # singular values of whole Jacobians are cubic in the width
EXPONENT_TOLERANCE = 0.16  # of the spread's −1/2: two standard errors with 32 networks at each of four widths


@dataclass(frozen=True)
class TheoryReport:
    """Everything that `scalelong theory` prints and draws."""

    shape: Shape
    seeds: int
    kappa: float
    propagation: tuple[PropagationRow, ...]
    fits: tuple[FitRow, ...]
    sweeps: tuple[SweepRow, ...]
    inputs: tuple[InputRow, ...]
    robustness: tuple[RobustnessRow, ...]
    violations: tuple[ViolationRow, ...]

    @property
    def scalings(self) -> dict[str, FixedScaling]:
        return four_scalings(self.kappa)

    @property
    def spread_exponents(self) -> dict[str, float]:
        """The exponent p of spread ∝ m^p for each initialization; −1/2 by Theorem 3.1."""
        sweeps = {init: self.sweep(init, "width") for init in INITS}
        return {k: exponent([row.shape.width for row in v], [row.spread for row in v]) for k, v in sweeps.items()}

    def fit(self, init: str) -> FitRow:
        return next(row for row in self.fits if row.init == init)

    def sweep(self, init: str, axis: str) -> list[SweepRow]:
        """Rows that differ from the central shape in one axis alone ("width" or "skips"), in ascending order."""
        centre = {axis: getattr(self.shape, axis)}
        rows = [row for row in self.sweeps if row.init == init and replace(row.shape, **centre) == self.shape]
        return sorted(rows, key=lambda row: getattr(row.shape, axis))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self) | {"spread_exponents": self.spread_exponents}


def measure_theory(
    seeds: int = 32, width: int = 256, skips: int = 6, depth: int = 2, kappa: float = 0.7
) -> TheoryReport:
    """Build networks of Eq. 3 over seeds and shapes, run and differentiate them, and compare with the formulas."""
    minima = {"seeds": (seeds, 2), "width": (width, 2 * NARROWEST), "skips": (skips, 1), "depth": (depth, 1)}
    for name, (value, minimum) in minima.items():
        if value < minimum:
            raise invalid(name, f"an integer >= {minimum}", value)
    if skips > MOST_SKIPS:
        raise invalid(
            "skips", f"an integer from 1 to {MOST_SKIPS}", skips, "squared gradients of more overflow float64"
        )
    centre, scalings = Shape(width, skips, depth), four_scalings(kappa)
    shapes = [
        centre,
        *(Shape(width // k, skips, depth) for k in (2, 4, 8) if width // k >= NARROWEST),
        *(Shape(width, n, depth) for n in sorted({1, skips // 3, 2 * skips // 3} - {0, skips}) or [2]),
        *(Shape(width, skips, d) for d in (1, 2, 3) if d != depth),
    ]
    propagation, fits, sweeps = [], [], []
    for init, shape in track([(init, shape) for shape in shapes for init in INITS], "measuring propagation"):
        samples = sample_networks(init, shape, scalings, seeds)
        rows = [propagation_row(init, name, spec, shape, samples[name]) for name, spec in scalings.items()]
        fit = fit_row(init, shape, scalings, samples)
        sweeps.append(sweep_row(shape, rows, fit, samples.values()))
        if shape == centre:
            propagation += rows
            fits.append(fit)
    narrow = Shape(min(width, ROBUSTNESS_WIDTH), skips, depth)
    robustness = [robustness_rows(init, narrow, scalings, max(2, seeds // 4)) for init in track(INITS, "Jacobians")]
    return TheoryReport(
        shape=centre, seeds=seeds, kappa=kappa, propagation=tuple(propagation), fits=tuple(fits), sweeps=tuple(sweeps),
        inputs=tuple(input_row(process, width, 4000) for process in PROCESSES),
        robustness=tuple(row for rows in robustness for row in rows), violations=violation_rows(kappa),
    )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """One statement in one setting: the claim, the measured result, and whether they agree."""

    statement: str
    setting: str
    claim: str
    result: str
    holds: bool


def verdicts(report: TheoryReport) -> list[Verdict]:
    """Judge every statement of Section 3 and the comparisons of Sections 4.1 and 6."""
    return [
        *(verdict for init in INITS for verdict in _theorem_3_1(report, init)),
        _lemma_3_2(report),
        *(_theorem_3_3(report, init) for init in INITS),
        *_theorem_3_4(report),
        *(_cs_against_universal(report, init) for init in INITS),
        *(_direction(report, init) for init in INITS),
    ]


def _theorem_3_1(report: TheoryReport, init: str) -> Iterator[Verdict]:
    fit, (standard, _, cs, _) = report.fit(init), [row for row in report.propagation if row.init == init]
    predicted, measured = standard.statement / cs.statement, standard.feature.measured / cs.feature.measured
    result = (
        f"R² {fit.r_squared:.3f} with c₁ = {fit.c1:.3g}, c₂ = {fit.c2:.3g}‖x_t‖² (path sum without fitted constants: "
        f"{fit.r_squared_paths:.3f}); CS reduces ‖h_0‖² by a factor of {measured:.2f}, Σκ² + 1 predicts {predicted:.2f}"
    )
    yield Verdict("Theorem 3.1", init, "‖h_i‖² = c₁‖x_t‖²Σκ_j² + c₂", result, fit.r_squared >= 0.95)

    claim = "the sum starts at j = i (Eq. 4)"
    result = f"R² {fit.r_squared_printed:.3f}; from j = i + 1, as in the proof, {fit.r_squared:.3f}"
    yield Verdict("Theorem 3.1, index", init, claim, result, fit.r_squared_printed >= fit.r_squared)

    power, rows = report.spread_exponents[init], report.sweep(init, "width")
    ends = [f"{row.spread:.2f} at m = {row.shape.width}" for row in (rows[0], rows[-1])]
    claim = "1 − O(N)exp(−Ω(mρ²)): the spread shrinks like m^(−1/2)"
    result, holds = f"m^({power:.2f}): from {' to '.join(ends)}", abs(power + 0.5) <= EXPONENT_TOLERANCE
    yield Verdict("Theorem 3.1, probability", init, claim, result, holds)


def _lemma_3_2(report: TheoryReport) -> Verdict:
    parts = [f"{row.process} {row.measured:.4f} (predicted {row.predicted:.4f})" for row in report.inputs]
    mean = next(row.mean_alpha_bar for row in report.inputs if row.process == "ddpm")
    worst = max(abs(row.measured / row.predicted - 1) for row in report.inputs)
    result = f"E‖x_t‖²/m: {', '.join(parts)}; DDPM's Eᾱ is {mean:.4f}"
    return Verdict("Lemma 3.2", "uniform x_0", "E‖x_t‖² = (1 − 2Eᾱ/3)m, Eᾱ ≈ 0.27", result, worst <= 0.01)


def _theorem_3_3(report: TheoryReport, init: str) -> Verdict:
    few, *_, many = report.sweep(init, "skips")
    ratios = [row.gradient_ratio for row in report.propagation if row.init == init]
    means = [_mean_field_constant(row.shape.skips, init, report.shape.depth) for row in (few, many)]
    growth = many.constant / few.constant
    claim = "‖∇_W ℓ‖² ≤ O(ℓ‖x_t‖²Σκ_j² + c₃), one constant for every W and N"
    result = (
        f"the constant is {few.constant:.3g} at N = {few.shape.skips} and {many.constant:.3g} at N = {many.shape.skips}"
        f" (×{growth:.3g}; mean field, standard: {means[0]:.3g} and {means[1]:.3g}); "
        f"measured over mean field {min(ratios):.2f} to {max(ratios):.2f}"
    )
    return Verdict("Theorem 3.3", init, claim, result, growth <= 2)


def _mean_field_constant(n: int, init: str, depth: int) -> float:
    """Theorem 3.3's constant of the unscaled network in the mean field."""
    kappas = (1.0,) * n
    rows = gradient_path_sums(kappas, init, depth)
    return max(max(row) / total for row, total in zip(rows, gradient_statement(kappas), strict=True))


def _theorem_3_4(report: TheoryReport) -> Iterator[Verdict]:
    wide, narrow = report.robustness, report.violations
    checked, exceeded = sum(row.checked for row in wide), sum(row.paper_violations for row in wide)
    violated = sum(row.certified_violations for row in wide) + sum(row.certified for row in narrow)
    slack = min(math.log10(row.certified / row.network) for row in wide)
    claim = "with M₀ = max ‖J_b‖‖J_a‖ the bound is never exceeded"
    result = (
        f"exceeded in {violated} of {checked + sum(row.checked for row in narrow)} cases; "
        f"wide networks are below it by a factor of 10^{slack:.1f} or more"
    )
    yield Verdict("Theorem 3.4, certified", "both", claim, result, violated == 0)

    parts = [f"{row.paper} of {row.checked} {row.networks} (by up to ×{row.worst:.3g})" for row in narrow]
    claim = "‖ΔUNet‖ ≤ ε(Σκ_i M₀^i + c₀) with M₀ = max ‖b_i∘a_i‖"
    result = f"exceeded in {exceeded} of {checked} cases of wide random networks, {', '.join(parts)}"
    yield Verdict("Theorem 3.4", "both", claim, result, exceeded + sum(row.paper for row in narrow) == 0)


def _cs_against_universal(report: TheoryReport, init: str) -> Verdict:
    _, universal, cs, _ = (row for row in report.robustness if row.init == init)
    expected = report.kappa ** (report.shape.skips - 1) * math.sqrt(2)
    main, whole = cs.main_term / universal.main_term, cs.paper / universal.paper
    claim = f"CS's bound is κ^(N−1)·√2 = {expected:.2f} of 1/√2's"
    result = (
        f"its main term Σκ_i M₀^i is {main:.2f}; with c₀ = M₀^N L₀, which no κ scales, the whole bound is {whole:.2f}; "
        f"the measured ‖∂UNet/∂x_t‖ {cs.network / universal.network:.2f}"
    )
    return Verdict("Section 4.1, orders", init, claim, result, abs(math.log(whole / expected)) <= math.log(2))


def _direction(report: TheoryReport, init: str) -> Verdict:
    _, _, cs, reverse = (row for row in report.robustness if row.init == init)
    main, network = cs.main_term / reverse.main_term, cs.network / reverse.network
    claim = "S < S_r: CS is more robust than reversed CS"
    result = f"S/S_r is {main:.2f}; the measured ‖∂UNet/∂x_t‖ {network:.2f}"
    return Verdict("Section 6, direction", init, claim, result, network < 1)
