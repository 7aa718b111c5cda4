"""The stability frontier: searches with known answers, the networks of the study, the command in a fresh process."""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import scalelong
from scalelong import ConstantScaling, LearnableScaling, NoScaling, UniformScaling
from scalelong.errors import ScaleLongError, UnknownNameError
from scalelong.experiments.frontier import Trial, bisect, lr_sensitivity, run_trial, stable_learning_rate
from scalelong.experiments.frontier_study import (
    NETWORKS,
    TRIALS,
    build_network,
    cells,
    digits_batch,
    measure_frontier,
    predicted_rate,
)


class Parabola(nn.Module):
    """ℓ = Σ a_k w_k² / 2: gradient descent diverges above 2/max a."""

    def __init__(self, curvature: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 1.0]))
        self.curvature = torch.tensor([1.0, curvature])

    def forward(self) -> torch.Tensor:
        return (self.curvature * self.w.square()).sum() / 2


def no_batch(seed: int, step: int) -> tuple[torch.Tensor]:
    return (torch.zeros(()),)


def itself(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output


def parabola(seed: int) -> nn.Module:
    return Parabola(50.0)


@pytest.mark.parametrize("curvature", [0.3, 8.0, 3000.0])
def test_the_frontier_of_a_parabola_is_two_over_its_curvature(curvature):
    edge = 2 / max(1.0, curvature)
    found = stable_learning_rate(
        lambda seed: Parabola(curvature), no_batch, steps=400, seeds=[0], tolerance=1.05, loss=itself
    )
    low, high = found.brackets[0]
    assert low <= edge * 1.001
    assert high >= edge * 0.999
    assert high / low <= 1.05


def test_momentum_moves_the_frontier_of_a_parabola_to_its_closed_form():
    found = stable_learning_rate(
        lambda seed: Parabola(10.0), no_batch, optimizer="momentum", steps=400, seeds=[0], tolerance=1.05, loss=itself
    )
    assert found.lr == pytest.approx(2 * (1 + 0.9) / 10.0, rel=0.06)


def test_seeds_in_processes_find_what_they_find_here():
    here = stable_learning_rate(parabola, no_batch, steps=100, seeds=[0, 1], loss=itself)
    there = stable_learning_rate(parabola, no_batch, steps=100, seeds=[0, 1], loss=itself, jobs=2)
    assert here == there


class Noisy(nn.Module):
    """Weights from torch's global generator, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def noise(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 8)
    return x, x


def test_functions_that_processes_cannot_import_are_refused_before_the_first_starts():
    with pytest.raises(ScaleLongError, match=r"jobs=2 starts processes.*or use jobs=1"):
        stable_learning_rate(lambda seed: parabola(seed), no_batch, steps=5, seeds=[0, 1], loss=itself, jobs=2)


def test_a_trial_depends_on_its_seed_alone_and_leaves_the_global_random_state():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = run_trial(lambda seed: Noisy(), noise, 0.05, steps=20, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert run_trial(lambda seed: Noisy(), noise, 0.05, steps=20, seed=1) == first
    assert run_trial(lambda seed: Noisy(), noise, 0.05, steps=20, seed=2) != first
    drawn = []
    for seed in (1, 2):  # also where the network does not differ
        run_trial(
            lambda seed: nn.Linear(8, 8), lambda s, k: drawn.append(batch := noise(s, k)) or batch, 0.0, seed=seed
        )
    assert not torch.equal(drawn[0][0], drawn[len(drawn) // 2][0])


def test_dropout_at_a_tiny_learning_rate_does_not_count_as_divergence():
    trials = [run_trial(lambda seed: Noisy(), noise, 1e-5, steps=30, seed=seed) for seed in range(12)]
    assert not any(trial.diverged for trial in trials)


class Strict(nn.Module):
    """Refuses what is not finite, as some losses and networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self) -> torch.Tensor:
        if not (value := 10 * self.w.square()).isfinite():
            raise FloatingPointError("the output is not finite")
        return value


def test_an_error_of_a_run_that_diverges_is_divergence():
    found = stable_learning_rate(lambda seed: Strict(), no_batch, steps=400, seeds=[0], loss=itself)
    low, high = found.brackets[0]
    assert low <= 0.1 <= high  # 10·w² is stable up to 2/20


def test_an_output_of_another_shape_than_the_target_is_refused():
    with pytest.raises(ScaleLongError, match=r"\(16, 1\).*\(16,\)"):
        stable_learning_rate(lambda seed: nn.Linear(4, 1), lambda seed, step: (torch.ones(16, 4), torch.ones(16)))


@pytest.mark.parametrize("edge", [1e-7, 0.003, 40.0])
def test_bisection_closes_in_on_any_edge(edge):
    trials = list(bisect(lambda lr: Trial(lr, 0, 1.0, 2.0 if lr > edge else 0.5, 1), 0.01, 1.05))
    low = max(t.lr for t in trials if not t.diverged)
    high = min(t.lr for t in trials if t.diverged)
    assert low <= edge < high <= 1.05 * low


def test_a_network_that_never_diverges_is_an_error_that_says_so():
    with pytest.raises(ScaleLongError, match=r"trains at every learning rate"):
        list(bisect(lambda lr: Trial(lr, 0, 1.0, 0.5, 1), 0.01))


def test_a_loss_above_that_of_the_untrained_network_counts_as_diverged():
    assert Trial(0.1, 0, 1.0, 1.01, 10).diverged
    assert Trial(0.1, 0, 1.0, math.nan, 10).diverged
    assert Trial(0.1, 0, 1.0, None, 3).diverged
    assert not Trial(0.1, 0, 1.0, 1.0, 10).diverged


def test_wrong_arguments_are_refused():
    with pytest.raises(UnknownNameError, match="adam"):
        stable_learning_rate(parabola, no_batch, optimizer="adam")
    with pytest.raises(ScaleLongError, match="seeds"):
        stable_learning_rate(parabola, no_batch, seeds=[])
    with pytest.raises(ScaleLongError, match="seeds"):
        stable_learning_rate(parabola, no_batch, seeds=3)
    for start in (0.0, -1.0, 1e7):
        with pytest.raises(ScaleLongError, match="start"):
            stable_learning_rate(parabola, no_batch, start=start)
    with pytest.raises(ScaleLongError, match="requires a gradient"):
        stable_learning_rate(lambda seed: nn.Identity(), no_batch)
    with pytest.raises(ScaleLongError, match="--scalings"):
        cells(["eq3"], ["sgd"], [], [2], 10)
    with pytest.raises(ScaleLongError, match=r"tolerance.*1\.0"):
        stable_learning_rate(parabola, no_batch, tolerance=1.0)
    with pytest.raises(UnknownNameError, match="eq4"):
        cells(["eq4"], ["sgd"], [NoScaling()], [2], 10)
    with pytest.raises(ScaleLongError, match=r"unet.*5"):
        cells(["unet"], ["sgd"], [NoScaling()], [5], 10)


def test_sensitivity_is_zero_where_the_learning_rate_does_not_matter():
    assert lr_sensitivity({0.1: 0.5, 1.0: 0.5}, 2.0) == 0
    assert lr_sensitivity({0.1: 0.5, 1.0: math.inf}, 1.5) == pytest.approx(0.5)


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_of_the_study_have_n_skips_and_share_weights_between_scalings(network):
    state = torch.get_rng_state()
    plain, scaled = (build_network(network, 6, spec, 1) for spec in (NoScaling(), LearnableScaling()))
    assert torch.equal(torch.get_rng_state(), state)
    own, other = dict(plain.named_parameters()), dict(scaled.named_parameters())
    assert own.keys() < other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    x, t, eps = digits_batch(0, 3)
    assert len(scalelong.describe(plain).rows) == 6
    output = plain(x, t)
    assert getattr(output, "sample", output).shape == eps.shape


def test_theory_predicts_a_larger_frontier_for_smaller_sums_of_squares():
    rates = [predicted_rate(s, 12) for s in (NoScaling(), UniformScaling(2**-0.5), ConstantScaling(0.7))]
    assert rates == sorted(rates)
    assert predicted_rate(LearnableScaling(), 12) is None


def test_an_interrupted_study_resumes_without_training_twice(tmp_path):
    study = cells(["eq3"], ["sgd"], [NoScaling(), ConstantScaling(0.5)], [3], 12)
    rows = measure_frontier(study, [0], tmp_path, 1)
    assert rows.failures == []
    lines = (tmp_path / TRIALS).read_text().splitlines(keepends=True)
    (tmp_path / TRIALS).write_text("".join(lines[:-3]) + lines[-3][:20])  # torn in the middle of a line
    assert measure_frontier(study, [0], tmp_path, 1) == rows
    assert len((tmp_path / TRIALS).read_text().splitlines()) == len(lines) + 1  # the torn line stays


def test_damaged_trials_run_again(tmp_path):
    study = cells(["eq3"], ["sgd"], [NoScaling()], [2], 10)
    found = measure_frontier(study, [0], tmp_path, 1)
    rows = [json.loads(line) for line in (tmp_path / TRIALS).read_text().splitlines()]
    for row, damage in zip(rows, ({"result": None}, {"result": {"lr": 1}}, {"key": [1]}, {"result": 3}), strict=False):
        row |= damage
    rows[-1]["result"]["final"] = "0.5"
    (tmp_path / TRIALS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert measure_frontier(study, [0], tmp_path, 1) == found


def test_a_search_that_finds_nothing_is_named_and_the_others_are_kept(tmp_path):
    study = cells(["eq3"], ["sgd"], [NoScaling(), UniformScaling(1e5)], [3, 3], 10)
    assert len(study) == 2
    found = measure_frontier(study, [0], tmp_path, 1)
    assert [row.cell.scaling for row in found.rows] == [NoScaling()]
    (failure,) = found.failures
    assert failure.startswith("eq3, sgd, uniform-100000, N = 3, seed 0: the network diverges at every learning rate")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cs_trains_where_the_unscaled_network_of_eq_3_diverges(seed):
    """Plain SGD at 0.02, N = 12; Theorem 3.3 predicts a frontier 8.7 times as high with CS 0.5."""
    diverged = [
        run_trial(
            lambda seed, spec=spec: build_network("eq3", 12, spec, seed), digits_batch, 0.02, steps=30, seed=seed
        ).diverged
        for spec in (NoScaling(), ConstantScaling(0.5))
    ]
    assert diverged == [True, False]


def test_the_command_prints_a_table_a_figure_and_json(tmp_path):
    command = [sys.executable, "-m", "scalelong", "frontier", "--skips", "2", "--steps", "10", "--seeds", "2"]
    command += ["--scalings", "none,cs:0.5", "--jobs", "1", "--out", str(tmp_path / "f")]
    run = subprocess.run([*command, "--figure", str(tmp_path / "f.png")], capture_output=True, text=True, check=True)
    assert "cs-0.5" in run.stdout
    assert (tmp_path / "f.png").stat().st_size > 5000
    run = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    rows = json.loads(run.stdout)["frontier"]
    assert [row["label"] for row in rows] == ["none", "cs-0.5"]
    assert rows[0]["ratio"]["mean"] == 1
