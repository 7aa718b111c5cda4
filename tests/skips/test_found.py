"""Long skips found by running a network once: exact, complete, explained, and refused where they are not clear."""

import copy

import pytest
import torch
from gallery import GALLERY
from skip_networks import NETWORKS, VARIANTS, example, make, run
from torch import nn

import scalelong
from scalelong import ExplicitScaling, LearnableScaling
from scalelong.skips import find_sites

EVERY = pytest.mark.parametrize("name", GALLERY)


def build(name):
    torch.manual_seed(0)
    net = GALLERY[name]()
    return net, net.example(), tuple(0.3 + 0.4 * i for i in range(net.n))


def by_hand(net, x, kappas):
    net.kappas = kappas
    output = net(*x)
    net.kappas = None
    return output


@EVERY
def test_kappa_acts_as_if_it_were_written_into_the_network(name):
    net, x, kappas = build(name)
    plain, expected = net(*x), by_hand(net, x, kappas)
    assert not torch.allclose(plain, expected, atol=1e-3)
    assert scalelong.apply(net, ExplicitScaling(kappas), example=x) is net
    assert torch.equal(net(*x), expected)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net.train()(*x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters() if p.grad is not None], gradients)
    assert torch.equal(scalelong.remove(net)(*x), plain)


@EVERY
def test_batch_and_resolution_may_change(name):
    net, x, kappas = build(name)
    scalelong.apply(net, ExplicitScaling(kappas), example=x)
    one = tuple(tensor[:1] for tensor in x)
    if name not in ("Channels", "Padded", "Tokens", "AddedTokens"):
        one = (torch.cat([one[0]] * 2, dim=-1), *one[1:])
    with scalelong.unscaled(net):
        expected = by_hand(net, one, kappas)
    assert torch.equal(net(*one), expected)


@EVERY
def test_ls_needs_no_channels_and_survives_copies_and_files(name, tmp_path):
    net, x, _ = build(name)
    scalelong.apply(net, LearnableScaling(activation="elu"), example=x)
    expected = net(*x)
    expected.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in scalelong.parameters(net))
    scalelong.save_scaling(net, tmp_path)
    again, _, _ = build(name)
    assert torch.equal(scalelong.load_scaling(again, tmp_path)(*x), expected)
    if "__deepcopy__" not in vars(type(net)) and name not in ("Popped", "Tuples", "Dicts", "CallsForward", "Attribute"):
        assert torch.equal(copy.deepcopy(net)(*x), expected)


@pytest.mark.parametrize("name", NETWORKS | VARIANTS)
@torch.no_grad()
def test_the_finder_and_the_known_structures_agree(name):
    """N, order, sources, widths, axes; and the same output when the skips that were found are scaled."""
    call, net = example(name), make(name)
    found, known = scalelong.find_skips(net, *call.args, **call.kwargs), find_sites(net)
    assert [(s.channels, s.dim, s.source, s.norm) for s in found] == [
        (s.channels, s.dim, s.source, s.norm) for s in known
    ]
    if getattr(net, "long_skips", None) is None:
        kappas = ExplicitScaling([0.3 + 0.13 * i for i in range(len(known))])
        expected = run(scalelong.apply(make(name), kappas), name)
        assert torch.equal(run(scalelong.apply(net, kappas, sites=found), name), expected)


def footprint(net: nn.Module) -> tuple[object, ...]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    return hooks, {key: value.clone() for key, value in net.state_dict().items()}, [m.training for m in net.modules()]


def test_finding_runs_the_network_once_and_leaves_nothing_behind():
    passes = []

    class Counted(GALLERY["Residual"]):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm2d(3), nn.Dropout(0.5)

        def forward(self, x, t):
            passes.append(torch.is_grad_enabled())
            return self.drop(self.norm(super().forward(x, t)))

    net = Counted().train()
    before, state = footprint(net), torch.get_rng_state()
    scalelong.apply(net, scalelong.ConstantScaling(0.9), example=EXAMPLE)
    assert passes == [False]
    assert torch.equal(torch.get_rng_state(), state)
    after = footprint(scalelong.remove(net))
    assert after[0] == before[0]
    assert after[2] == before[2]
    assert all(torch.equal(after[1][key], before[1][key]) for key in before[1])


EXAMPLE = (torch.randn(2, 3, 8, 8), torch.rand(2, 1))
