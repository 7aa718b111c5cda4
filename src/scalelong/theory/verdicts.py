"""Which statements hold as they are printed, and by how much the others fail."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalelong.theory.bounds import sum_of_squares
from scalelong.theory.meanfield import gradient_path_sums
from scalelong.theory.propagation import gradient_index
from scalelong.theory.propagation_rows import PropagationRow
from scalelong.theory.report import TheoryReport
from scalelong.theory.robustness_rows import RobustnessRow
from scalelong.theory.stacked import INITS

EXPLAINED = 0.95  # a fit that explains this much of the variance counts as holding
EXPONENT_TOLERANCE = 0.16  # of the spread's −1/2: two standard errors with 32 networks at each of four widths
INPUT_TOLERANCE = 0.01


@dataclass(frozen=True)
class Verdict:
    """One statement in one setting: what it says, what was found, and whether the two agree."""

    statement: str
    setting: str
    says: str
    found: str
    holds: bool


def verdicts(report: TheoryReport) -> list[Verdict]:
    """Every statement of Section 3 and the comparisons of Sections 4.1 and 6."""
    found: list[Verdict] = []
    for init in INITS:
        found += [_features(report, init), _index(report, init), _concentration(report, init)]
    found += [_input_norm(report)]
    found += [_gradient(report, init) for init in INITS]
    found += [_certified(report), _paper_bound(report)]
    found += [_cs_against_universal(report, init) for init in INITS]
    found += [_direction(report, init) for init in INITS]
    return found


def _features(report: TheoryReport, init: str) -> Verdict:
    fit, (standard, _, cs, _) = report.fit(init), _propagation(report, init)
    says_ratio, ratio = standard.statement / cs.statement, standard.feature.measured / cs.feature.measured
    return Verdict(
        "Theorem 3.1",
        init,
        "‖h_i‖² = c₁‖x_t‖²Σκ_j² + c₂",
        f"R² {fit.r_squared:.3f} with c₁ = {fit.c1:.3g}, c₂ = {fit.c2:.3g}‖x_t‖² (path sum, nothing fitted: "
        f"{fit.r_squared_paths:.3f}); CS shrinks ‖h_0‖² {ratio:.2f} times where Σκ² + 1 says {says_ratio:.2f}",
        fit.r_squared >= EXPLAINED,
    )


def _index(report: TheoryReport, init: str) -> Verdict:
    fit = report.fit(init)
    return Verdict(
        "Theorem 3.1, index",
        init,
        "the sum starts at j = i (Eq. 4)",
        f"R² {fit.r_squared_printed:.3f}; from j = i + 1, as in the proof, {fit.r_squared:.3f}",
        fit.r_squared_printed >= fit.r_squared,
    )


def _concentration(report: TheoryReport, init: str) -> Verdict:
    rows, exponent = report.width_sweep(init), report.spread_exponents[init]
    return Verdict(
        "Theorem 3.1, probability",
        init,
        "1 − O(N)exp(−Ω(mρ²)): the spread shrinks like m^(−1/2)",
        f"m^({exponent:.2f}): from {rows[0].spread:.2f} at m = {rows[0].shape.width} to {rows[-1].spread:.2f} "
        f"at m = {rows[-1].shape.width}",
        abs(exponent + 0.5) <= EXPONENT_TOLERANCE,
    )


def _input_norm(report: TheoryReport) -> Verdict:
    parts = [f"{row.process} {row.measured:.4f} for {row.predicted:.4f}" for row in report.inputs]
    mean = next(row.mean_alpha_bar for row in report.inputs if row.process == "ddpm")
    worst = max(abs(row.measured / row.predicted - 1) for row in report.inputs)
    return Verdict(
        "Lemma 3.2",
        "uniform x_0",
        "E‖x_t‖² = (1 − 2Eᾱ/3)m, Eᾱ ≈ 0.27",
        f"E‖x_t‖²/m: {', '.join(parts)}; DDPM's Eᾱ is {mean:.4f}",
        worst <= INPUT_TOLERANCE,
    )


def _gradient(report: TheoryReport, init: str) -> Verdict:
    few, many = report.skip_sweep(init)[0], report.skip_sweep(init)[-1]
    ratios = [row.gradient_ratio for row in _propagation(report, init)]
    means = [_mean_constant(row.shape.skips, init, report.shape.depth) for row in (few, many)]
    growth = many.constant / few.constant
    return Verdict(
        "Theorem 3.3",
        init,
        "‖∇_W ℓ‖² ≤ O(ℓ‖x_t‖²Σκ_j² + c₃), one constant for every W and N",
        f"the constant is {few.constant:.3g} at N = {few.shape.skips} and {many.constant:.3g} at N = {many.shape.skips}"
        f" (×{growth:.3g}; mean field, standard: {means[0]:.3g} and {means[1]:.3g}); "
        f"measured over mean field {min(ratios):.2f} to {max(ratios):.2f}",
        growth <= 2,
    )


def _mean_constant(n: int, init: str, depth: int) -> float:
    """Theorem 3.3's constant for the unscaled network in the mean field."""
    kappas = (1.0,) * n
    rows = gradient_path_sums(kappas, init, depth)
    return max(max(row) / (sum_of_squares(kappas, gradient_index(k, n)) + 1) for k, row in enumerate(rows))


def _certified(report: TheoryReport) -> Verdict:
    violated = sum(r.certified_violations for r in report.robustness) + sum(v.certified for v in report.violations)
    slack = min(math.log10(row.certified / row.network) for row in report.robustness)
    return Verdict(
        "Theorem 3.4, certified",
        "both",
        "with M₀ = max ‖J_b‖‖J_a‖ it is never exceeded",
        f"exceeded in {violated} of {_checked(report)} cases; wide networks stay 10^{slack:.1f} times below or more",
        violated == 0,
    )


def _paper_bound(report: TheoryReport) -> Verdict:
    wide = sum(row.paper_violations for row in report.robustness)
    checked = sum(row.checked for row in report.robustness)
    parts = [f"{row.paper} of {row.checked} {row.networks} (by up to ×{row.worst:.3g})" for row in report.violations]
    return Verdict(
        "Theorem 3.4",
        "both",
        "‖ΔUNet‖ ≤ ε(Σκ_i M₀^i + c₀) with M₀ = max ‖b_i∘a_i‖",
        f"exceeded in {wide} of {checked} cases of wide random networks, {', '.join(parts)}",
        wide + sum(row.paper for row in report.violations) == 0,
    )


def _cs_against_universal(report: TheoryReport, init: str) -> Verdict:
    _, universal, cs, _ = _robustness(report, init)
    expected = report.kappa ** (report.shape.skips - 1) * math.sqrt(2)
    main, whole = cs.main_term / universal.main_term, cs.paper / universal.paper
    return Verdict(
        "Section 4.1, orders",
        init,
        f"CS's bound is κ^(N−1)·√2 = {expected:.2f} of 1/√2's",
        f"its main term Σκ_i M₀^i {main:.2f}, but with c₀ = M₀^N L₀, which no κ touches, {whole:.2f}; "
        f"the measured ‖∂UNet/∂x_t‖ {cs.network / universal.network:.2f}",
        abs(math.log(whole / expected)) <= math.log(2),
    )


def _direction(report: TheoryReport, init: str) -> Verdict:
    _, _, cs, reverse = _robustness(report, init)
    return Verdict(
        "Section 6, direction",
        init,
        "S < S_r: CS is more robust than reversed CS",
        f"S/S_r is {cs.main_term / reverse.main_term:.2f}; the measured ‖∂UNet/∂x_t‖ "
        f"{cs.network / reverse.network:.2f}",
        cs.network < reverse.network,
    )


def _checked(report: TheoryReport) -> int:
    return sum(row.checked for row in report.robustness) + sum(row.checked for row in report.violations)


def _propagation(report: TheoryReport, init: str) -> list[PropagationRow]:
    return [row for row in report.propagation if row.init == init]


def _robustness(report: TheoryReport, init: str) -> list[RobustnessRow]:
    return [row for row in report.robustness if row.init == init]
