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
    lines = (tmp_path / TRIALS).read_text().splitlines(keepends=True)
    (tmp_path / TRIALS).write_text("".join(lines[:-3]) + lines[-3][:20])  # torn in the middle of a line
    assert measure_frontier(study, [0], tmp_path, 1) == rows
    assert len((tmp_path / TRIALS).read_text().splitlines()) == len(lines) + 1  # the torn line stays


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
