"""Sensitivity to extra noise against closed forms of linear networks; Lipschitz constants against the SVD."""

import json
import math

import pytest
import torch
from torch import nn

from scalelong import ConstantScaling, LearnableScaling, ScaleLongError, StackedUNet, UniformScaling
from scalelong.experiments.robustness import FILE, Perturbed, measure_run_robustness
from scalelong.process import get_process
from scalelong.report.figures import draw_robustness
from scalelong.robustness import local_lipschitz, measure_sensitivity
from scalelong.theory.bounds import robustness as bound_of
from scalelong.theory.lipschitz import measure_robustness

VP = get_process("vp")
EDGES = (0.0, 0.5, 1.0)


def matrix(m, seed=0):
    return torch.randn(m, m, generator=torch.Generator().manual_seed(seed)) / m**0.5


def linear(A):
    return lambda x, t, **kw: (x.flatten(1) @ A.T).view_as(x)


def data(n=64, side=4, seed=1):
    g = torch.Generator().manual_seed(seed)
    x_0, eps = (torch.randn(n, 1, side, side, generator=g) for _ in range(2))
    return x_0, torch.linspace(0.01, 0.99, n), eps


# ---------------------------------------------------------------------------------------- extra noise


def test_a_linear_network_amplifies_noise_by_its_frobenius_norm():
    """E‖Aδ‖²/m = σ²‖A‖_F²/m, and the loss grows by the same amount, because δ is independent of everything else."""
    A = matrix(16)
    rows = measure_sensitivity(linear(A), VP, *data(512), variances=(0.0, 0.1, 0.4), edges=EDGES, draws=8)
    share = float(A.square().sum()) / 16
    assert rows[0].overall.change == 0.0
    assert math.isnan(rows[0].overall.gain)
    for row in rows[1:]:
        assert row.overall.change == pytest.approx(row.variance * share, rel=0.03)
        assert row.overall.gain == pytest.approx(math.sqrt(share), rel=0.02)
        grown = row.overall.loss - rows[0].overall.loss
        assert grown == pytest.approx(row.variance * share, rel=0.15)


def test_every_variance_uses_the_same_directions():
    """The change of a linear network is then exactly proportional to the variance."""
    rows = measure_sensitivity(linear(matrix(16)), VP, *data(), variances=(0.1, 0.4), edges=EDGES, draws=2)
    assert rows[1].overall.change == pytest.approx(4 * rows[0].overall.change, rel=1e-4)
    assert rows[1].overall.gain == pytest.approx(rows[0].overall.gain, rel=1e-4)


def test_results_are_separated_by_timestep():
    """A network that uses its input only at late times changes only there."""
    late = lambda x, t, **kw: torch.where((t >= 500).view(-1, 1, 1, 1), 2 * x, torch.zeros_like(x))
    (row,) = measure_sensitivity(late, VP, *data(), variances=(0.2,), edges=EDGES)
    early, later = row.by_time
    assert early.change == 0.0
    assert later.gain == pytest.approx(2.0, rel=1e-5)
    assert early.samples + later.samples == row.overall.samples == 64
    assert row.overall.change == pytest.approx((early.change * early.samples + later.change * later.samples) / 64)


def test_without_noise_the_loss_is_the_training_loss():
    from scalelong.diffusion import simple_loss

    A, (x_0, t, eps) = matrix(16), data()
    (row,) = measure_sensitivity(linear(A), VP, x_0, t, eps, variances=(0.0,), edges=EDGES)
    assert row.overall.loss == pytest.approx(simple_loss(linear(A), VP, x_0, t, eps).mean().item(), rel=1e-6)


def test_a_bin_without_samples_is_none_and_conditions_are_passed():
    labels = []
    net = lambda x, t, y: labels.append(y) or x
    x_0, t, eps = data(8)
    rows = measure_sensitivity(net, VP, x_0, t * 0.4, eps, {"y": torch.arange(8)}, variances=(0.1,), edges=EDGES,
                               batch_size=3)  # fmt: skip
    assert rows[0].by_time[1] is None
    assert torch.cat(labels[:1]).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"), [({"variances": (-1.0,)}, "-1"), ({"variances": (0.1,), "draws": 0}, "draws")]
)
def test_invalid_noise_settings_raise(options, message):
    with pytest.raises(ScaleLongError, match=message):
        measure_sensitivity(linear(matrix(16)), VP, *data(), edges=EDGES, **options)


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


# --------------------------------------------------------------------------------------- Lipschitz


class Plain(nn.Module):
    def __init__(self, A):
        super().__init__()
        self.A = nn.Parameter(A)

    def forward(self, x, t):
        return x @ self.A.T


def test_a_linear_networks_constant_is_its_largest_singular_value():
    A = matrix(12)
    found = local_lipschitz(Plain(A), torch.randn(3, 12), None, iterations=500, tolerance=1e-7)
    assert found.network == pytest.approx(float(torch.linalg.matrix_norm(A, 2)), rel=1e-3)
    assert found.converged
    assert found.log10_bound is None
    assert found.exceeded is None
    assert "no long skips" in found.note


@pytest.mark.parametrize("scaling", [None, ConstantScaling(0.6), UniformScaling()])
@pytest.mark.parametrize("skips", [1, 3])
def test_on_the_network_of_eq_3_the_bound_is_theorem_3_4(scaling, skips):
    torch.manual_seed(0)
    net = StackedUNet(10, skips, 2, scaling=scaling)
    x = torch.randn(10)
    exact = measure_robustness(net, x)
    found = local_lipschitz(net, x[None], iterations=2000, tolerance=1e-7)
    assert found.network == pytest.approx(exact.network, rel=1e-3)
    assert found.middle == pytest.approx(exact.middle, rel=1e-3)
    assert found.blocks == pytest.approx(exact.composed, rel=1e-3)
    assert found.coefficients == pytest.approx(exact.coefficients)
    assert found.log10_bound == pytest.approx(exact.log_paper / math.log(10), abs=1e-2)
    assert 10**found.log10_bound == pytest.approx(bound_of(found.coefficients, found.m0, found.middle), rel=1e-6)
    assert found.exceeded == (exact.network > math.exp(exact.log_paper))


def test_learned_coefficients_are_the_largest_of_each_skips_units():
    from loops import small_uvit

    net = small_uvit(LearnableScaling()).eval()
    kappas = {}
    handle = net.skip_scaling.register_forward_hook(lambda m, a, o: kappas.update({a[1]: float(o.detach().max())}))
    found = local_lipschitz(net, torch.randn(2, 1, 8, 8), torch.tensor([10.0, 500.0]), iterations=5)
    handle.remove()
    assert found.coefficients == pytest.approx([kappas[i] for i in (1, 2, 3)], rel=1e-5)
    assert found.log10_bound is not None


def test_a_real_network_amplifies_no_perturbation_by_more_than_its_constant():
    from loops import small_uvit

    net = small_uvit().eval()
    x, t = torch.randn(1, 1, 8, 8), torch.tensor([300.0])
    found = local_lipschitz(net, x, t, iterations=200, tolerance=1e-4)
    with torch.no_grad():
        for seed in range(20):
            delta = 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
            stretched = (net(x + delta, t) - net(x, t)).norm() / delta.norm()
            assert stretched <= found.network * 1.02
    assert all(p.grad is None for p in net.parameters())


# ------------------------------------------------------------------------------------------- a run


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
    train(override(preset("digits"), settings), folder, quiet=True)
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
