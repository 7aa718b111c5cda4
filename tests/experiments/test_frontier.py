"""The stability frontier: searches with known answers, the networks of the study, the command in a fresh process."""

import functools
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import scalelong
from scalelong import ConstantScaling, LearnableScaling, NoScaling, UniformScaling
from scalelong.errors import InvalidValueError, ScaleLongError, UnknownNameError
from scalelong.experiments.frontier import Trial, bisect, lr_sensitivity, run_trial, stable_learning_rate, summarize
from scalelong.experiments.frontier_study import (
    NETWORKS,
    TRIALS,
    Row,
    build_network,
    cells,
    digits_batch,
    fit_exponents,
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


class Drawn(nn.Linear):
    """A network's class with arguments that are not a seed."""

    def __init__(self, width: int = 8, bias: bool = True) -> None:
        super().__init__(width, width, bias)


@pytest.mark.parametrize(
    ("make_net", "make_batch"),
    [
        (lambda seed: Drawn(), noise),
        (lambda seed=7: Drawn(), lambda step: noise(0, step)),
        (Drawn, lambda seed, step=7: noise(seed, step)),
        (lambda *args: Drawn(*args[1:]), lambda: noise(0, 0)),
        (functools.partial(Drawn, bias=True), lambda *args: noise(*args)),
    ],
)
def test_makers_take_the_seed_and_the_step_only_if_they_ask_for_them(make_net, make_batch):
    expected = run_trial(lambda seed: Drawn(), noise, 0.1, steps=10, seed=3)
    assert run_trial(make_net, make_batch, 0.1, steps=10, seed=3) == expected


def test_makers_receive_the_seed_and_the_step():
    seeds, steps = [], []

    def make_net(seed=0):
        seeds.append(seed)
        return Drawn()

    def make_batch(step):
        steps.append(step)
        return noise(0, step)

    run_trial(make_net, make_batch, 0.1, steps=3, seed=5)
    assert seeds == [5]
    assert steps == [2, 0, 1, 2]


SAME = Drawn()
x = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 3}, "seeds must be one or more integers.*got 3"),
        ({"make_net": Drawn()}, "make_net must be a function.*got 'Drawn'"),
        ({"make_net": lambda: 3}, "result of make_net must be a torch.nn.Module, got 'int'"),
        ({"make_net": lambda: SAME}, "the untrained network's loss .*make_net must build a new network"),
        ({"make_batch": lambda: x}, "result of make_batch must be a tuple"),
        ({"loss": lambda output, target: output - target}, "result of loss must be a tensor with one element"),
    ],
)
def test_makers_that_do_not_fit_are_named(options, message):
    fitting = {"make_net": Drawn, "make_batch": noise, "steps": 5, "seeds": [0]}
    with pytest.raises(InvalidValueError, match=message):
        stable_learning_rate(**(fitting | options))


def test_functions_that_processes_cannot_import_are_refused_before_the_first_starts():
    with pytest.raises(ScaleLongError, match=r"jobs=2 starts processes.*or use jobs=1"):
        stable_learning_rate(lambda seed: parabola(seed), no_batch, steps=5, seeds=[0, 1], loss=itself, jobs=2)


PARALLEL = """
import os, signal, sys, time
from pathlib import Path
from scalelong.experiments.frontier import parallel
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
def work(item):
    Path(f"started-{os.getpid()}").touch()
    time.sleep(60)
if __name__ == "__main__":
    list(parallel(work, range(4), 2))
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_at_once_with_the_process_that_started_them(sent, tmp_path):
    (tmp_path / "script.py").write_text(PARALLEL)
    process = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(tmp_path.glob("started-*"))) == 2)
    workers = [int(path.name.partition("-")[2]) for path in tmp_path.glob("started-*")]
    process.send_signal(sent)
    assert process.wait(timeout=30) != 0
    wait_for(lambda: not any(map(is_running, workers)))


def is_running(pid):
    """Whether a process exists and is no zombie, which nobody may wait for after a SIGKILL."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    (tmp_path / "script.py").write_text(PARALLEL.replace('if __name__ == "__main__":', "if True:"))
    run = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1
    assert "outside of if __name__" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize("seeds", [["a"], [0.5], [], 3])
def test_seeds_are_integers(seeds):
    with pytest.raises(ScaleLongError, match="seeds must be one or more integers"):
        stable_learning_rate(parabola, no_batch, seeds=seeds, loss=itself)


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
        cells(["eq3"], ["sgd"], [], [2], [10])
    with pytest.raises(ScaleLongError, match=r"tolerance.*1\.0"):
        stable_learning_rate(parabola, no_batch, tolerance=1.0)
    with pytest.raises(UnknownNameError, match="eq4"):
        cells(["eq4"], ["sgd"], [NoScaling()], [2], [10])
    with pytest.raises(ScaleLongError, match=r"unet.*5"):
        cells(["unet"], ["sgd"], [NoScaling()], [5], [10])
    for skips, steps, option in (([0, 2], [10], "--skips.*0"), ([2], [100, 9], "--steps.*9")):
        with pytest.raises(ScaleLongError, match=option):
            cells(["eq3"], ["sgd"], [NoScaling()], skips, steps)
    for network, width in (("eq3", 60), ("conv-add", 0), ("uvit", 30), ("unet", 12)):
        with pytest.raises(ScaleLongError, match=rf"--width of the network {network}.*{width}"):
            cells([network], ["sgd"], [NoScaling()], [6], [10], [width])


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


@pytest.mark.parametrize(("network", "width"), [("eq3", 16), ("eq3", 256), ("conv-cat", 4), ("uvit", 32), ("unet", 16)])
def test_a_network_of_another_width_has_that_width_and_trains(network, width):
    (cell,) = cells([network], ["sgd"], [ConstantScaling(0.5)], [4], [10], [width])
    net = build_network(network, 4, cell.scaling, 0, width)
    assert [row.channels for row in scalelong.find_skips(net)] == [width] * 4
    trial = cell.trial(0, 1e-6)
    assert trial.steps == 10
    assert not trial.diverged


def test_digits_of_another_size_are_resized_and_those_of_their_own_size_are_not():
    small, own, large = (digits_batch(0, 3, side)[0] for side in (4, 8, 16))
    assert (small.shape, own.shape, large.shape) == ((64, 1, 4, 4), (64, 1, 8, 8), (64, 1, 16, 16))
    assert torch.equal(own, digits_batch(0, 3)[0])


def test_exponents_are_those_of_the_power_law_that_the_frontiers_follow():
    specs = [NoScaling(), ConstantScaling(0.5)]
    study = cells(["eq3"], ["sgd"], specs, [3, 6, 12], [100], [16, 64])

    def row(cell):
        power = -2.0 if cell.scaling.is_identity else -0.5
        law = [(seed, seed * cell.skips**power * cell.width**-1.0) for seed in (1, 2)]
        trials = [Trial(lr * x, seed, 1.0, 2.0 - x, 100) for seed, lr in law for x in (1.0, 0.5)]
        trials += [Trial(lr * 1.1, seed, 1.0, None, 3) for seed, lr in law]
        return Row(cell, summarize(trials), None, None)

    none, cs = fit_exponents([row(cell) for cell in study])
    assert {name: fit.mean for name, fit in none.frontier.items()} == pytest.approx({"skips": -2.0, "width": -1.0})
    assert {name: fit.mean for name, fit in cs.frontier.items()} == pytest.approx({"skips": -0.5, "width": -1.0})
    assert none.ratio == {}
    assert cs.ratio["skips"].mean == pytest.approx(1.5)
    assert cs.ratio["width"].mean == pytest.approx(0.0, abs=1e-9)
    assert cs.ratio["skips"].high - cs.ratio["skips"].low < 1e-6  # seeds differ by a factor, their ratios do not
    assert none.frontier["skips"].high - none.frontier["skips"].low > 0.1
    assert fit_exponents([row(cell) for cell in study if (cell.skips, cell.width) == (3, 16)]) == []


def test_the_documented_exponents_are_those_of_the_committed_trials(tmp_path):
    root = Path(__file__).resolve().parents[2]
    shutil.copy(root / "results" / "frontier" / TRIALS, tmp_path)
    committed = (tmp_path / TRIALS).read_bytes()
    specs = [NoScaling(), ConstantScaling(0.5)]
    widths = measure_frontier(cells(["eq3"], ["sgd"], specs, [3, 6, 12], [100], [16, 64, 256]), [0, 1, 2], tmp_path, 1)
    steps = measure_frontier(cells(["eq3"], ["sgd"], specs, [3, 6, 12], [30, 100, 1000]), [0, 1, 2], tmp_path, 1)
    assert (tmp_path / TRIALS).read_bytes() == committed  # nothing was trained
    none, cs = widths.exponents
    page = (root / "docs" / "theory.md").read_text(encoding="utf-8").replace("−", "-")
    for name, law in (("frontier, no scaling", none.frontier), ("frontier, CS 0.5", cs.frontier),
                      ("CS 0.5 over no scaling", cs.ratio)):  # fmt: skip
        values = (f"{law[f].mean:.2f} [{law[f].low:.2f}, {law[f].high:.2f}]" for f in ("skips", "width"))
        assert f"| {' | '.join([name, *values])} |" in page
    rates = {row.cell: row.frontier.brackets for row in steps.rows}
    assert all(found == rates[replace(cell, steps=100)] for cell, found in rates.items())


def test_trials_of_a_networks_own_width_are_those_of_earlier_versions():
    own, other = cells(["eq3"], ["sgd"], [NoScaling()], [6], [100], [64, 16])
    assert own.key == '["eq3", "sgd", {"kind": "none"}, 6, 100]'
    assert other.key == '["eq3", "sgd", {"kind": "none"}, 6, 100, 16]'


def test_theory_predicts_a_larger_frontier_for_smaller_sums_of_squares():
    rates = [predicted_rate(s, 12) for s in (NoScaling(), UniformScaling(2**-0.5), ConstantScaling(0.7))]
    assert rates == sorted(rates)
    assert predicted_rate(LearnableScaling(), 12) is None


def test_an_interrupted_study_resumes_without_training_twice(tmp_path):
    study = cells(["eq3"], ["sgd"], [NoScaling(), ConstantScaling(0.5)], [3], [12])
    rows = measure_frontier(study, [0], tmp_path, 1)
    assert rows.failures == []
    lines = (tmp_path / TRIALS).read_text().splitlines(keepends=True)
    (tmp_path / TRIALS).write_text("".join(lines[:-3]) + lines[-3][:20])  # torn in the middle of a line
    assert measure_frontier(study, [0], tmp_path, 1) == rows
    assert len((tmp_path / TRIALS).read_text().splitlines()) == len(lines) + 1  # the torn line stays


def test_damaged_trials_run_again(tmp_path):
    study = cells(["eq3"], ["sgd"], [NoScaling()], [2], [10])
    found = measure_frontier(study, [0], tmp_path, 1)
    rows = [json.loads(line) for line in (tmp_path / TRIALS).read_text().splitlines()]
    for row, damage in zip(rows, ({"result": None}, {"result": {"lr": 1}}, {"key": [1]}, {"result": 3}), strict=False):
        row |= damage
    rows[-1]["result"]["final"] = "0.5"
    (tmp_path / TRIALS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert measure_frontier(study, [0], tmp_path, 1) == found


def test_a_search_that_finds_nothing_is_named_and_the_others_are_kept(tmp_path):
    study = cells(["eq3"], ["sgd"], [NoScaling(), UniformScaling(1e5)], [3, 3], [10])
    assert len(study) == 2
    found = measure_frontier(study, [0], tmp_path, 1)
    assert [row.cell.scaling for row in found.rows] == [NoScaling()]
    (failure,) = found.failures
    cell = "eq3, sgd, uniform-100000, N = 3, width 64, 10 steps"
    assert failure.startswith(f"{cell}, seed 0: the network diverges at every learning rate")


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
    assert "exponents" not in run.stdout  # one size
    assert (tmp_path / "f.png").stat().st_size > 5000
    run = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    rows = json.loads(run.stdout)["frontier"]
    assert [row["label"] for row in rows] == ["none", "cs-0.5"]
    assert rows[0]["ratio"]["mean"] == 1
    sizes = [*command, "--width", "16,64", "--steps", "10,12", "--figure", str(tmp_path / "s.png")]
    text = subprocess.run(sizes, capture_output=True, text=True, check=True).stdout
    assert "exponents p of frontier ∝ width^p · steps^p" in text
    assert (tmp_path / "s.png").stat().st_size > 5000
    found = json.loads(subprocess.run([*sizes, "--json"], capture_output=True, text=True, check=True).stdout)
    assert len(found["frontier"]) == 8
    assert [fit["label"] for fit in found["exponents"]] == ["none", "cs-0.5"]
    fixed = [*command, "--width", "16", "--steps", "12"]
    assert "width 16, 12 steps, 2 seeds" in subprocess.run(fixed, capture_output=True, text=True, check=True).stdout
    assert found["exponents"][1]["ratio"]["width"]["n"] == 8  # two widths, two lengths, two seeds
