"""Forward and backward propagation through the network of Eq. 3: Theorems 3.1 and 3.3 and Lemma 3.2, measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from scalelong.kappa import sum_of_squares
from scalelong.process import get_process
from scalelong.scaling import ConstantScaling, FixedScaling, NoScaling, UniformScaling
from scalelong.skips import apply
from scalelong.theory.bounds import expected_input_norm, gradient_path_sums, gradient_statement, log_feature_path_sum
from scalelong.theory.fits import fit_line, r_squared
from scalelong.theory.stacked import StackedUNet

INPUTS = 8  # noisy inputs per network
SINGLE = 16  # long skips up to which networks run in float32


@dataclass(frozen=True)
class Shape:
    """Size of a network of Eq. 3: width m, N long skips, l matrices per block."""

    width: int
    skips: int
    depth: int

    @property
    def dtype(self) -> torch.dtype:
        """float64 for many skips: gradients of N skips grow like 4^N, their squared norms like 16^N."""
        return torch.float64 if self.skips > SINGLE else torch.float32

    def build(self, init: str, seed: int) -> StackedUNet:
        return StackedUNet(self.width, self.skips, self.depth, init=init, seed=seed).to(self.dtype)

    def matrix_name(self, row: int, column: int) -> str:
        """Name of W in this row and column of `Propagation.gradients`, such as "a_1 W_2"."""
        n = self.skips
        block = f"a_{row + 1}" if row < n else f"f_{n}" if row == n else f"b_{row - n}"
        return f"{block} W_{column + 1}"


def four_scalings(kappa: float) -> dict[str, FixedScaling]:
    """The scalings that the paper compares."""
    return {
        "standard": NoScaling(),
        "1/√2": UniformScaling(),
        f"CS {kappa:g}": ConstantScaling(kappa),
        f"reversed CS {kappa:g}": ConstantScaling(kappa, reverse=True),
    }


def draw_inputs(count: int, width: int, alpha_bar: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Draw x_t and its noise ε, (count, width), as Lemma 3.2 assumes: x_0 uniform on [−1, 1], t uniform over steps."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.randint(len(alpha_bar), (count, 1), generator=generator)
    a = alpha_bar.to(torch.float32)[t]  # (count, 1)
    x_0 = torch.rand(count, width, generator=generator) * 2 - 1
    eps = torch.randn(count, width, generator=generator)
    return a.sqrt() * x_0 + (1 - a).sqrt() * eps, eps


def ddpm_inputs(count: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw x_t and ε with DDPM's schedule."""
    return draw_inputs(count, width, get_process("ddpm").alpha_bar(torch.arange(1, 1001)), seed)


class Propagation(NamedTuple):
    """Forward and backward passes of a batch through one network, or of seeds × INPUTS through several.

    features: ‖h_i‖²/‖x_t‖² for i = 0 … N.  (…, N+1), float64
    gradients: ‖∇_W ℓ‖²/(ℓ‖x_t‖²) of every W, rows a_1 … a_N, f_N, b_1 … b_N, columns p = 1 … l.  (…, 2N+1, l), float64
    noise_ratio: ‖ε‖²/‖x_t‖².  (…)
    """

    features: Tensor
    gradients: Tensor
    noise_ratio: Tensor


def measure_propagation(net: StackedUNet, x_t: Tensor, eps: Tensor) -> Propagation:
    """Run samples (B, m) forward, and the loss ℓ = ‖ε − UNet(x_t)‖² (Eq. 2) of each backward.

    The gradient of W for one sample is the outer product of ∂ℓ/∂(Wz) and W's input z. Its norm is the product of
    their norms, so no gradient matrix is formed.
    """
    calls: list[tuple[Tensor, Tensor]] = []  # (z, Wz) of every matrix
    matrices = [matrix for block in net.blocks for matrix in block.matrices]
    hooks = [m.register_forward_hook(lambda _, args, output: calls.append((args[0], output))) for m in matrices]
    try:
        features = net.features(x_t.detach().requires_grad_())
    finally:
        for hook in hooks:
            hook.remove()
    loss = (eps - features.hidden[0]).square().sum(1)  # (B,)
    backward = torch.autograd.grad(loss.sum(), [output for _, output in calls])
    x_norm_sq = _norm_sq(x_t)
    norms = [_norm_sq(q) * _norm_sq(z.detach()) for q, (z, _) in zip(backward, calls, strict=True)]
    n, depth = net.num_skips, net.block_depth
    called = torch.stack(norms, dim=1).reshape(len(x_t), 2 * n + 1, depth)  # a_1 … a_N, f_N, b_N … b_1
    called = torch.cat([called[:, : n + 1], called[:, n + 1 :].flip(1)], dim=1)
    features_sq = torch.stack([_norm_sq(h.detach()) for h in features.hidden], dim=1)
    return Propagation(
        features=features_sq / x_norm_sq[:, None],
        gradients=called / (loss.detach() * x_norm_sq)[:, None, None],
        noise_ratio=_norm_sq(eps) / x_norm_sq,
    )


def _norm_sq(x: Tensor) -> Tensor:  # (B, m) -> (B,), float64: squares overflow long before the values do
    return x.double().square().sum(1)


def sample_networks(
    init: str, shape: Shape, scalings: Mapping[str, FixedScaling], seeds: int
) -> dict[str, Propagation]:
    """Measure one network and INPUTS noisy inputs per seed, the same for every scaling."""
    measured: dict[str, list[Propagation]] = {name: [] for name in scalings}
    for seed in range(seeds):
        net, (x_t, eps) = shape.build(init, seed), ddpm_inputs(INPUTS, shape.width, seed)
        x_t, eps = x_t.to(shape.dtype), eps.to(shape.dtype)
        for name, spec in scalings.items():
            apply(net, spec, replace=True)
            measured[name].append(measure_propagation(net, x_t, eps))
    return {name: Propagation(*map(torch.stack, zip(*runs, strict=True))) for name, runs in measured.items()}


@dataclass(frozen=True)
class Compared:
    """A prediction, the mean measured over networks, and the standard error of that mean."""

    predicted: float
    measured: float
    error: float


@dataclass(frozen=True)
class PropagationRow:
    """Theorems 3.1 and 3.3 for one initialization and scaling.

    statement: Σκ_j² + 1, Theorem 3.1's ‖h_0‖²/‖x_t‖² for c_1 = 1 and c_2 = ‖x_t‖².
    feature: ‖h_0‖²/‖x_t‖², predicted by the path sum with its true gains.
    gradient: ‖∇_W ℓ‖²/(ℓ‖x_t‖²) of the W with the largest prediction; `matrix` is its name.
    gradient_ratio: measured over predicted, geometric mean over every W.
    constant: the largest ‖∇_W ℓ‖²/(ℓ‖x_t‖²(Σ_{j≥i} κ_j² + 1)) over every W, network and input: the constant
        with which Theorem 3.3 holds for c_3 = ℓ‖x_t‖².
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
    """E‖h_i‖²/‖x_t‖² of one scaling, measured and predicted by the path sum. total: Σ_{j>i} κ_j²."""

    scaling: str
    i: int
    total: float
    measured: float
    predicted: float


@dataclass(frozen=True)
class FitRow:
    """Theorem 3.1 over every h_i and scaling: fitted c_1 and c_2/‖x_t‖², and the explained variance of each form.

    r_squared: the proof's sum from j = i + 1.    r_squared_printed: the statement's sum from j = i.
    r_squared_paths: the path sum with its true gains, without fitted constants.
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
    """One initialization and shape, over all scalings.

    feature_ratio, gradient_ratio: measured over predicted.    constant: Theorem 3.3's, the largest.
    spread: standard deviation over networks of log ‖h_0‖², which shrinks like m^(-1/2) by Theorem 3.1.
    spread_predicted: √((2N+1)(5l−3)/m), that of the longest path: 5/m per matrix with ReLU, 2/m without.
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


def propagation_row(init: str, name: str, spec: FixedScaling, shape: Shape, samples: Propagation) -> PropagationRow:
    """Compare Theorem 3.1 (for h_0) and Theorem 3.3 (for every W) with the measurements."""
    kappas = spec.coefficients(shape.skips)
    total = sum_of_squares(kappas)
    sums = gradient_path_sums(kappas, init, shape.depth, float(samples.noise_ratio.mean()))
    predicted = torch.tensor(sums, dtype=torch.float64)  # (2N+1, l)
    row, column = divmod(int(predicted.argmax()), shape.depth)
    ratios = samples.gradients.mean((0, 1)) / predicted
    statement = torch.tensor(gradient_statement(kappas), dtype=torch.float64)
    return PropagationRow(
        init, name, coefficients=kappas, sum_of_squares=total, statement=total + 1,
        feature=_compared(math.exp(log_feature_path_sum(kappas, 0, init)), samples.features[..., 0]),
        gradient=_compared(float(predicted[row, column]), samples.gradients[..., row, column]),
        matrix=shape.matrix_name(row, column), gradient_ratio=float(ratios.log().mean().exp()),
        constant=float((samples.gradients / statement[:, None]).max()),
    )  # fmt: skip


def fit_row(
    init: str, shape: Shape, scalings: Mapping[str, FixedScaling], samples: Mapping[str, Propagation]
) -> FitRow:
    """Fit Theorem 3.1 to every h_i under every scaling."""
    points, printed = [], []
    for name, spec in scalings.items():
        kappas = spec.coefficients(shape.skips)
        for i, mean in enumerate(samples[name].features.mean((0, 1)).tolist()):
            predicted = math.exp(log_feature_path_sum(kappas, i, init))
            points.append(FeaturePoint(name, i, sum_of_squares(kappas, i + 1), mean, predicted))
            printed.append(sum_of_squares(kappas, max(i, 1)))
    measured = [point.measured for point in points]
    line = fit_line([point.total for point in points], measured)
    return FitRow(
        init, c1=line.slope, c2=line.intercept, r_squared=line.r_squared,
        r_squared_printed=fit_line(printed, measured).r_squared,
        r_squared_paths=r_squared(measured, [point.predicted for point in points]), points=tuple(points),
    )  # fmt: skip


def sweep_row(shape: Shape, rows: Sequence[PropagationRow], fit: FitRow, samples: Iterable[Propagation]) -> SweepRow:
    """Summarize one shape over all scalings."""
    return SweepRow(
        fit.init, shape, feature_ratio=fmean(row.feature.measured / row.feature.predicted for row in rows),
        r_squared=fit.r_squared, r_squared_paths=fit.r_squared_paths,
        gradient_ratio=fmean(row.gradient_ratio for row in rows), constant=max(row.constant for row in rows),
        spread=math.sqrt(fmean(_log_variance(one.features[..., 0]) for one in samples)),
        spread_predicted=math.sqrt((2 * shape.skips + 1) * (5 * shape.depth - 3) / shape.width),
    )  # fmt: skip


def input_row(process: str, width: int, samples: int, seed: int = 0) -> InputRow:
    """Compare Lemma 3.2 with uniform x_0, times of the process and noise."""
    chosen = get_process(process)
    alpha_bar = chosen.alpha_bar(chosen.grid())
    mean = float(alpha_bar.mean())
    x_t, _ = draw_inputs(samples, width, alpha_bar, seed)
    return InputRow(process, mean, expected_input_norm(1, mean), float(x_t.square().mean()))


def _log_variance(values: Tensor) -> float:  # (seeds, INPUTS)
    """Variance of the logarithm over networks, averaged over inputs. Dead networks (output 0) are left out."""
    return fmean(float(one[one > 0].log().var()) for one in values.unbind(1))


def _compared(predicted: float, values: Tensor) -> Compared:  # (seeds, INPUTS)
    """Inputs of one network are not independent, so the standard error counts networks."""
    networks = values.mean(1)
    return Compared(predicted, float(networks.mean()), float(networks.std() / math.sqrt(len(networks))))
