"""Provoked failures raise alarms with module, timesteps and first step; stable runs raise none."""

import logging
import math

import pytest
import torch
from loops import batch, small_uvit, train

from scalelong import Alarm, ConstantScaling, Limits, StabilityMonitor, StackedUNet
from scalelong.errors import InvalidValueError
from scalelong.kappa import choose_kappa, sum_of_squares
from scalelong.monitor.alarms import advice, find
from scalelong.monitor.log import read_stability
from scalelong.monitor.points import find_points
from scalelong.monitor.snapshot import Layout, Window
from scalelong.scaling.specs import PAPER_MEAN

EDGES = (0.0, 250.0, 500.0, 750.0, 1000.0)


def monitored(net, **options):
    raised = []
    options = {"every": 1, "window": 40, "limits": Limits(looks=5), **options}
    probe = (batch(0, n=8)[0], torch.arange(8) * 125.0)
    return StabilityMonitor(net, probe, on_alarm=raised.append, **options), raised


LAYOUT = Layout(find_points(small_uvit()), bins=len(EDGES) - 1)  # three long skips


def alarms_at(entries, window=None):
    return find(LAYOUT, Limits(looks=5), entries, window or Window(40), EDGES)


# ------------------------------------------------------------------------------------------- in a loop


def test_a_stable_run_raises_no_alarm(tmp_path):
    net = small_uvit()
    monitor, raised = monitored(net, out=tmp_path / "s.jsonl")
    train(net, 60, monitor, lr=1e-2)
    assert raised == []
    assert monitor.alarms == ()


def test_an_oscillating_block_raises_an_alarm_at_its_module_and_timesteps(tmp_path):
    """From step 31 on, the gain of one encoder block alternates, at late timesteps only."""
    net = small_uvit()

    class Flip:
        on, sign = False, 1.0

        def __call__(self, module, args, output):
            late = (self.t >= 750).view(-1, 1, 1)
            return torch.where(late, output * (1 + 0.4 * self.sign), output) if self.on else output

    flip = Flip()
    net.register_forward_pre_hook(lambda m, a: setattr(flip, "t", a[1]))
    net.in_blocks[2].register_forward_hook(flip)
    monitor, raised = monitored(net, out=tmp_path / "s.jsonl")
    for step in range(1, 61):
        flip.on, flip.sign = step > 30, -flip.sign
        train(net, 1, monitor, start=step, lr=1e-3)
    (alarm,) = [a for a in raised if a.kind == "oscillation"]
    assert 31 <= alarm.since <= 45
    assert alarm.since == alarm.step
    assert alarm.times == (750.0, 1000.0)
    assert alarm.skip == 3
    assert alarm.module in ("in_blocks.2", "out_blocks.0")
    assert alarm.value > 3 * alarm.reference
    text = str(alarm)
    assert "timesteps 750 to 1000" in text
    assert "Theorem 3.1" in text
    log = read_stability(tmp_path / "s.jsonl")
    (logged,) = [a for a in log.alarms() if a["kind"] == "oscillation"]
    assert logged["text"] == text
    assert logged["since"] == alarm.since
    lasting = [a for a in log.entries[-1]["alarms"] if a["kind"] == "oscillation"]
    assert lasting == [{"kind": "oscillation", "module": monitor.alarms[0].module, "since": alarm.since}]


def test_a_gradient_spike_names_the_step_and_the_block():
    net = small_uvit()
    monitor, raised = monitored(net)
    train(net, 20, monitor, lr=1e-3)
    x, t, eps = batch(21)
    net.zero_grad()
    with monitor.step(21):
        (net(x, t) - eps).square().mean().backward()
        for parameter in net.mid_block.parameters():
            parameter.grad.mul_(1e4)
    monitor.note(grad_norm=monitor.last["grad"]["total"])  # what clipping returns for a recorded step
    (alarm,) = raised
    assert (alarm.kind, alarm.since, alarm.module) == ("gradient", 21, "mid_block")
    assert "Theorem 3.3" in alarm.advice
    assert alarm.value > 100 * alarm.reference
    train(net, 1, monitor, start=22, lr=1e-3)
    assert monitor.alarms == ()  # it is over


def test_note_reveals_a_spike_between_snapshots():
    net = small_uvit()
    monitor, raised = monitored(net, every=4)
    for step in range(1, 49):
        x, t, eps = batch(step)
        net.zero_grad()
        with monitor.step(step):
            each = (net(x, t) - eps).square().flatten(1).mean(1)
            each.mean().backward()
            monitor.note(loss=torch.where(t > 500, each * 40, each) if step == 46 else each, t=t)
        monitor.note(grad_norm=1e3 if step == 46 else 1.0)
    kinds = {alarm.kind: alarm for alarm in raised}
    assert kinds.keys() == {"gradient", "loss"}
    assert kinds["loss"].since == kinds["gradient"].since == 46
    assert kinds["loss"].step == 48
    assert kinds["loss"].times[0] >= 500


def test_nan_weights_name_the_first_module_and_a_nan_loss_the_first_step(tmp_path):
    net = small_uvit()
    monitor, raised = monitored(net, every=5, out=tmp_path / "s.jsonl")
    train(net, 11, monitor)
    with torch.no_grad():
        net.out_blocks[1].mlp.fc1.weight[0, 0] = math.nan
    for step in range(12, 16):  # without updates, which would spread it
        with monitor.step(step):
            monitor.note(loss=net(*batch(step)[:2]).square().mean())
    (alarm,) = raised
    assert (alarm.kind, alarm.step, alarm.since, alarm.skip) == ("nonfinite", 15, 12, 2)
    assert alarm.module == "out_blocks.1"
    assert "is not finite" in str(alarm)
    assert monitor.last["probe"]["out"][1] is None
    assert monitor.last["probe"]["backbone"][2] > 0  # before it all is well
    assert read_stability(tmp_path / "s.jsonl").alarms()[0]["module"] == "out_blocks.1"


@pytest.mark.parametrize(
    ("module", "acts"), [("in_blocks.1", False), ("mid_block", False), ("out_blocks.1", True), ("", True)]
)
def test_no_kappa_is_proposed_for_a_feature_that_no_long_skip_precedes(module, acts):
    net = small_uvit()
    monitor, raised = monitored(net)
    net.get_submodule(module).register_forward_hook(lambda m, args, output: output * math.nan)
    with monitor.step(1):
        monitor.note(loss=net(*batch(1)[:2]).square().mean())
    (alarm,) = raised
    assert alarm.module == (module or "(network)")
    assert "under fp16 also bf16" in alarm.advice
    assert ("ConstantScaling(" in alarm.advice) is acts


@pytest.mark.parametrize("every", [1, 4])
def test_a_lasting_nan_keeps_the_module_where_it_began_or_says_that_it_may_have_spread(every):
    net = small_uvit()
    monitor, raised = monitored(net, every=every)
    train(net, 5, monitor)
    with torch.no_grad():
        net.out_blocks[1].mlp.fc1.weight[0, 0] = math.nan
    train(net, 7, monitor, start=6)  # the update of step 6 makes every weight NaN
    assert net.in_blocks[0].attn.qkv.weight.isnan().all()
    (alarm,) = raised
    (last,) = monitor.alarms
    assert (alarm.since, last.since, last.step) == (6, 6, 12)
    assert last.module == alarm.module == ("out_blocks.1" if every == 1 else "patch_embed")
    assert ("updates may have spread it, every=1 names where it begins" in str(alarm)) is (every > 1)
    assert "is not finite" in str(last)


def test_an_infinite_gradient_alone_names_its_block():
    net = small_uvit()
    monitor, raised = monitored(net)
    x, t, eps = batch(1)
    with monitor.step(1):
        (net(x, t) - eps).square().mean().backward()
        net.in_blocks[1].mlp.fc1.weight.grad[0, 0] = math.inf
    assert [(a.kind, a.module) for a in raised] == [("nonfinite", "in_blocks.1")]
    assert monitor.last["grad"]["total"] is None


def test_an_infinite_gradient_under_a_grad_scaler_raises_no_alarm():
    class Scaler:
        def get_scale(self):
            return 1024.0

    net = small_uvit()
    monitor, raised = monitored(net, scaler=Scaler())
    x, t, eps = batch(1)
    with monitor.step(1):
        (net(x, t) - eps).square().mean().backward()
        net.in_blocks[1].mlp.fc1.weight.grad[0, 0] = math.inf
    monitor.note(grad_norm=math.inf)
    train(net, 1, monitor, start=2)
    assert raised == []


def test_an_intermittent_oscillation_is_one_alarm(monkeypatch):
    """An oscillation around the threshold: active at snapshots 3, 5, 6 and, much later, 20."""
    from scalelong.monitor import monitor as module

    net = small_uvit()
    watch, raised = monitored(net)
    bad = {3, 5, 6, 20}

    def find(layout, limits, entries, *rest):
        step = entries[-1]["step"]
        return [Alarm("oscillation", step, step, "mid_block", "made up")] if step in bad else []

    monkeypatch.setattr(module, "find", find)
    since = {}
    for step in range(1, 21):
        train(net, 1, watch, start=step, lr=0.0)
        since |= {alarm.step: alarm.since for alarm in watch.alarms}
    assert since == {3: 3, 5: 3, 6: 3, 20: 20}
    assert [alarm.step for alarm in raised] == [3, 20]


def test_an_alarm_is_logged_as_a_warning_by_default(caplog):
    net = small_uvit()
    monitor = StabilityMonitor(net, batch(0)[:2], every=1)
    with torch.no_grad():
        net.mid_block.norm1.weight.fill_(math.nan)
    with caplog.at_level(logging.WARNING, "scalelong"):
        train(net, 3, monitor)
    assert len(caplog.records) == 1  # it begins once
    assert "mid_block" in caplog.text


# ------------------------------------------------------------------------------------ on synthetic entries


def entries(n, **series):
    return [{"step": k, **{key: make(k) for key, make in series.items()}} for k in range(n)]


def test_a_growing_ratio_raises_an_alarm_at_its_skip():
    run = lambda k: {"ratio": [1.0, 1.0 * 1.1**k, 1.0]}
    (alarm,) = alarms_at(entries(30, probe=run))
    assert (alarm.kind, alarm.skip) == ("ratio", 2)
    assert alarm.value / alarm.reference > 4
    assert alarms_at(entries(30, probe=lambda k: {"ratio": [1.0, 1.02**k, None]})) == []


@pytest.mark.parametrize(("factor", "expected"), [(3.0, []), (8.0, ["gradient"])])
def test_a_spike_is_relative_to_the_median_of_the_window(factor, expected):
    wobble = lambda k: {"max": (1.0 + 0.1 * (-1) ** k) * (factor if k == 19 else 1.0)}
    assert [a.kind for a in alarms_at(entries(20, grad=wobble))] == expected


def test_a_loss_that_always_varies_raises_no_spike_alarm():
    g = torch.Generator().manual_seed(0)
    values = (2.0 * torch.randn(40, generator=g)).exp().tolist()
    assert alarms_at(entries(40, loss=lambda k: {"max": values[k]})) == []


@pytest.mark.parametrize("n", [1, 2, 4])
def test_few_snapshots_are_not_compared(n):
    spike = lambda k: {"max": 1.0 if k < n - 1 else 1e6}
    assert alarms_at(entries(n, grad=spike, probe=lambda k: {"ratio": [10.0**k] * 3})) == []


def test_a_large_oscillation_from_the_start_raises_an_alarm():
    window = Window(40)
    for k in range(30):
        window.add(torch.full((LAYOUT.size + 3 * 4,), 0.2 * (-1) ** k, dtype=torch.float64))
    (alarm,) = alarms_at(entries(30), window)
    assert (alarm.kind, alarm.value) == ("oscillation", pytest.approx(0.2, rel=0.01))
    assert "other points" in alarm.what


# --------------------------------------------------------------------------------------------- advice


def test_advice_states_the_sums_of_theorem_3_1():
    text = advice("oscillation", None, 2, [1.0] * 6, None)
    recommended = choose_kappa(PAPER_MEAN, 6)[2]
    then = sum_of_squares(ConstantScaling(recommended).coefficients(6), 3)
    assert "Σκ_j² over j > 2, here 4;" in text
    assert f"ConstantScaling({recommended:g}) makes Σκ_j² over j ≥ 3 {then:.3g} instead of 4" in text


def test_advice_does_not_recommend_the_scaling_in_use():
    recommended = choose_kappa(PAPER_MEAN, 6)[2]
    text = advice("gradient", 1, None, ConstantScaling(recommended).coefficients(6), recommended)
    assert "ConstantScaling" not in text
    assert "learning rate" in text


def test_advice_mentions_skips_that_are_almost_cut():
    kappas = ConstantScaling(0.99).coefficients(12)
    assert "almost cuts" in advice("ratio", 3, 3, [0.5**k for k in range(12)], 0.5)
    assert "almost cuts" not in advice("ratio", 3, 3, kappas, 0.99)


@pytest.mark.parametrize("kind", ["nonfinite", "oscillation", "gradient", "loss", "ratio"])
@pytest.mark.parametrize("coefficients", [[], [1.0], [1.0] * 6, [0.0] * 3])
@pytest.mark.parametrize("skip", [None, 1, 6])
def test_every_case_has_advice(kind, coefficients, skip):
    for hidden in (None, 0, skip):
        text = advice(kind, skip, hidden, coefficients, None)
        assert text.endswith(".")
        assert "nan" not in text


def test_a_point_knows_which_feature_of_eq_3_it_is():
    points = find_points(StackedUNet(8, 3))
    found = {(point.module, point.skip): point.hidden for point in points.all[points.start("backbone") :]}
    names = {point.name: point.hidden for point in points.all}
    assert [names[f"the backbone at the join of long skip {i} (decoders.{i - 1})"] for i in (1, 2, 3)] == [1, 2, 3]
    assert [names[f"the output of decoders.{i - 1}, which consumes long skip {i}"] for i in (1, 2, 3)] == [0, 1, 2]
    assert [found[f"decoders.{k}", None] for k in range(3)] == [0, 1, 2]
    assert found["encoders.0", None] is found["middle", None] is None
    assert all(point.hidden is None for point in points.all[: points.start("backbone")])  # the encoder's features
    text = advice("oscillation", 1, 0, [1.0, 0.5, 0.5], None)
    assert "‖h_0‖² is proportional to Σκ_j² over j > 0, here 1.5" in text
    assert "does not bound" in advice("oscillation", 2, None, [1.0] * 3, None)


@pytest.mark.parametrize(("name", "value"), [("growth", 0), ("spike", -1.0), ("looks", 1), ("oscillation", "much")])
def test_invalid_limits_raise_with_name_and_value(name, value):
    with pytest.raises(InvalidValueError, match=f"{name}.*{value}"):
        Limits(**{name: value})
