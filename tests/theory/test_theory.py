"""`measure_theory` at a small size: rows, verdicts and the figure."""

import json
import math

import pytest
import torch

from scalelong import ConstantScaling
from scalelong.errors import InvalidValueError
from scalelong.kappa import sum_of_squares
from scalelong.report.figures import draw_theory, save_figure
from scalelong.theory import Shape, four_scalings, measure_theory, verdicts
from scalelong.theory.bounds import log_feature_path_sum
from scalelong.theory.lipschitz import robustness_rows, violation_rows
from scalelong.theory.propagation import (
    INPUTS,
    Propagation,
    ddpm_inputs,
    fit_row,
    input_row,
    propagation_row,
    sample_networks,
    sweep_row,
)
from scalelong.theory.stacked import INITS, StackedUNet


@pytest.fixture(scope="module")
def report():
    return measure_theory(seeds=10, width=128, skips=4, depth=2, kappa=0.7)


def ones(*shapes):
    return [torch.ones(shape, dtype=torch.float64) for shape in shapes]


def rows(report, init, kind="propagation"):
    return {row.scaling: row for row in getattr(report, kind) if row.init == init}


# ------------------------------------------------------------------------------------------------ parts


def test_samples_hold_the_features_of_the_networks():
    shape, scalings = Shape(32, 2, 2), four_scalings(0.5)
    samples = sample_networks("kaiming", shape, scalings, seeds=3)
    x_t, _ = ddpm_inputs(INPUTS, 32, seed=2)
    net = StackedUNet(32, 2, 2, scaling=ConstantScaling(0.5), init="kaiming", seed=2)
    expected = net(x_t).detach().square().sum(1) / x_t.square().sum(1)
    assert torch.allclose(samples["CS 0.5"].features[2, :, 0].float(), expected, rtol=1e-5)
    assert samples["CS 0.5"].gradients.shape == (3, INPUTS, 5, 2)


def test_the_fit_recovers_the_constants_of_theorem_3_1():
    shape, scalings = Shape(64, 3, 2), four_scalings(0.6)
    samples = {}
    for name, spec in scalings.items():
        kappas = spec.coefficients(3)
        means = torch.tensor([2.5 * sum_of_squares(kappas, i + 1) + 1.5 for i in range(4)], dtype=torch.float64)
        samples[name] = Propagation(means.expand(5, INPUTS, 4), *ones((5, INPUTS, 7, 2), (5, INPUTS)))
    fit = fit_row("norm-preserving", shape, scalings, samples)
    assert (fit.c1, fit.c2, fit.r_squared) == pytest.approx((2.5, 1.5, 1.0))
    assert fit.r_squared_printed < 0.95
    assert fit.r_squared_paths < 1.0
    assert len(fit.points) == 4 * 4


def test_a_row_holds_mean_error_and_constant_of_its_samples():
    shape, spec = Shape(64, 1, 1), ConstantScaling(0.5)
    features = torch.tensor([[1.0, 3.0], [5.0, 7.0]], dtype=torch.float64)  # two networks, two inputs
    gradients = torch.ones(2, 2, 3, 1, dtype=torch.float64)
    gradients[1, 0, 2, 0] = 40.0  # one gradient of b_1: Σκ² + 1 = 2
    samples = Propagation(torch.stack([features, features], dim=-1), gradients, *ones((2, 2)))
    row = propagation_row("norm-preserving", "CS 0.5", spec, shape, samples)
    assert row.feature.measured == 4.0
    assert row.feature.error == pytest.approx(math.sqrt(8) / math.sqrt(2))  # networks' means 2 and 6
    assert row.feature.predicted == pytest.approx(2.0)
    assert row.constant == 20.0
    assert row.matrix == "a_1 W_1"


def test_the_spread_is_the_standard_deviation_of_the_logarithm_over_networks():
    shape, scalings = Shape(100, 2, 2), four_scalings(0.6)
    logs = torch.randn(4000, INPUTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.3
    logs[0, 0] = -math.inf  # a dead network
    features = logs.exp()[..., None].expand(-1, -1, 3)
    samples = dict.fromkeys(scalings, Propagation(features, *ones((4000, INPUTS, 5, 2), (4000, INPUTS))))
    propagation = [propagation_row("kaiming", name, spec, shape, samples[name]) for name, spec in scalings.items()]
    row = sweep_row(shape, propagation, fit_row("kaiming", shape, scalings, samples), samples.values())
    assert row.spread == pytest.approx(0.3, rel=0.02)
    assert row.spread_predicted == pytest.approx(math.sqrt(5 * 7 / 100))
    assert row.init == "kaiming"


def test_lemma_3_2_is_measured_for_each_process():
    row = input_row("ddpm", width=64, samples=20_000)
    assert row.mean_alpha_bar == pytest.approx(0.2755, abs=1e-4)
    assert row.predicted == pytest.approx(1 - 2 * row.mean_alpha_bar / 3)
    assert row.measured == pytest.approx(row.predicted, rel=0.01)


def test_measurements_stay_below_the_bounds_in_the_order_of_the_theory():
    for row in robustness_rows("norm-preserving", Shape(32, 3, 2), four_scalings(0.7), seeds=2):
        assert row.perturbed <= row.network * 1.5 <= row.certified <= row.lipschitz
        assert row.main_term < row.paper < row.certified
        assert row.certified_violations == 0
        assert row.checked == 2


def test_violations_are_counted_and_measured():
    narrow, built = violation_rows(0.7, networks=200)
    assert narrow.checked == 200
    assert narrow.certified == built.certified == 0
    assert 0 < narrow.paper < 20
    assert narrow.worst > 1
    assert (built.checked, built.paper) == (1, 1)
    assert built.worst == pytest.approx(200 / 3, rel=0.01)  # 2·10² against 1 + 1 + 1


# ------------------------------------------------------------------------------------------ the whole


def test_predictions_are_the_path_sums(report):
    for init in INITS:
        for name, row in rows(report, init).items():
            kappas = four_scalings(0.7)[name].coefficients(4)
            assert row.feature.predicted == pytest.approx(math.exp(log_feature_path_sum(kappas, 0, init)))
            assert row.statement == pytest.approx(sum_of_squares(kappas) + 1)


def test_measurements_agree_with_the_path_sums(report):
    for row in report.propagation:
        assert abs(row.feature.measured - row.feature.predicted) < 4 * row.feature.error
        assert 0.6 < row.gradient_ratio < 1.5


def test_theorem_3_1_holds_norm_preserving_and_not_with_kaiming(report):
    preserving, kaiming = report.fit("norm-preserving"), report.fit("kaiming")
    assert preserving.r_squared > 0.97
    assert preserving.c1 == pytest.approx(1.0, abs=0.35)
    assert kaiming.r_squared < 0.8
    assert kaiming.r_squared_paths > kaiming.r_squared
    assert preserving.r_squared_printed < preserving.r_squared


def test_the_spread_shrinks_with_the_width(report):
    for init in INITS:
        widths = [row.shape.width for row in report.sweep(init, "width")]
        assert widths == [16, 32, 64, 128]
        assert report.spread_exponents[init] == pytest.approx(-0.5, abs=0.3)


def test_theorem_3_3_s_constant_explodes_with_kaiming(report):
    kaiming, preserving = report.sweep("kaiming", "skips"), report.sweep("norm-preserving", "skips")
    assert [row.shape.skips for row in kaiming] == [1, 2, 4]
    assert kaiming[-1].constant / kaiming[0].constant > 4**3 / 2
    assert preserving[-1].constant / preserving[0].constant < 4**3 / 2


def test_verdicts_separate_the_statements_that_hold_from_those_that_do_not(report):
    judged = {(verdict.statement, verdict.setting): verdict for verdict in verdicts(report)}
    assert judged["Theorem 3.1", "norm-preserving"].holds
    assert not judged["Theorem 3.1", "kaiming"].holds
    assert not judged["Theorem 3.1, index", "norm-preserving"].holds
    assert judged["Lemma 3.2", "uniform x_0"].holds
    assert not judged["Theorem 3.3", "kaiming"].holds
    assert judged["Theorem 3.4, certified", "both"].holds
    assert not judged["Theorem 3.4", "both"].holds
    assert "0.2755" in judged["Lemma 3.2", "uniform x_0"].result
    assert all(verdict.claim and verdict.result for verdict in judged.values())


def test_the_report_is_json(report):
    read = json.loads(json.dumps(report.to_dict()))
    assert read["shape"] == {"width": 128, "skips": 4, "depth": 2}
    assert len(read["propagation"]) == len(read["robustness"]) == 8


def test_the_figure_shows_the_report_s_numbers(report):
    axes = draw_theory(report).axes
    assert [ax.get_title() for ax in axes] == [
        "Theorem 3.1, norm-preserving",
        "Theorem 3.1, kaiming",
        "Path sums with their true gains",
        "Theorem 3.1: concentration",
        "Theorem 3.3: the constant it needs",
        "Theorem 3.4, norm-preserving",
    ]
    fit = report.fit("norm-preserving")
    *marks, line = axes[0].get_lines()
    for name, drawn in zip(report.scalings, marks, strict=True):
        points = [point for point in fit.points if point.scaling == name]
        assert list(drawn.get_xdata()) == [point.total for point in points]
        assert list(drawn.get_ydata()) == [point.measured for point in points]
    assert line.get_ydata()[0] == pytest.approx(fit.c2)
    spreads = axes[3].get_lines()[0]
    assert list(spreads.get_ydata()) == [row.spread for row in report.sweep("kaiming", "width")]
    constants = axes[4].get_lines()[1]
    assert list(constants.get_ydata()) == [row.constant for row in report.sweep("norm-preserving", "skips")]
    heights = [bar.get_height() for bar in axes[5].containers[4]]
    assert heights == [row.certified for row in report.robustness if row.init == "norm-preserving"]


def test_the_figure_is_written_in_the_format_of_its_name(report, tmp_path):
    save_figure(draw_theory(report), tmp_path / "theory.svg")
    assert "<svg" in (tmp_path / "theory.svg").read_text()


def test_one_skip_works():
    small = measure_theory(seeds=2, width=32, skips=1, depth=1)
    assert [row.shape.skips for row in small.sweep("kaiming", "skips")] == [1, 2]
    assert verdicts(small)


@pytest.mark.parametrize("options", [{"seeds": 1}, {"width": 16}, {"skips": 0}, {"skips": 129}, {"depth": 0}])
def test_values_out_of_range_raise(options):
    ((name, value),) = options.items()
    with pytest.raises(InvalidValueError, match=f"{name}.*got {value}"):
        measure_theory(**options)
