"""Networks that call `scale_skip` in `forward` and declare `long_skips` need no adapter and no hooks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from skip_networks import make
from torch import Tensor, nn

import scalelong
from scalelong import ConstantScaling, ExplicitScaling, LearnableScaling, SkipShape, StabilityMonitor, scale_skip
from scalelong.errors import InvalidValueError, UnsupportedNetworkError
from scalelong.skips import scaling_of
from scalelong.skips.hooks import FirstPassHook

WIDTHS = (4, 8, 16)


class OwnUNet(nn.Module):
    """Three long skips of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.long_skips = WIDTHS
        pairs = list(zip(WIDTHS, (*WIDTHS[1:], 16), strict=True))
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairs)
        self.up = nn.ModuleList(nn.Conv2d(b + a, a, 3, padding=1) for a, b in pairs)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for down in self.down:
            skips.append(x)
            x = F.silu(down(x))
        for i in range(len(skips), 0, -1):
            skip = scale_skip(self, skips.pop(), i)
            x = F.silu(self.up[i - 1](torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], dim=1)))
        return self.head(x)


def by_hand(net: OwnUNet, x: Tensor, kappas: tuple[float, ...]) -> Tensor:
    x, skips = net.stem(x), []
    for down in net.down:
        skips.append(x)
        x = F.silu(down(x))
    for i in (3, 2, 1):
        x = F.interpolate(x, size=skips[i - 1].shape[-2:])
        x = F.silu(net.up[i - 1](torch.cat([x, kappas[i - 1] * skips[i - 1]], dim=1)))
    return net.head(x)


@pytest.fixture
def x():
    return torch.randn(2, 3, 16, 16)


def hooks(net: nn.Module) -> int:
    """Count the hooks that could act on a skip; the scaling module and `FirstPassHook` only record what was reached."""
    modules = [module for path, module in net.named_modules() if path != "skip_scaling"]
    found = [hook for m in modules for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return sum(not isinstance(hook, FirstPassHook) for hook in found)


def test_kappa_acts_in_forward_without_hooks_and_remove_restores_the_output(x):
    net = OwnUNet()
    plain = net(x)
    scalelong.apply(net, ExplicitScaling([0.3, 1.7, 0.5]))
    torch.testing.assert_close(net(x), by_hand(net, x, (0.3, 1.7, 0.5)))
    assert hooks(net) == 0
    assert torch.equal(scalelong.remove(net)(x), plain)


@pytest.mark.parametrize("name", ["scalelong.UViT", "StackedUNet"])
def test_our_own_networks_have_no_hooks(name):
    net = scalelong.apply(make(name), LearnableScaling())
    assert hooks(net) == 0
    assert scaling_of(net) is not None


def test_describe_measures_every_skip(x):
    net = scalelong.apply(OwnUNet(), LearnableScaling())
    rows = scalelong.describe(net, x).rows
    assert [row.index for row in rows] == [1, 2, 3]
    assert [row.shape[1] for row in rows] == list(WIDTHS)
    assert all(row.felt > 0 and 0 < row.coefficient < 1 for row in rows)
    assert hooks(net) == 0


def test_ls_trains_saves_and_loads_and_copies_have_their_own_weights(x, tmp_path):
    net = scalelong.apply(OwnUNet(), LearnableScaling())
    net(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in scalelong.parameters(net) if p.ndim > 1)
    twin, expected = copy.deepcopy(net), net(x)
    scalelong.save_scaling(net, tmp_path)
    with torch.no_grad():
        for parameter in scalelong.parameters(net):
            parameter.add_(1.0)
    assert torch.equal(twin(x), expected)
    assert not torch.equal(net(x), expected)
    assert torch.equal(scalelong.load_scaling(net, tmp_path)(x), expected)
    other = scalelong.apply(OwnUNet(), LearnableScaling())
    other.load_state_dict(twin.state_dict())
    assert torch.equal(other(x), expected)


def test_loading_into_other_widths_is_rejected(tmp_path):
    class Wider(OwnUNet):
        def __init__(self) -> None:
            super().__init__()
            self.long_skips = (4, 8, 32)

    scalelong.save_scaling(scalelong.apply(OwnUNet(), LearnableScaling()), tmp_path)
    with pytest.raises(UnsupportedNetworkError, match="skip 3.*16 channels there.*32 channels here"):
        scalelong.load_scaling(Wider(), tmp_path)


@pytest.mark.parametrize("scaling", [ConstantScaling(0.7), LearnableScaling()], ids=["CS", "LS"])
def test_a_compiled_network_is_one_graph(scaling, x):
    net = scalelong.apply(OwnUNet(), scaling)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))


def test_the_monitor_records_skips_and_kappa(x):
    net = scalelong.apply(OwnUNet(), LearnableScaling())
    monitor = StabilityMonitor(net, every=1, probe=(x,))
    with monitor.step(1):
        net(x).square().mean().backward()
    norm = net.stem(x).square().sum((1, 2, 3)).mean().sqrt().item()  # skip 1, before κ_1
    assert monitor.last["train"]["skip"][0] == pytest.approx(norm, rel=1e-3)
    assert None not in monitor.last["train"]["skip"]
    assert all(0 < kappa < 1 for kappa in monitor.last["kappa"]["mean"])
    assert hooks(net) == 0


def test_tokens_and_attributes_may_be_declared(x):
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 4)

        @property
        def long_skips(self) -> tuple[SkipShape, ...]:
            return (SkipShape(4, dim=-1, tokens=5),)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(torch.cat([x, scale_skip(self, x, 1)], dim=-1))

    net = scalelong.apply(Tokens(), LearnableScaling())
    assert net(torch.randn(2, 5, 4)).shape == (2, 5, 4)
    assert net.skip_scaling.gates == ("tokens",)


def test_an_index_or_width_that_was_not_declared_is_rejected():
    net, skip = OwnUNet(), torch.randn(1, 8, 4, 4)
    for i in (0, 4, -1):
        with pytest.raises(InvalidValueError, match=f"i .*3.*{i}"):
            scale_skip(net, skip, i)
    with pytest.raises(UnsupportedNetworkError, match="long skip 3 has 8 channels.*16"):
        scale_skip(net, skip, 3)
    assert scale_skip(nn.Linear(2, 2), skip, 1) is skip  # not declared and not scaled


@pytest.mark.parametrize("declared", [(), (4, "8"), (4, True), (4, 0)])
def test_invalid_declarations_are_rejected(declared):
    net = OwnUNet()
    net.long_skips = declared
    with pytest.raises(InvalidValueError):
        scalelong.apply(net, ConstantScaling(0.7))


def test_sites_and_after_norm_do_not_apply_to_declared_skips():
    with pytest.raises(UnsupportedNetworkError, match="long_skips"):
        scalelong.apply(OwnUNet(), ConstantScaling(0.7), sites=["up.0"])
    with pytest.raises(UnsupportedNetworkError, match="after_norm"):
        scalelong.apply(OwnUNet(), ConstantScaling(0.7), placement="after_norm")
