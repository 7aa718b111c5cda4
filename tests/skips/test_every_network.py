"""What `apply` and `remove` promise, for every network."""

import copy
import pickle

import pytest
import torch
from joins import JoinWatch
from skip_networks import NETWORKS, Network, make, run
from torch import Tensor, nn

import scalelong
from scalelong import (
    ConstantScaling,
    ExplicitScaling,
    LearnableScaling,
    NoScaling,
    ScaleLongError,
    ScalingWarning,
    UniformScaling,
)
from scalelong.errors import ScalingStateError, UnsupportedNetworkError
from scalelong.skips import scaling_of

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpoint:FutureWarning")
EVERY = pytest.mark.parametrize("name", NETWORKS)
SCALINGS = {"CS": ConstantScaling(0.7), "LS": LearnableScaling()}


def placements(network: Network) -> tuple[str, ...]:
    return ("join", "after_norm") if network.normed else ("join",)


def footprint(net: nn.Module) -> dict[str, object]:
    """Everything that somebody could have left in a network: attributes, submodules, parameters, hooks."""
    traces: dict[str, object] = {"": list(net.state_dict())}
    for path, module in net.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if key.endswith(("_hooks", "_with_kwargs"))]
        traces[path] = (sorted(vars(module)), list(module._modules), list(module._parameters), hooks)
    return traces


@EVERY
@torch.no_grad()
def test_kappa_of_one_leaves_the_output_bit_identical(name):
    expected = run(make(name), name)
    for placement in placements(NETWORKS[name]):
        for scaling in (ExplicitScaling([1.0] * NETWORKS[name].skips), LearnableScaling(init="identity")):
            net = scalelong.apply(make(name), scaling, placement=placement)
            assert torch.equal(run(net, name), expected)


@EVERY
@torch.no_grad()
def test_another_kappa_and_ls_change_the_output(name):
    net = make(name)
    outputs = [run(net, name)]
    for placement in placements(NETWORKS[name]):
        for scaling in (ConstantScaling(0.7), UniformScaling(0.5), LearnableScaling()):
            scalelong.apply(net, scaling, placement=placement, replace=True)
            outputs.append(run(net, name))
    for k, one in enumerate(outputs):
        assert one.isfinite().all()
        assert all(not torch.allclose(one, other, rtol=1e-3, atol=1e-3) for other in outputs[:k])


@EVERY
def test_apply_returns_the_same_network_and_counts_its_skips(name):
    net = make(name)
    assert scalelong.apply(net, ConstantScaling(0.7)) is net
    assert len(scalelong.describe(net).rows) == NETWORKS[name].skips


@EVERY
def test_cs_adds_no_key_and_no_parameter(name):
    net = make(name)
    keys, parameters = list(net.state_dict()), sum(1 for _ in net.parameters())
    scalelong.apply(net, ConstantScaling(0.7))
    assert list(net.state_dict()) == keys
    assert sum(1 for _ in net.parameters()) == parameters
    assert list(scalelong.parameters(net)) == []


@EVERY
@torch.no_grad()
def test_removed_network_is_bit_for_bit_the_original(name):
    net = make(name)
    before, output = footprint(net), run(net, name)
    weights = {key: value.clone() for key, value in net.state_dict().items()}
    for placement in placements(NETWORKS[name]):
        for scaling in SCALINGS.values():
            scalelong.apply(net, scaling, placement=placement)
            assert footprint(net) != before
            assert scalelong.remove(net) is net
            assert footprint(net) == before
            assert all(torch.equal(value, weights[key]) for key, value in net.state_dict().items())
            assert torch.equal(run(net, name), output)


@EVERY
def test_a_second_apply_raises_unless_it_replaces(name):
    net = scalelong.apply(make(name), LearnableScaling())
    with pytest.raises(ScalingStateError, match=r"LearnableScaling.*replace=True"):
        scalelong.apply(net, ConstantScaling(0.7))
    assert isinstance(scaling_of(net).spec, LearnableScaling)
    scalelong.apply(net, ConstantScaling(0.7), replace=True)
    assert scaling_of(net).spec == ConstantScaling(0.7)
    assert footprint(net) == footprint(scalelong.apply(make(name), ConstantScaling(0.7)))


@EVERY
@torch.no_grad()
def test_a_deep_copy_reads_its_own_ls_weights(name):
    """An EMA copy that read the live network's κ would not be an average of anything."""
    live = scalelong.apply(make(name), LearnableScaling())
    ema = copy.deepcopy(live)
    expected = run(ema, name)
    for parameter in scalelong.parameters(live):
        parameter.add_(1.0)
    assert torch.equal(run(ema, name), expected)
    assert not torch.equal(run(live, name), expected)
    assert not {id(p) for p in scalelong.parameters(live)} & {id(p) for p in scalelong.parameters(ema)}
    assert torch.equal(run(scalelong.remove(ema), name), run(make(name), name))
    assert scaling_of(live) is not None


@EVERY
@torch.no_grad()
def test_a_pickled_network_comes_back_scaled(name):
    if name == "lucidrains Unet":
        with pytest.raises(pickle.PicklingError):  # its attention keeps an enum that pickle cannot find
            pickle.dumps(make(name))
        return
    net = scalelong.apply(make(name), LearnableScaling(), placement=placements(NETWORKS[name])[-1])
    again = pickle.loads(pickle.dumps(net))
    assert torch.equal(run(again, name), run(net, name))
    assert torch.equal(run(scalelong.remove(again), name), run(make(name), name))


@EVERY
@torch.no_grad()
def test_state_dict_carries_ls_into_another_network(name):
    net = scalelong.apply(make(name), LearnableScaling())
    torch.rand(())  # apply leaves the random state as it was: without a draw both would get the same weights
    other = scalelong.apply(make(name), LearnableScaling())
    assert not torch.equal(run(other, name), run(net, name))
    other.load_state_dict(net.state_dict(), strict=True)
    assert torch.equal(run(other, name), run(net, name))
    added = set(net.state_dict()) - set(make(name).state_dict())
    assert added
    assert all(key.startswith("skip_scaling.") for key in added)


@EVERY
def test_every_ls_parameter_has_a_gradient(name):
    for calibration in ("se", "ie", "scalar"):
        net = scalelong.apply(make(name), LearnableScaling(calibration=calibration, activation="elu"))
        run(net, name).square().mean().backward()
        parameters = list(scalelong.parameters(net))
        assert parameters
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters)


@EVERY
@torch.no_grad()
def test_skip_tensors_are_never_changed_in_place(name):
    def skips_after_a_run(net: nn.Module) -> list[Tensor]:
        with JoinWatch(net, network.middle, network.axis) as watch:
            run(net, name)
        return [watch.made[when] for when in made]

    network, net = NETWORKS[name], make(name)
    with JoinWatch(net, network.middle, network.axis) as watch:
        run(net, name)
    made = watch.joined  # which tensors of the encoder are the skips
    before = skips_after_a_run(net)
    for scaling in SCALINGS.values():
        after = skips_after_a_run(scalelong.apply(net, scaling, replace=True))
        assert [skip._version for skip in after] == [skip._version for skip in before]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_no_scaling_finds_the_skips_and_leaves_the_network_alone():
    net = make("UNet2DModel")
    before = footprint(net)
    scalelong.apply(net, NoScaling())
    assert footprint(net) == before
    with pytest.raises(UnsupportedNetworkError, match="Sequential"):
        scalelong.apply(nn.Sequential(nn.Conv2d(3, 3, 1)), NoScaling())


def test_short_names_and_dicts_are_scalings_too():
    net = scalelong.apply(make("UNet2DModel"), {"kind": "cs", "kappa": 0.7})
    assert scaling_of(net).spec == ConstantScaling(0.7)
    assert isinstance(scaling_of(scalelong.apply(net, "ls", replace=True)).spec, LearnableScaling)


def test_a_failed_apply_leaves_the_former_scaling_and_no_hook():
    net = scalelong.apply(make("UNet2DModel"), LearnableScaling())
    former, before, expected = scaling_of(net), footprint(net), run(net, "UNet2DModel")
    for failing in (
        lambda: scalelong.apply(net, ExplicitScaling([0.5]), replace=True),
        lambda: scalelong.apply(net, ConstantScaling(0.7), placement="nowhere", replace=True),
        lambda: scalelong.apply(net, ConstantScaling(0.7), sites=["nowhere"], replace=True),
        lambda: scalelong.apply(net, "rezero", replace=True),
    ):
        with pytest.raises(ScaleLongError):
            failing()
        assert scaling_of(net) is former
        assert footprint(net) == before
        assert torch.equal(run(net, "UNet2DModel"), expected)
    unscaled = make("UNet1DModel")
    before = footprint(unscaled)
    with pytest.raises(UnsupportedNetworkError, match="after_norm.*long skip 1"):
        scalelong.apply(unscaled, ConstantScaling(0.7), placement="after_norm")
    assert footprint(unscaled) == before


def test_unscaled_takes_the_scaling_off_and_puts_the_same_one_back():
    name = "UNet2DModel"
    net = scalelong.apply(make(name), LearnableScaling())
    expected, parameters = run(net, name), list(scalelong.parameters(net))
    with scalelong.unscaled(net) as bare:
        assert bare is net
        assert torch.equal(run(net, name), run(make(name), name))
        assert list(net.state_dict()) == list(make(name).state_dict())
    assert torch.equal(run(net, name), expected)
    assert all(a is b for a, b in zip(scalelong.parameters(net), parameters, strict=True))
    with scalelong.unscaled(make(name)) as bare:
        assert scaling_of(bare) is None
    uvit = scalelong.apply(make("scalelong.UViT"), LearnableScaling())  # keeps its scaling in its config
    with scalelong.unscaled(uvit):
        assert uvit.config.scaling == NoScaling().to_dict()
    assert uvit.config.scaling == LearnableScaling().to_dict()


def test_a_kappa_that_cuts_the_innermost_skip_warns():
    with pytest.warns(ScalingWarning, match=r"kappa = 0.1 with 4 long skips.*0.001.*0.22"):
        scalelong.apply(make("UNet2DModel"), ConstantScaling(0.1))


def test_ls_added_after_the_optimizer_is_reached_through_parameters():
    net = make("UNet2DModel")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scalelong.apply(net, LearnableScaling())
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    added = list(scalelong.parameters(net))
    assert added
    assert not known & {id(p) for p in added}
    optimizer.add_param_group({"params": added})
    before = [p.detach().clone() for p in added]
    run(net, "UNet2DModel").square().mean().backward()
    optimizer.step()
    assert any(not torch.equal(p, b) for p, b in zip(added, before, strict=True))
    assert list(scalelong.parameters(make("UNet2DModel"))) == []


def test_the_scaling_shares_precision_and_mode_of_the_network():
    net = make("UNet2DModel").to(torch.bfloat16)
    scalelong.apply(net, LearnableScaling())
    assert {p.dtype for p in scalelong.parameters(net)} == {torch.bfloat16}
    assert not scaling_of(net).training
    assert scaling_of(net.train()).training
    assert {p.dtype for p in scalelong.parameters(net.double())} == {torch.float64}


def test_a_network_with_an_attribute_of_that_name_is_rejected():
    net = make("UNet2DModel")
    net.skip_scaling = 3
    with pytest.raises(ScalingStateError, match="skip_scaling"):
        scalelong.apply(net, ConstantScaling(0.7))
    assert net.skip_scaling == 3
