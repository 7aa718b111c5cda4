"""The monitor records every skip and κ of every network that `apply` supports."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "skips"))
from skip_networks import NETWORKS, example, make, run

from scalelong import ConstantScaling, LearnableScaling, StabilityMonitor, apply

KAPPA = 0.8


def snapshot(net, name):
    call = example(name)
    monitor = StabilityMonitor(net, (*call.args, call.kwargs), every=1)
    with monitor.step(1):
        run(net, name).square().mean().backward()
    return monitor.last


@pytest.mark.parametrize("name", NETWORKS)
def test_every_skip_and_the_middle_block_are_recorded(name):
    net, expected = make(name), NETWORKS[name]
    seen, middle = snapshot(net, name), {}
    handle = net.get_submodule(expected.middle).register_forward_hook(lambda m, a, o: middle.update(out=o))
    with torch.no_grad():
        run(net, name)
    handle.remove()
    out = middle["out"] if isinstance(middle["out"], torch.Tensor) else middle["out"][0]
    for part in ("probe", "train"):
        entry = seen[part]
        for measure in ("skip", "backbone", "out", "ratio"):
            assert len(entry[measure]) == expected.skips
            assert all(value is not None and value > 0 for value in entry[measure]), (part, measure, entry[measure])
        if name != "K-blocks":  # whose first decoder block, which takes no skip, lies between
            assert entry["backbone"][-1] == pytest.approx(float(out.norm()) / entry["n"] ** 0.5, rel=1e-3)
        for k in range(expected.skips):
            assert entry["ratio"][k] == pytest.approx(entry["skip"][k] / entry["backbone"][k], rel=1e-3)
    assert seen["kappa"]["mean"] == [1.0] * expected.skips


@pytest.mark.parametrize("name", NETWORKS)
def test_scaling_changes_the_ratio_but_not_the_skip(name):
    scaled = snapshot(apply(make(name), ConstantScaling(KAPPA)), name)
    expected = [KAPPA**k for k in range(NETWORKS[name].skips)]
    assert scaled["kappa"]["mean"] == pytest.approx(expected, rel=1e-4)
    p = scaled["probe"]
    for k, kappa in enumerate(expected):
        assert p["ratio"][k] == pytest.approx(kappa * p["skip"][k] / p["backbone"][k], rel=1e-3)
    plain = snapshot(make(name), name)
    assert p["skip"] == pytest.approx(plain["probe"]["skip"], rel=1e-4)  # the encoder does not know of κ


@pytest.mark.parametrize("name", ["UNet2DModel", "guided-diffusion", "lucidrains Unet", "MONAI BasicUNet 2D"])
def test_learned_kappa_is_recorded_at_the_join(name):
    seen = snapshot(apply(make(name), LearnableScaling()), name)
    k, p = seen["kappa"], seen["probe"]
    for i in range(NETWORKS[name].skips):
        assert 0 < k["min"][i] <= k["mean"][i] <= k["max"][i] < 1
        plain = p["skip"][i] / p["backbone"][i]
        assert k["min"][i] * plain * 0.999 <= p["ratio"][i] <= k["max"][i] * plain * 1.001


def test_after_norm_placement_leaves_the_join_unscaled():
    seen = snapshot(apply(make("UNet2DModel"), ConstantScaling(KAPPA), placement="after_norm"), "UNet2DModel")
    p = seen["probe"]
    assert p["ratio"][3] == pytest.approx(p["skip"][3] / p["backbone"][3], rel=1e-3)
    assert seen["kappa"]["mean"][3] == pytest.approx(KAPPA**3, rel=1e-4)
