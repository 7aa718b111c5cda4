"""`distill` replaces LS by the mean of the κ_i that it computes, in place, and reports what is lost."""

import pytest
import torch

import scalelong
from scalelong import ConstantScaling, ExplicitScaling, LearnableScaling, UViT
from scalelong.errors import InvalidValueError, ScalingStateError
from scalelong.skips import scaling_of


def network(**options):
    torch.manual_seed(0)
    net = UViT(img_size=8, in_chans=1, embed_dim=32, depth=4, num_heads=2, init_std=0.1)
    return scalelong.apply(net, LearnableScaling(**options)).eval()


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 1, 8, 8, generator=generator), 900 * torch.rand(4, generator=generator)) for _ in range(count)
    ]


def test_constants_are_the_means_of_what_ls_computes():
    net, calls = network(), batches()
    seen = {1: [], 2: []}
    handle = scaling_of(net).register_forward_hook(lambda _, args, kappa: seen[args[1]].append(kappa.detach()))
    before = [net(*call).detach() for call in calls]
    handle.remove()
    result = scalelong.distill(net, calls)
    assert isinstance(scaling_of(net).spec, ExplicitScaling)
    for skip in result.skips:
        kappas = torch.cat(seen[skip.index]).double().flatten(1)
        assert skip.coefficient == pytest.approx(float(kappas.mean()))
        assert skip.spread == pytest.approx(float(kappas.std(correction=0)), rel=1e-4)
        assert skip.spread_over_inputs == pytest.approx(float(kappas.mean(1).std(correction=0)), rel=1e-3, abs=1e-7)
        assert (skip.low, skip.high) == pytest.approx((float(kappas.min()), float(kappas.max())))
    moved = [net(*call).detach() - one for call, one in zip(calls, before, strict=True)]
    expected = float(torch.stack(moved).norm() / torch.stack(before).norm())
    assert result.output_change == pytest.approx(expected, rel=1e-4)
    assert result.inputs == 12


def test_the_loss_is_measured_on_the_same_examples_before_and_after():
    net = network()
    result = scalelong.distill(net, iter(batches()), loss=lambda net, call: net(*call).square().mean((1, 2, 3)))
    assert len(result.losses_before) == len(result.losses_after) == 12
    after = torch.cat([net(*call).detach().square().mean((1, 2, 3)) for call in batches()])
    assert result.losses_after == pytest.approx(after.tolist(), rel=1e-5)
    assert f"{result.loss_change:+.3g}" in str(result)


def test_scalars_need_no_examples_and_lose_nothing():
    net = network(calibration="scalar")
    with torch.no_grad():
        scaling_of(net).kappa.copy_(torch.tensor([0.9, 0.4]))
    x, t = batches(1)[0]
    before = net(x, t)
    result = scalelong.distill(net)
    assert result.scaling.values == pytest.approx((0.9, 0.4))
    torch.testing.assert_close(net(x, t), before)


def test_a_negative_scalar_becomes_a_negative_constant():
    net = network(calibration="scalar")
    with torch.no_grad():
        scaling_of(net).kappa.copy_(torch.tensor([0.9, -0.1]))
    x, t = batches(1)[0]
    before = net(x, t)
    assert scalelong.distill(net).scaling.values == pytest.approx((0.9, -0.1))
    torch.testing.assert_close(net(x, t), before)


def test_it_saves_and_loads_as_constants(tmp_path):
    net = network()
    scalelong.distill(net, batches())
    net.save_pretrained(tmp_path)
    x, t = batches(1)[0]
    torch.testing.assert_close(UViT.from_pretrained(tmp_path).eval()(x, t), net(x, t))


def test_other_scalings_and_missing_examples_are_refused():
    with pytest.raises(ScalingStateError, match="ConstantScaling"):
        scalelong.distill(scalelong.apply(network(), ConstantScaling(0.7), replace=True), batches())
    with pytest.raises(ScalingStateError, match="unscaled"):
        scalelong.distill(scalelong.remove(network()), batches())
    with pytest.raises(InvalidValueError, match="examples"):
        scalelong.distill(network())
