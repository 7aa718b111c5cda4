"""The robustness of a trained run: `scalelong robustness` and `measure_run_robustness`."""

import json

import pytest
import torch
from torch import nn

from scalelong import ScaleLongError
from scalelong._objectives import OBJECTIVES
from scalelong.cli.stability import _print_robustness
from scalelong.diffusion.network import Denoiser, guided
from scalelong.experiments.robustness import FILE, WORDS, Perturbed, Robustness, measure_run_robustness
from scalelong.objective import get_objective
from scalelong.report.figures import draw_robustness
from scalelong.robustness import LocalLipschitz, Sensitivity
from scalelong.robustness.sensitivity import Moved


def test_a_perturbed_network_sees_noise_of_the_variance_and_nothing_for_zero():
    seen = []

    class Keep(nn.Module):
        def forward(self, x, t):
            seen.append(x)
            return x

    x = torch.zeros(2000, 1, 4, 4)
    before = torch.get_rng_state()
    Perturbed(Keep(), 0.25, 0)(x, None)
    Perturbed(Keep(), 0.0, 0)(x, None)
    assert float(seen[0].std()) == pytest.approx(0.5, rel=0.02)
    assert torch.equal(seen[1], x)
    assert torch.equal(before, torch.get_rng_state())


def test_both_halves_of_a_guided_evaluation_see_the_same_noise():
    objective, y = get_objective("eps"), torch.arange(64) % 3
    net = Perturbed(Labelled(), 0.25, 0)
    x, t = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.full((64,), 0.5)
    changes = []
    for guidance in (1.0, 7.5):
        predict = guided(Denoiser(net), objective, guidance, y=y, null_y=3)
        clean = guided(Denoiser(Labelled()), objective, guidance, y=y, null_y=3)
        changes.append(float((predict(x, t) - clean(x, t)).std()))
    assert changes == pytest.approx([0.5, 0.5], rel=0.05)  # a linear network neither amplifies it nor does guidance


class Labelled(nn.Module):
    """x plus a label."""

    def forward(self, x, t, y):
        return x + y.view(-1, 1, 1, 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from scalelong.runs.config import override
    from scalelong.training.loop import train
    from scalelong.training.presets import preset

    settings = {
        "model.embed_dim": 16, "model.depth": 4, "model.num_heads": 2, "train.batch_size": 32, "train.steps": 30,
        "validate.n": 16, "sample.n": 0, "sample.steps": 10, "monitor.every": 0,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train(override(preset("digits-uvit"), settings), folder, quiet=True)
    return folder


def test_the_command_writes_what_it_measures(run, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from scalelong.cli.app import app

    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    options = ["--images=16", "--samples=96", "--bins=2", "--points=1", "--variance=0.1", "--variance=1"]
    out = tmp_path / "figure.png"
    answer = CliRunner().invoke(app, ["robustness", str(run), *options, "--json", "--out", str(out)])
    assert answer.exit_code == 0, answer.output
    told = json.loads(answer.stdout.splitlines()[-1])
    assert told == json.loads((run / FILE).read_text())
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert [row["variance"] for row in told["sensitivity"]] == [0.0, 0.1, 1.0]
    changes = [row["overall"]["change"] for row in told["sensitivity"]]
    assert changes[0] == 0.0 < changes[1] < changes[2]
    assert told["sensitivity"][0]["overall"]["gain"] is None
    assert [d["variance"] for d in told["distances"]] == [0.0, 0.1, 1.0]
    assert "not FID" in told["metric"]
    values = [d["value"] for d in told["distances"]]
    assert all(v > 0 for v in values)
    assert len(set(values)) == 3
    assert [len(row["blocks"]) for row in told["lipschitz"]] == [2, 2]
    assert all(row["network"] > 0 for row in told["lipschitz"])
    text = CliRunner().invoke(app, ["robustness", str(run), *options, "--samples", "0"]).output
    assert "Theorem 3.4" in text
    assert "robustness.json" in text


def test_the_figure_shows_the_numbers(run):
    from scalelong.runs.run import load_run

    result = measure_run_robustness(load_run(run), variances=(0.1, 0.3), images=16, bins=2, points=1, samples=0)
    figure = draw_robustness(result)
    change, loss, constants = figure.axes
    overall = [row.overall for row in result.sensitivity]
    assert list(change.lines[-1].get_ydata()) == [one.change for one in overall[1:]]
    assert list(loss.lines[-1].get_ydata()) == [one.loss for one in overall]
    assert list(loss.lines[0].get_ydata()) == [row.by_time[0].loss for row in result.sensitivity]
    assert list(constants.lines[0].get_ydata()) == [one.network for one in result.lipschitz]
    assert list(constants.lines[1].get_ydata()) == pytest.approx([10**one.log10_bound for one in result.lipschitz])


@pytest.mark.parametrize(
    ("objective", "change", "loss", "constant", "target"),
    [
        ("eps", "Δε̂", "ε − ε̂(x_t + δ)", "‖∂ε̂/∂x_t‖", "the noise that made x_t"),
        ("v", "Δv̂", "v − v̂(x_t + δ)", "‖∂v̂/∂x_t‖", "v = α·ε − σ·x_0"),
        ("edm", "ΔF̂", "F − F̂(c_in·x_t + δ)", "‖∂F̂/∂c_in·x_t‖", "the preconditioned image"),
    ],
)
def test_the_words_are_those_of_the_objective(objective, change, loss, constant, target, capsys):
    moved = Moved(0.1, 0.2, 0.3, 4)
    result = Robustness(
        run="run", step=1, scaling={}, objective=objective, images=4, seed=0, edges=(0.0, 1.0), points=1,
        sensitivity=(Sensitivity(0.1, moved, (moved,)),), lipschitz=(LocalLipschitz(1.5, True),),
    )  # fmt: skip
    figure = draw_robustness(result)
    assert change in figure.axes[0].get_ylabel()
    assert loss in figure.axes[1].get_ylabel()
    assert constant in figure.axes[2].get_legend().get_texts()[0].get_text()
    _print_robustness(result)
    printed = " ".join(capsys.readouterr().out.split())
    assert all(word in printed for word in (change, constant, target))
    assert set(WORDS) == set(OBJECTIVES)


def test_it_is_a_function_of_the_seed(run):
    from scalelong.runs.run import load_run

    options = {"variances": (0.1,), "images": 8, "bins": 1, "points": 0, "samples": 0}
    measure = lambda seed: measure_run_robustness(load_run(run), seed=seed, **options)
    assert measure(0) == measure(0)
    assert measure(0).sensitivity[1] != measure(1).sensitivity[1]


def test_measures_out_of_range_are_named(run):
    from scalelong.runs.run import load_run

    with pytest.raises(ScaleLongError, match="bins"):
        measure_run_robustness(load_run(run), bins=0)


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path):
    from typer.testing import CliRunner

    from scalelong.cli.app import app

    answer = CliRunner().invoke(app, ["robustness", str(tmp_path)])
    assert isinstance(answer.exception, ScaleLongError)
    assert "not a run folder" in str(answer.exception)
