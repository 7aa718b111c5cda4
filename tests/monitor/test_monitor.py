"""Recorded norms, gradients and jumps equal those computed by hand."""

import copy
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from loops import batch, monitored_run, small_uvit, train
from torch import nn

from scalelong import ConstantScaling, LearnableScaling, Site, StabilityMonitor, UViT, apply, build_unet
from scalelong.errors import InvalidValueError, ScaleLongError, ScalingStateError
from scalelong.models.unet import unet_settings
from scalelong.monitor.log import read_stability
from scalelong.monitor.probe import probe_size
from scalelong.monitor.summary import trends

CLOSE = {"rel": 2e-4}  # entries have five digits


def rms(x):
    return float(x.detach().flatten(1).norm(dim=1).square().mean().sqrt())


def uvit_features(net, x, t):
    """Return the norms at the joins of a U-ViT, computed from its blocks."""
    kept, handles = {"skip": {}, "backbone": {}, "out": {}}, []
    n = len(net.out_blocks)
    for k, block in enumerate(net.in_blocks):
        handles.append(block.register_forward_hook(lambda m, a, o, k=k: kept["skip"].update({k + 1: rms(o)})))
    for k, block in enumerate(net.out_blocks):
        i = n - k
        handles.append(
            block.register_forward_pre_hook(lambda m, a, i=i: kept["backbone"].update({i: rms(a[0])}), prepend=True)
        )
        handles.append(block.register_forward_hook(lambda m, a, o, i=i: kept["out"].update({i: rms(o)})))
    with torch.no_grad():
        kept["output"] = rms(net.eval()(x, t))
    for handle in handles:
        handle.remove()
    return {k: [v[i] for i in range(1, n + 1)] if isinstance(v, dict) else v for k, v in kept.items()}


# ------------------------------------------------------------------------------------------------ norms


@pytest.fixture(scope="module")
def cs_run():
    """Return the last entry, the network with the weights of that step, the probe, the monitor and the EMA."""
    net, seen = small_uvit(ConstantScaling(0.7)), {}
    monitor = StabilityMonitor(net, batch(0, n=8)[:2], every=4, ema=(ema := copy.deepcopy(net)))
    keep = lambda step, each, norm: seen.update(net=copy.deepcopy(net)) if step == 8 else None
    train(net, 8, monitor, after=keep)
    return monitor.last, seen["net"], batch(0, n=8)[:2], monitor, ema


def test_probe_norms_are_those_of_the_features_at_the_joins(cs_run):
    entry, net, probe, *_ = cs_run
    expected = uvit_features(net, *probe)
    for measure in ("skip", "backbone", "out"):
        assert entry["probe"][measure] == pytest.approx(expected[measure], **CLOSE)
    assert entry["probe"]["blocks"][-1] == pytest.approx(expected["output"], **CLOSE)


class InPlace(nn.Module):
    """A block that changes its input in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Hardtanh(0.0, 1.0, inplace=True)
        self.second.weight = nn.Parameter(torch.ones(1))  # a block has parameters

    def forward(self, x, t):
        return self.second(self.first(x))


@pytest.mark.parametrize("inference", [False, True])
def test_a_tensor_changed_in_place_is_recorded_with_its_new_norm(inference):
    net = InPlace()
    monitor = StabilityMonitor(net, (x := torch.randn(8, 4), torch.zeros(8)), every=1)
    with torch.inference_mode(inference), monitor.step(1):
        out = net(x, None)
    expected = [rms(net.first(x)), rms(out), rms(out)]
    assert expected[0] > expected[1]
    for seen in ("probe", "train"):
        assert monitor.last[seen]["blocks"] == pytest.approx(expected, **CLOSE)


def test_training_norms_are_those_of_the_step_s_own_batch(cs_run):
    entry, net, *_ = cs_run
    x, t, _ = batch(8)
    expected = uvit_features(net, x, t)
    assert entry["train"]["backbone"] == pytest.approx(expected["backbone"], **CLOSE)
    assert entry["train"]["n"] == len(x)


def test_the_ratio_is_the_scaled_skip_to_the_backbone(cs_run):
    entry, net, probe, *_ = cs_run
    e = uvit_features(net, *probe)
    expected = [0.7**k * s / b for k, (s, b) in enumerate(zip(e["skip"], e["backbone"], strict=True))]
    assert entry["probe"]["ratio"] == pytest.approx(expected, **CLOSE)


def test_kappa_of_a_fixed_scaling_is_its_coefficients(cs_run):
    entry, *_ = cs_run
    for figure in ("mean", "min", "max"):
        assert entry["kappa"][figure] == pytest.approx([1, 0.7, 0.49])


def test_norms_by_timestep_cover_the_samples_of_each_bin(cs_run):
    entry, net, (x, t), *_ = cs_run
    which = (t / 250).long()
    for k in which.unique().tolist():
        expected = uvit_features(net, x[which == k], t[which == k])["backbone"]
        assert [row[k] for row in entry["probe"]["by_time"]] == pytest.approx(expected, **CLOSE)


def test_learned_kappa_has_a_mean_and_a_spread():
    net = small_uvit(LearnableScaling())
    seen = {}
    monitor = StabilityMonitor(net, batch(0)[:2], every=1)
    train(net, 1, monitor, after=lambda *a: seen.update(net=copy.deepcopy(net)))
    kappas = {}
    seen["net"].skip_scaling.register_forward_hook(lambda m, a, o: kappas.update({a[1]: o.detach()}))
    with torch.no_grad():
        seen["net"].eval()(*batch(0)[:2])
    entry = monitor.last["kappa"]
    assert entry["mean"] == pytest.approx([kappas[i].mean().item() for i in (1, 2, 3)], **CLOSE)
    assert entry["min"] == pytest.approx([kappas[i].min().item() for i in (1, 2, 3)], **CLOSE)
    assert entry["max"] == pytest.approx([kappas[i].max().item() for i in (1, 2, 3)], **CLOSE)
    assert all(low < high for low, high in zip(entry["min"], entry["max"], strict=True))


def test_a_dead_calibration_network_raises_one_alarm(tmp_path):
    net, raised = small_uvit(LearnableScaling(activation="relu")), []
    torch.nn.init.constant_(net.skip_scaling.networks.zeta.layer1.bias, -100.0)  # no ReLU is active any more
    monitor = StabilityMonitor(net, batch(0)[:2], every=1, out=tmp_path / "log.jsonl", on_alarm=raised.append)
    train(net, 3, monitor)
    assert [(alarm.kind, alarm.skip) for alarm in raised] == [("dead", 1)]
    assert "κ_1, κ_2, κ_3" in raised[0].what
    assert monitor.last["kappa"]["dead"] == [1, 2, 3]
    alive = StabilityMonitor(net := small_uvit(LearnableScaling(init="identity")), batch(0)[:2], every=1)
    train(net, 1, alive)
    assert "dead" not in alive.last["kappa"]


# -------------------------------------------------------------------------------- gradients, drift, loss


def test_gradient_norms_are_before_clipping_and_add_up():
    net, norms = small_uvit(), {}
    monitor = StabilityMonitor(net, batch(0)[:2], every=2)
    train(net, 2, monitor, after=lambda s, e, n: norms.update({s: float(n)}), clip=1e-3)
    grad = monitor.last["grad"]
    assert grad["total"] == pytest.approx(norms[2], **CLOSE)
    assert math.sqrt(sum(g * g for g in grad["blocks"] if g)) == pytest.approx(grad["total"], rel=1e-3)
    assert grad["max"] == pytest.approx(max(norms.values()), **CLOSE)
    assert norms[grad["at"]] == max(norms.values())


def test_a_block_s_gradient_norm_covers_its_own_parameters():
    net, kept = small_uvit(), {}

    def keep(step, each, norm):  # clipping has not shortened anything
        kept.update({n: p.grad.clone() for n, p in net.named_parameters()})

    monitor = StabilityMonitor(net, batch(0)[:2], every=1)
    train(net, 1, monitor, after=keep, clip=1e9)
    for k, path in enumerate(monitor.points.blocks):
        own = [g for n, g in kept.items() if n.startswith(f"{path}.")]
        own = own or [g for n, g in kept.items() if not any(n.startswith(f"{b}.") for b in monitor.points.blocks)]
        expected = torch.cat([g.flatten() for g in own]).norm().item()
        assert monitor.last["grad"]["blocks"][k] == pytest.approx(expected, **CLOSE), path


def test_a_loss_scale_is_divided_out():
    class Scaler:
        def get_scale(self):
            return 64.0

    net = small_uvit()
    probe = batch(0)[:2]
    plain, scaled = StabilityMonitor(net, probe, every=1), StabilityMonitor(net, probe, every=1, scaler=Scaler())
    x, t, eps = batch(1)
    for monitor, factor in ((plain, 1.0), (scaled, 64.0)):
        net.zero_grad()
        with monitor.step(1):
            ((net(x, t) - eps).square().mean() * factor).backward()
    assert scaled.last["grad"]["total"] == pytest.approx(plain.last["grad"]["total"], **CLOSE)


def test_drift_is_the_relative_distance_to_the_average(cs_run):
    entry, net, _, monitor, ema = cs_run
    theirs = {n: p.detach() for n, p in ema.named_parameters()}
    apart = torch.cat([(p.detach() - theirs[n]).flatten() for n, p in net.named_parameters()]).norm()
    size = torch.cat([p.flatten() for p in theirs.values()]).norm()
    assert entry["drift"]["total"] == pytest.approx(float(apart / size), **CLOSE)
    k = monitor.points.blocks.index("mid_block")
    mine = [(p.detach(), theirs[n]) for n, p in net.named_parameters() if n.startswith("mid_block.")]
    apart, size = (torch.cat([f(a, b).flatten() for a, b in mine]).norm() for f in (torch.sub, lambda a, b: b))
    assert entry["drift"]["blocks"][k] == pytest.approx(float(apart / size), **CLOSE)


def test_an_average_can_be_an_averaged_model_or_a_list():
    net = small_uvit()
    averaged = torch.optim.swa_utils.AveragedModel(net)
    for ema in (averaged, [p.detach().clone() for p in net.parameters()]):
        monitor = StabilityMonitor(net, batch(0)[:2], every=1, ema=ema)
        train(net, 1, monitor, lr=0.0)
        assert monitor.last["drift"]["total"] == 0.0
    with pytest.raises(InvalidValueError, match="ema.*Linear"):
        StabilityMonitor(net, ema=nn.Linear(2, 2))
    with pytest.raises(InvalidValueError, match="ema.*2 tensors"):
        StabilityMonitor(net, ema=[torch.zeros(1), torch.zeros(2)])


def test_an_average_is_followed_after_its_tensors_are_replaced():
    from diffusers.training_utils import EMAModel

    net = small_uvit()
    ema = EMAModel(net.parameters())
    monitor = StabilityMonitor(net, batch(0)[:2], every=1, ema=ema)
    saved = ema.state_dict()
    saved["shadow_params"] = [2 * p for p in ema.shadow_params]
    ema.load_state_dict(saved)  # as accelerator.load_state does
    train(net, 1, monitor, lr=0.0)
    assert monitor.last["drift"]["total"] == pytest.approx(0.5)
    ema.shadow_params = [p.double() for p in net.parameters()]  # as `EMAModel.to` does
    train(net, 1, monitor, lr=0.0, start=2)
    assert monitor.last["drift"]["total"] == 0.0
    iterator = StabilityMonitor(net, batch(0)[:2], every=1, ema=copy.deepcopy(net).parameters())
    train(net, 2, iterator, lr=0.0)
    assert iterator.last["drift"]["total"] == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mixed", [False, True])
def test_norms_of_half_precision_gradients_are_computed_in_single_precision(dtype, mixed):
    net, alarms = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype), []
    if mixed:
        net[1].float()
    monitor = StabilityMonitor(
        net, lambda net: net[0](torch.zeros(4, 64, dtype=dtype)), every=1, on_alarm=alarms.append
    )
    with monitor.step(1):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 8000.0)
    exact = math.sqrt(sum(p.grad.double().square().sum() for p in net.parameters()))
    assert exact > torch.finfo(torch.float16).max
    assert monitor.last["grad"]["total"] == pytest.approx(exact, **CLOSE)
    assert not alarms


def test_losses_cover_every_step_since_the_last_snapshot_and_timestep_bins():
    net, kept = small_uvit(), {}
    monitor = StabilityMonitor(net, batch(0)[:2], every=5)
    train(net, 5, monitor, after=lambda step, each, norm: kept.update({step: each}))
    loss, times = monitor.last["loss"], torch.cat([batch(s)[1] for s in range(1, 6)])
    means = {step: each.mean().item() for step, each in kept.items()}
    assert loss["steps"] == 5
    assert loss["mean"] == pytest.approx(np.mean(list(means.values())), **CLOSE)
    assert loss["max"] == pytest.approx(max(means.values()), **CLOSE)
    assert means[loss["at"]] == max(means.values())
    each = torch.cat(list(kept.values()))
    expected = [each[(times / 250).long() == k].mean().item() for k in range(4)]
    assert loss["bins"] == pytest.approx(expected, **CLOSE)


def test_a_loss_can_be_a_number():
    net = small_uvit()
    monitor = StabilityMonitor(net, batch(0)[:2], every=1)
    x, t, eps = batch(1)
    with monitor.step(1):
        loss = (net(x, t) - eps).square().mean()
        loss.backward()
        monitor.note(loss=loss)
        monitor.note(loss=loss.item())
    assert monitor.last["loss"]["mean"] == pytest.approx(loss.item(), **CLOSE)
    assert "bins" not in monitor.last["loss"]


# ------------------------------------------------------------------------------------------ oscillation


def test_jumps_span_one_update_whatever_the_interval():
    """Recording every step and recording pairs of steps give the same jumps."""
    probe = batch(0)[:2]
    histories = {}
    for name, every in (("each", 1), ("pairs", 4)):
        monitor = StabilityMonitor(small_uvit(), probe, every=every, window=500)
        histories[name] = []
        for step in range(1, 41):
            train(monitor.root, 1, monitor, start=step)
            if monitor.last and monitor.last["step"] == step:
                histories[name].append(copy.deepcopy(monitor.last))
    log = {e["step"]: np.log(e["probe"]["backbone"]) for e in histories["each"]}
    assert [e["step"] for e in histories["pairs"]] == list(range(4, 41, 4))
    pairs = [e for e in histories["pairs"] if "jump" in e]
    assert [e["step"] for e in pairs] == [8, 16, 24, 32, 40]  # every second snapshot covers two steps
    for entry in pairs:
        expected = log[entry["step"]] - log[entry["step"] - 1]
        assert entry["jump"]["probe"]["backbone"] == pytest.approx(expected, abs=2e-4)
    jumps = np.array([e["jump"]["probe"]["backbone"] for e in pairs])
    exact = [float(f"{value:.3g}") for value in np.std(jumps, axis=0)]
    assert pairs[-1]["oscillation"]["probe"]["backbone"] == exact  # jumps are rounded only in the file, to nine digits
    assert pairs[-1]["oscillation"]["jumps"] == 5
    series = np.std([log[s + 1] - log[s] for s in range(1, 40)], axis=0)
    logged = histories["each"][-1]["oscillation"]["probe"]["backbone"]
    assert logged == pytest.approx(series, rel=2e-2, abs=1e-5)  # norms in the log have five digits


def test_the_training_batch_and_the_gradient_have_their_own_oscillation():
    monitor, _ = monitored_run(small_uvit(), 20, every=1)
    o, probe = monitor.last["oscillation"], monitor.last["oscillation"]["probe"]
    assert len(o["train"]["backbone"]) == len(probe["backbone"]) == 3
    assert o["train"]["backbone"] != probe["backbone"]
    assert all(calm < live for calm, live in zip(probe["backbone"], o["train"]["backbone"], strict=True))
    assert o["grad"]["total"] > 0


def test_without_updates_the_probe_does_not_oscillate_and_the_training_batch_does():
    net = small_uvit()
    monitor = StabilityMonitor(net, batch(0)[:2], every=1)
    train(net, 10, monitor, lr=0.0)
    o = monitor.last["oscillation"]
    assert o["probe"]["backbone"] == [0.0, 0.0, 0.0]
    assert min(o["train"]["backbone"]) > 0


@pytest.mark.parametrize(("steps", "jumps"), [(1, 0), (2, 1)])
def test_fewer_than_two_jumps_have_no_oscillation(steps, jumps):
    monitor, _ = monitored_run(small_uvit(), steps, every=1)
    assert monitor.last["oscillation"] == {"jumps": jumps}


# --------------------------------------------------------------------------------------------- networks


class Chain(nn.Module):
    """A network without skips."""

    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 64)])
        self.dead = nn.Linear(3, 3)  # never called

    def forward(self, x, t):
        h = torch.relu(self.inside[0](x.flatten(1)))
        return self.inside[1](h).view_as(x)


def test_a_network_without_known_skips_is_recorded_by_its_blocks():
    torch.manual_seed(0)
    monitor, _ = monitored_run(Chain(), 8)
    assert monitor.points.blocks == ("inside.0", "inside.1", "dead", "(network)")
    entry = monitor.last
    assert "skip" not in entry["probe"]
    assert "ratio" not in entry["probe"]
    first, second, dead, whole = entry["probe"]["blocks"]
    assert dead is None
    assert first > 0
    assert second == whole
    assert entry["grad"]["blocks"][2] is None
    assert len(entry["probe"]["by_time"]) == 4
    assert "blocks only" in str(monitor.summary())
    assert "stability/relative_oscillation/inside.0" in monitor.scalars


def test_a_multilayer_perceptron_needs_torch_alone():
    """In a fresh process without diffusers, NumPy and a compiler."""
    script = """
import sys
for name in ("numpy", "diffusers", "accelerate", "rich", "transformers"):
    sys.modules[name] = None
import scalelong, torch
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
watch = scalelong.StabilityMonitor(net, every=1)
for step in (1, 2, 3):
    with watch.step(step):
        net(torch.ones(2, 4)).sum().backward()
assert "torch._inductor" not in sys.modules
print(watch.last["oscillation"]["jumps"], *watch.points.blocks)
"""
    environment = os.environ | {"CC": "false", "CXX": "false"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split() == ["2", "0", "2", "(network)"]


def test_a_wrapper_around_a_network_is_entered():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Chain()

        def forward(self, x, t):
            return self.model(x, t)

    monitor, _ = monitored_run(Holder(), 2)
    assert monitor.points.blocks == ("model.inside.0", "model.inside.1", "model.dead", "(network)")


class Dense(nn.Module):
    """A network whose skip the package does not know."""

    def __init__(self):
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(64, 16), nn.Linear(16, 16), Join()

    def forward(self, x, t):
        skip = self.enter(x.flatten(1))
        return self.leave(self.middle(skip), shortcut=skip).view_as(x)


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 64)

    def forward(self, x, shortcut):
        return self.out(x + shortcut)


def test_sites_can_be_passed_and_one_skip_is_enough():
    torch.manual_seed(0)
    net = Dense()
    monitor, _ = monitored_run(net, 4, sites=[Site("leave", "shortcut", source="enter", dim=-1)])
    p = monitor.last["probe"]
    with torch.no_grad():
        assert p["ratio"][0] == pytest.approx(p["skip"][0] / p["backbone"][0], rel=1e-3)
    assert p["skip"][0] == p["blocks"][0]  # what `enter` gives
    assert p["backbone"][0] == p["blocks"][1]  # what the middle gives


def test_an_unknown_site_raises():
    with pytest.raises(ScaleLongError, match="'leavs'.*'leave'"):
        StabilityMonitor(Dense(), sites=["leavs"])


def test_scaling_applied_to_passed_sites_is_recorded():
    torch.manual_seed(0)
    net = apply(Dense(), "uniform", sites=[Site("leave", "shortcut", dim=-1)])
    monitor, _ = monitored_run(net, 2)
    p = monitor.last["probe"]
    assert p["ratio"][0] == pytest.approx(2**-0.5 * p["skip"][0] / p["backbone"][0], rel=1e-3)


class Additive(nn.Module):
    """Adds its long skips in its own `forward`, as networks for restoration do."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.middle, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, t):
        one = self.first(x).relu()
        two = self.second(one).relu()
        self.inner = self.middle(two).relu()
        self.outer = self.last(self.inner + two).relu()
        return self.outer + one


def test_the_backbone_of_an_addition_inside_a_forward_is_recorded():
    torch.manual_seed(0)
    net, x, t = Additive(), torch.randn(4, 8), torch.rand(4)
    apply(net, ConstantScaling(0.5), example=(x, t))
    monitor = StabilityMonitor(net, probe=(x, t), every=1)
    with monitor.step(1):
        net(x, t).square().mean().backward()
    for part in ("probe", "train"):
        p = monitor.last[part]
        assert p["backbone"] == pytest.approx([float(h.norm()) / 2 for h in (net.outer, net.inner)], rel=1e-4)
        assert p["ratio"][1] == pytest.approx(0.5 * p["skip"][1] / p["backbone"][1], rel=1e-3)


@pytest.mark.parametrize("kind", ["uvit", "unet"])
def test_a_method_that_acts_on_both_tensors_leaves_the_norm_of_the_backbone_on_record(kind):
    torch.manual_seed(0)
    net = UViT(img_size=8, embed_dim=16, depth=4, num_heads=2) if kind == "uvit" else small_unet()
    x, t = torch.randn(4, 3, 8, 8), torch.rand(4)
    middles = []
    for scaling in ("none", "mp"):
        apply(net.train(), scaling, replace=True)
        monitor = StabilityMonitor(net, probe=(x, t), every=1)
        with monitor.step(1):
            output = net(x, t)
            (output if kind == "uvit" else output.sample).square().mean().backward()
        assert None not in monitor.last["probe"]["backbone"] + monitor.last["probe"]["ratio"]
        middles.append(monitor.last["probe"]["backbone"][-1])
    assert middles[1] == pytest.approx(middles[0], rel=1e-4)  # the middle block's output, before the join changes it


def small_unet():
    return build_unet(unet_settings(8, (8, 16), 1, ()), in_channels=3, out_channels=3)


def test_zero_norms_have_no_ratio_and_no_jump():
    torch.manual_seed(0)
    net = Dense()
    with torch.no_grad():
        net.middle.weight.zero_()
        net.middle.bias.zero_()
    monitor = StabilityMonitor(net, batch(0)[:2], sites=[Site("leave", "shortcut", dim=-1)], every=1)
    train(net, 6, monitor, lr=0.0)
    assert monitor.last["probe"]["backbone"] == [0.0]
    assert monitor.last["probe"]["ratio"] == [None]
    assert monitor.last["jump"]["probe"]["backbone"] == [None]
    assert monitor.last["oscillation"]["probe"]["backbone"] == [None]
    assert monitor.alarms == ()


# -------------------------------------------------------------------------------------------- the probe


def test_the_first_recorded_batch_is_the_default_probe():
    net = small_uvit()
    monitor = StabilityMonitor(net, every=2)
    seen = {}
    train(net, 6, monitor, after=lambda s, e, n: seen.update(net=copy.deepcopy(net)))
    x, t, _ = batch(2)
    expected = uvit_features(seen["net"], x[:4], t[:4])
    assert monitor.last["probe"]["backbone"] == pytest.approx(expected["backbone"], **CLOSE)
    assert monitor.last["probe"]["n"] == 4


def test_the_default_probe_is_an_eighth_of_the_batch_between_four_and_eight():
    assert [probe_size(n) for n in (1, 4, 6, 32, 48, 64, 1024)] == [1, 4, 4, 4, 6, 8, 8]


def test_a_probe_can_be_a_function_or_have_keywords():
    x, t = batch(0, n=8)[:2]
    entries = []
    for probe, options in (((x, t), {}), ((x, {"t": t}), {}), (lambda net: net(x, t), {"t": t})):
        monitor, _ = monitored_run(small_uvit(), 2, probe=probe, **options)
        entries.append(monitor.last["probe"])
    assert entries[0] == entries[1] == entries[2]
    monitor, _ = monitored_run(small_uvit(), 2, probe=lambda net: net(x, t))
    assert monitor.last["probe"]["backbone"] == entries[0]["backbone"]
    assert "by_time" not in monitor.last["probe"]  # nobody said which sample has which timestep


@pytest.mark.parametrize("probe", [3, (), (0.5,)])
def test_a_probe_without_a_batch_raises(probe):
    with pytest.raises(InvalidValueError, match="probe"):
        StabilityMonitor(small_uvit(), probe)


def test_a_network_that_is_not_called_raises_without_a_probe():
    monitor = StabilityMonitor(small_uvit(), every=1)
    with pytest.raises(ScalingStateError, match="StabilityMonitor"):
        with monitor.step(1):
            pass


@pytest.mark.parametrize(
    ("option", "value"), [("every", -1), ("every", 2.5), ("window", 1), ("keep", 2), ("bins", 0), ("times", (5, 5))]
)
def test_invalid_options_raise_with_their_name(option, value):
    with pytest.raises(InvalidValueError, match=option):
        StabilityMonitor(small_uvit(), **{option: value})


def test_an_object_that_is_not_a_network_raises():
    with pytest.raises(InvalidValueError, match="net.*str"):
        StabilityMonitor("net")


# --------------------------------------------------------------------------------------------- readers


def test_log_receives_named_numbers_at_every_snapshot():
    calls = []
    net = small_uvit(LearnableScaling())
    log = lambda values, step: calls.append((step, values))
    monitor = StabilityMonitor(net, batch(0)[:2], every=3, ema=net, log=log)
    train(net, 12, monitor)
    assert [step for step, _ in calls] == [3, 6, 9, 12]
    values = calls[-1][1]
    assert all(type(v) is float for v in values.values())
    assert values["stability/relative_oscillation/backbone_3"] == monitor.last["oscillation"]["probe"]["backbone"][2]
    assert values["stability/kappa/skip_1"] == monitor.last["kappa"]["mean"][0]
    assert values["stability/alarms"] == 0
    assert {"stability/grad_norm", "stability/loss", "stability/ema_drift", "stability/ratio/skip_2"} <= values.keys()


def test_the_summary_is_a_table_of_the_last_snapshot():
    net = small_uvit(ConstantScaling(0.7))
    monitor = StabilityMonitor(net, batch(0)[:2], every=2)
    assert "no snapshot yet" in str(monitor.summary())
    train(net, 20, monitor)
    text = str(monitor.summary())
    assert "3 long skips; step 20, relative oscillation over 5 jumps" in text
    assert "in_blocks.2" in text
    assert f"{monitor.last['train']['backbone'][2]:.3g}" in text
    assert f"{trends(monitor.summary().entries, 'backbone', 3)[2].absolute:.3g}" in text
    assert "no alarms" in text
    blocks = str(monitor.summary(blocks=True))
    assert set(text.splitlines()) < set(blocks.splitlines())
    assert "mid_block " not in text
    assert "mid_block " in blocks


def test_series_are_read_back(tmp_path):
    monitor, _ = monitored_run(small_uvit(), 8, out=tmp_path / "s.jsonl")
    log = read_stability(tmp_path / "s.jsonl")
    steps, values = log.series("probe", "backbone", i=3)
    assert steps == [2, 4, 6, 8]
    assert values[-1] == monitor.last["probe"]["backbone"][2]
    assert log.series("nothing", "here")[1] == [None] * 4
    assert log.header["blocks"] == list(monitor.points.blocks)
    assert log.header["skips"][2] == {"i": 3, "from": "in_blocks.2", "to": "out_blocks.0"}
    assert log.alarms() == []


def test_diffusers_networks_are_recorded():
    from scalelong import build_unet

    torch.manual_seed(0)
    net = build_unet("cifar10", in_channels=1, out_channels=1, sample_size=8, block_out_channels=(8, 8, 8, 8),
                     norm_num_groups=4, attention_head_dim=4, layers_per_block=1, scaling="uniform")  # fmt: skip
    monitor = StabilityMonitor(net, every=1)
    train(net, 2, monitor, call=lambda net, x, t: net(x, t).sample)
    p = monitor.last["probe"]
    assert len(p["skip"]) == 8
    assert None not in p["skip"] + p["backbone"] + p["ratio"]
    assert p["ratio"][0] == pytest.approx(2**-0.5 * p["skip"][0] / p["backbone"][0], rel=1e-3)
