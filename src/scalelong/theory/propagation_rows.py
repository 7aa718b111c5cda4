"""Theorems 3.1 and 3.3 and Lemma 3.2: predicted beside measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.process import get_process
from scalelong.scaling import FixedScaling
from scalelong.theory.bounds import expected_input_norm, sum_of_squares
from scalelong.theory.fits import fit_line, r_squared
from scalelong.theory.meanfield import gradient_path_sums, log_feature_path_sum
from scalelong.theory.propagation import draw_inputs, gradient_index
from scalelong.theory.samples import Samples, Shape


@dataclass(frozen=True)
class Compared:
    """A prediction beside the mean over networks and that mean's standard error."""

    predicted: float
    measured: float
    error: float


@dataclass(frozen=True)
class PropagationRow:
    """One initialisation and scaling.

    statement: Σκ_j² + 1, what Theorem 3.1 says of ‖h_0‖²/‖x_t‖² with c_1 = 1 and c_2 = ‖x_t‖².
    feature: ‖h_0‖²/‖x_t‖², predicted by the path sum with its true gains.
    gradient: ‖∇_W ℓ‖²/(ℓ‖x_t‖²) of the W for which it is predicted to be largest; `matrix` says which.
    gradient_ratio: measured over predicted, the geometric mean over every W.
    constant: the largest ‖∇_W ℓ‖²/(ℓ‖x_t‖²(Σ_{j≥i} κ_j² + 1)) over every W, network and input: the constant
        with which Theorem 3.3 holds, its c_3 being ℓ‖x_t‖².
    """

    init: str
    scaling: str
    coefficients: tuple[float, ...]
    sum_of_squares: float
    statement: float
    feature: Compared
    gradient: Compared
    matrix: str
    gradient_ratio: float
    constant: float


@dataclass(frozen=True)
class FeaturePoint:
    """E‖h_i‖²/‖x_t‖² of one scaling: `measured`, and `predicted` by the path sum. total: Σ_{j>i} κ_j²."""

    scaling: str
    i: int
    total: float
    measured: float
    predicted: float


@dataclass(frozen=True)
class FitRow:
    """Theorem 3.1 over every h_i and scaling: c_1 and c_2/‖x_t‖² fitted, and how much variance each form explains.

    r_squared: the proof's sum from j = i + 1.    r_squared_printed: the statement's sum from j = i.
    r_squared_paths: the path sum with its true gains, which has nothing to fit.
    """

    init: str
    c1: float
    c2: float
    r_squared: float
    r_squared_printed: float
    r_squared_paths: float
    points: tuple[FeaturePoint, ...]


@dataclass(frozen=True)
class SweepRow:
    """One initialisation and shape, over all scalings.

    feature_ratio, gradient_ratio: measured over predicted.    constant: Theorem 3.3's, the largest.
    spread: the standard deviation over networks of log ‖h_0‖², which Theorem 3.1 has shrink like m^(-1/2).
    spread_predicted: √((2N+1)(5l−3)/m), that of the longest path alone: 5/m a matrix with ReLU, 2/m without.
    """

    init: str
    shape: Shape
    feature_ratio: float
    r_squared: float
    r_squared_paths: float
    gradient_ratio: float
    constant: float
    spread: float
    spread_predicted: float


@dataclass(frozen=True)
class InputRow:
    """Lemma 3.2 for one process: E‖x_t‖²/m of uniform x_0."""

    process: str
    mean_alpha_bar: float
    predicted: float
    measured: float


def propagation_row(init: str, name: str, spec: FixedScaling, shape: Shape, samples: Samples) -> PropagationRow:
    """Theorems 3.1 (for h_0) and 3.3 (for every W)."""
    kappas = spec.coefficients(shape.skips)
    total = sum_of_squares(kappas)
    sums = gradient_path_sums(kappas, init, shape.depth, samples.noise_ratio)
    predicted = torch.tensor(sums, dtype=torch.float64)  # (2N+1, l)
    row, column = divmod(int(predicted.argmax()), shape.depth)
    ratios = samples.gradients.mean((0, 1)) / predicted
    return PropagationRow(
        init=init,
        scaling=name,
        coefficients=kappas,
        sum_of_squares=total,
        statement=total + 1,
        feature=_compared(math.exp(log_feature_path_sum(kappas, 0, init)), samples.features[..., 0]),
        gradient=_compared(float(predicted[row, column]), samples.gradients[..., row, column]),
        matrix=shape.matrix_name(row, column),
        gradient_ratio=float(ratios.log().mean().exp()),
        constant=_gradient_constant(kappas, samples),
    )


def fit_row(init: str, shape: Shape, scalings: Mapping[str, FixedScaling], samples: Mapping[str, Samples]) -> FitRow:
    """Theorem 3.1 for every h_i under every scaling."""
    points, printed = [], []
    for name, spec in scalings.items():
        kappas = spec.coefficients(shape.skips)
        for i, measured in enumerate(samples[name].features.mean((0, 1)).tolist()):
            predicted = math.exp(log_feature_path_sum(kappas, i, init))
            points.append(FeaturePoint(name, i, sum_of_squares(kappas, i + 1), measured, predicted))
            printed.append(sum_of_squares(kappas, max(i, 1)))
    measured_ = [point.measured for point in points]
    line = fit_line([point.total for point in points], measured_)
    return FitRow(
        init=init,
        c1=line.slope,
        c2=line.intercept,
        r_squared=line.r_squared,
        r_squared_printed=fit_line(printed, measured_).r_squared,
        r_squared_paths=r_squared(measured_, [point.predicted for point in points]),
        points=tuple(points),
    )


def sweep_row(
    init: str, shape: Shape, scalings: Mapping[str, FixedScaling], samples: Mapping[str, Samples]
) -> SweepRow:
    """Everything about one shape in one row."""
    fit = fit_row(init, shape, scalings, samples)
    rows = [propagation_row(init, name, spec, shape, samples[name]) for name, spec in scalings.items()]
    return SweepRow(
        init=init,
        shape=shape,
        feature_ratio=_mean(row.feature.measured / row.feature.predicted for row in rows),
        r_squared=fit.r_squared,
        r_squared_paths=fit.r_squared_paths,
        gradient_ratio=_mean(row.gradient_ratio for row in rows),
        constant=max(row.constant for row in rows),
        spread=math.sqrt(_mean(_log_variance(found.features[..., 0]) for found in samples.values())),
        spread_predicted=math.sqrt((2 * shape.skips + 1) * (5 * shape.depth - 3) / shape.width),
    )


def input_row(process: str, width: int, samples: int, seed: int = 0) -> InputRow:
    """Lemma 3.2 by drawing uniform x_0, times of the process and noise."""
    chosen = get_process(process)
    alpha_bar = chosen.alpha_bar(chosen.grid())
    mean = float(alpha_bar.mean())
    measured = float(draw_inputs(samples, width, alpha_bar, seed).x_t.square().mean())
    return InputRow(process, mean, expected_input_norm(1, mean), measured)


def _gradient_constant(kappas: tuple[float, ...], samples: Samples) -> float:
    n = len(kappas)
    sums = [sum_of_squares(kappas, gradient_index(row, n)) + 1 for row in range(2 * n + 1)]
    return float((samples.gradients / torch.tensor(sums, dtype=torch.float64)[:, None]).max())


def _log_variance(values: Tensor) -> float:  # (seeds, INPUTS)
    """The variance of the logarithm over networks, averaged over inputs; a dead network has no logarithm."""
    return _mean(float(one[one > 0].log().var()) for one in values.unbind(1))


def _compared(predicted: float, values: Tensor) -> Compared:  # (seeds, INPUTS)
    """Inputs of one network are not independent, so the error counts networks."""
    networks = values.mean(1)
    return Compared(predicted, float(networks.mean()), float(networks.std() / math.sqrt(len(networks))))


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)
