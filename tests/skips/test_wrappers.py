"""Modules that hold a scaled network: every function finds it, or says which one to pass."""

import copy

import pytest
import torch
from homemade import OriginalUViT
from torch import nn

import scalelong
from scalelong import ConstantScaling, LearnableScaling, Site
from scalelong.errors import ScalingStateError, ScalingWarning, UnsupportedNetworkError
from scalelong.skips import scaling_of


class Diffusion(nn.Module):
    """What lucidrains' GaussianDiffusion or a LightningModule does: holds the network, calls it in its own forward."""

    def __init__(self, net: nn.Module, ema: bool = False) -> None:
        super().__init__()
        self.model = net
        self.ema = copy.deepcopy(net) if ema else None

    def forward(self, x):
        return self.model(x, torch.full((len(x),), 10.0))


def held(scaling=None, **options) -> Diffusion:
    torch.manual_seed(0)
    net = OriginalUViT()
    return Diffusion(net if scaling is None else scalelong.apply(net, scaling), **options)


def test_every_function_finds_the_scaled_network_in_a_wrapper(tmp_path):
    outer, x = held(LearnableScaling()), torch.randn(2, 3, 8, 8)
    net = outer.model
    scaled = outer(x)
    assert list(map(id, scalelong.parameters(outer))) == list(map(id, scalelong.parameters(net)))
    assert [row.path for row in scalelong.describe(outer).rows] == [row.path for row in scalelong.describe(net).rows]
    assert all(row.felt > 0 for row in scalelong.describe(outer, x).rows)  # calls the wrapper with its own arguments
    with scalelong.unscaled(outer):
        assert scaling_of(net) is None
        plain = outer(x)
    assert scaling_of(net) is not None
    assert not torch.equal(plain, scaled)
    scalelong.save_scaling(outer, tmp_path)
    again = held()
    again.load_state_dict(outer.state_dict(), strict=False)
    assert scalelong.load_scaling(again, tmp_path) is again
    assert torch.equal(again(x), scaled)
    assert scalelong.StabilityMonitor(outer).points.n == 3
    assert scalelong.remove(outer) is outer
    assert torch.equal(outer(x), plain)


def test_wrapped_and_compiled_networks_inside_a_wrapper_are_found_or_refused():
    outer = Diffusion(torch.compile(scalelong.apply(OriginalUViT(), LearnableScaling()), backend="eager"))
    assert len(list(scalelong.parameters(outer))) == 4
    with pytest.raises(ScalingStateError, match="torch.compile"):
        scalelong.remove(outer)


@pytest.mark.parametrize(
    "call",
    [scalelong.parameters, scalelong.remove, scalelong.describe, scalelong.StabilityMonitor,
     lambda net: scalelong.unscaled(net).__enter__(), lambda net: scalelong.save_scaling(net, "unused")],
    ids=["parameters", "remove", "describe", "monitor", "unscaled", "save_scaling"],
)  # fmt: skip
def test_two_scaled_networks_are_an_error_that_names_both(call):
    with pytest.raises(ScalingStateError, match=r"net\.model, net\.ema"):
        call(held(ConstantScaling(0.7), ema=True))


def test_loading_into_a_wrapper_of_two_networks_asks_which_one(tmp_path):
    scalelong.save_scaling(scalelong.apply(OriginalUViT(), ConstantScaling(0.7)), tmp_path)
    with pytest.raises(ScalingStateError, match=r"net\.model, net\.ema"):
        scalelong.load_scaling(held(ema=True), tmp_path)


def test_an_unscaled_network_has_nothing_to_save(tmp_path):
    for net in (held(), held().model):
        with pytest.raises(ScalingStateError, match="not scaled"):
            scalelong.save_scaling(net, tmp_path)
        assert not list(scalelong.parameters(net))
    assert not list(tmp_path.iterdir())


class Shortcut(nn.Module):
    """A decoder whose second block is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(2))

    def forward(self, x):
        return self.blocks[0](x, x)


def test_a_site_that_training_never_reaches_is_warned_about_once():
    net = scalelong.apply(Shortcut(), LearnableScaling(), sites=[Site(f"blocks.{k}", 1, channels=4) for k in (0, 1)])
    x = torch.randn(2, 4)
    net.eval()(x)
    with torch.no_grad():
        net.train()(x)
    with pytest.warns(ScalingWarning, match=r"long skip 2 \(blocks\.1\)"):
        net(x)
    net(x)  # warnings are errors: a second one would fail
    everywhere = scalelong.apply(Shortcut(), ConstantScaling(0.7), sites=["blocks.0"])
    everywhere(x)


@pytest.mark.parametrize("container", ["blocks", "table", "weights"])
def test_a_container_is_not_a_site(container):
    net = Shortcut()
    net.table, net.weights = nn.ModuleDict({"a": nn.Linear(1, 1)}), nn.ParameterList([nn.Parameter(torch.ones(1))])
    with pytest.raises(UnsupportedNetworkError, match="never called"):
        scalelong.apply(net, ConstantScaling(0.7), sites=[Site(container, 0)])
