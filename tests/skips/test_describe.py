"""`describe` says from a measurement what κ does: where the skips are, what κ_i is, and whether it is felt."""

import copy

import pytest
import torch
from skip_networks import NETWORKS, example, make, run
from test_every_network import footprint
from torch import nn

import scalelong
from scalelong import ConstantScaling, ExplicitScaling, LearnableScaling, NoScaling, Site
from scalelong.skips import scaling_of
from scalelong.theory.stacked import StackedUNet


def described(net, name):
    call = example(name)
    return scalelong.describe(net, *call.args, **call.kwargs)


@pytest.mark.parametrize("name", [name for name, network in NETWORKS.items() if network.feels])
def test_networks_without_a_cancelling_norm_feel_kappa(name):
    rows = described(make(name), name).rows
    assert [row.index for row in rows] == list(range(1, NETWORKS[name].skips + 1))
    assert all(row.felt > 0.1 for row in rows)
    assert all(row.norm_passes is None or row.norm_passes > 0.3 for row in rows)  # Hunyuan: LayerNorm over both sides
    assert not any(row.note for row in rows)


@pytest.mark.parametrize("name", [name for name, network in NETWORKS.items() if network.normed and not network.feels])
def test_group_norm_cancels_kappa_and_the_placement_behind_it_does_not(name):
    network = NETWORKS[name]
    before = described(make(name), name).rows
    assert min(row.norm_passes for row in before) < 0.01  # a skip whose groups are its own
    assert max(row.norm_passes for row in before) < 0.75  # no skip is spared: groups that mix both sides pass some
    net = scalelong.apply(make(name), ExplicitScaling([1.0] * network.skips), placement="after_norm")
    table = described(net, name)
    assert table.placement == "after_norm"
    for row, cancelled in zip(table.rows, before, strict=True):
        assert row.norm_passes == pytest.approx(1.0, rel=1e-3)  # all of the change is left
        assert row.felt > cancelled.felt
        assert not row.note


def test_a_norm_whose_groups_meet_the_join_is_reported_at_every_skip():
    """Groups of 4 channels, joins of 8 + 8: each group belongs to one side, and κ acts through the shortcut alone."""
    from diffusers import UNet2DModel

    net = UNet2DModel(
        block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    table = scalelong.describe(net, torch.randn(1, 3, 16, 16), 10)
    assert all(row.norm_passes < 0.01 for row in table.rows)
    assert all("cancels κ_i" in row.note and 'placement="after_norm"' in row.note for row in table.rows)
    assert "i = 1–4: the norm after the join cancels κ_i" in str(table)
    for block in net.up_blocks:
        for resnet in block.resnets:
            nn.init.zeros_(resnet.conv_shortcut.weight)
    assert all(row.felt < 0.01 for row in scalelong.describe(net, torch.randn(1, 3, 16, 16), 10).rows)


def test_felt_is_the_closed_form_where_there_is_one():
    """A consumer that is one matrix, W(κs + x): felt is ‖Wκs‖ / ‖W(κs + x)‖."""
    kappas = (0.9, 0.5, 0.25)
    net = StackedUNet(width=16, num_skips=3, block_depth=1, scaling=ExplicitScaling(kappas), seed=4)
    x = torch.randn(8, 16)
    features = net.features(x)
    for row, kappa, decoder in zip(scalelong.describe(net, x).rows, kappas, net.decoders, strict=True):
        W = decoder.matrices[0].weight
        skip = kappa * features.skips[row.index - 1]
        expected = (skip @ W.T).norm() / ((skip + features.hidden[row.index]) @ W.T).norm()
        assert row.felt == pytest.approx(expected.item(), rel=1e-3)
        assert row.coefficient == kappa


@pytest.mark.parametrize("name", ["UNet2DModel", "lucidrains Unet", "original U-ViT"])
@torch.no_grad()
def test_felt_is_what_a_changed_kappa_does_to_the_consumer(name):
    def consumer_output(kappas):
        net, seen = make(name), []
        net.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output))
        run(scalelong.apply(net, ExplicitScaling(kappas)), name)
        return seen[0].double()

    n = NETWORKS[name].skips
    net = scalelong.apply(make(name), ExplicitScaling([0.6] * n))
    for row in described(net, name).rows:
        path = row.path
        kappas = [0.6 * (1.01 if i == row.index else 1.0) for i in range(1, n + 1)]
        before, after = consumer_output([0.6] * n), consumer_output(kappas)
        assert row.felt == pytest.approx(((after - before).norm() / before.norm() / 0.01).item(), rel=1e-2)


@torch.no_grad()
def test_ls_shows_mean_and_range_of_kappa_on_the_example():
    name = "original U-ViT"
    net = scalelong.apply(make(name), LearnableScaling())
    seen = {}
    handle = scaling_of(net).register_forward_hook(lambda module, args, kappa: seen.update({args[1]: kappa}))
    run(net, name)
    handle.remove()
    for row in described(net, name).rows:
        assert row.coefficient == pytest.approx(seen[row.index].mean().item())
        assert row.coefficient_range == pytest.approx((seen[row.index].min().item(), seen[row.index].max().item()))
        assert row.shape == (2, 17, 16)
    assert all(row.coefficient is None for row in scalelong.describe(net).rows)
    assert "learned" in str(scalelong.describe(net))


def test_a_learned_scalar_is_shown_without_an_example():
    net = scalelong.apply(make("StackedUNet"), LearnableScaling(calibration="scalar"))
    with torch.no_grad():
        scaling_of(net).kappa.copy_(torch.tensor([1.0, 0.5, 0.25]))
    assert [row.coefficient for row in scalelong.describe(net).rows] == [1.0, 0.5, 0.25]


def test_rows_are_outermost_first_and_the_table_prints():
    net = scalelong.apply(make("UNet2DModel"), ConstantScaling(0.5))
    table = scalelong.describe(net)
    assert [row.coefficient for row in table.rows] == [1.0, 0.5, 0.25, 0.125]
    assert [row.source for row in table.rows] == [
        "conv_in", "down_blocks.0.resnets.0", "down_blocks.0.downsamplers.0", "down_blocks.1.attentions.0",
    ]  # fmt: skip
    assert [row.path for row in table.rows] == [f"up_blocks.{b}.resnets.{r}" for b in (1, 0) for r in (1, 0)]
    assert all(row.felt is None and row.shape is None for row in table.rows)
    lines = str(table).splitlines()
    assert lines[0] == "UNet2DModel: 4 long skips, ConstantScaling(kappa=0.5, reverse=False)"
    assert lines[1].split() == ["i", "from", "to", "κ_i"]
    assert lines[-1].split() == ["4", "down_blocks.1.attentions.0", "up_blocks.0.resnets.0", "0.125"]
    assert repr(table) == str(table)
    measured = str(described(net, "UNet2DModel")).splitlines()
    assert measured[1].split() == ["i", "from", "to", "κ_i", "shape", "felt", "past", "norm"]
    assert "2×8×8×8" in measured[3]


def test_an_unscaled_network_is_described_too():
    table = described(make("UNet2DModel"), "UNet2DModel")
    assert table.scaling == NoScaling()
    assert [row.coefficient for row in table.rows] == [1.0] * 4
    assert all(row.felt > 0 for row in table.rows)


@pytest.mark.parametrize("scaling", [NoScaling(), LearnableScaling()], ids=["unscaled", "LS"])
def test_describe_leaves_nothing_behind(scaling):
    name = "UNet2DModel"
    net = scalelong.apply(make(name), scaling).train()
    net.up_blocks[0].eval()
    modes = [module.training for module in net.modules()]
    before, expected = footprint(net), run(net, name)
    described(net, name)
    with pytest.raises(TypeError):
        scalelong.describe(net, torch.randn(1, 3, 8, 8))  # no timestep
    assert footprint(net) == before
    assert [module.training for module in net.modules()] == modes
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(run(net, name), expected)


def test_half_precision_is_measured_with_a_larger_step():
    net = scalelong.apply(make("UNet2DModel"), ConstantScaling(0.9)).bfloat16()
    x, t = example("UNet2DModel").args
    exact = described(scalelong.apply(make("UNet2DModel"), ConstantScaling(0.9)), "UNet2DModel").rows
    for row, reference in zip(scalelong.describe(net, x.bfloat16(), t).rows, exact, strict=True):
        assert row.felt == pytest.approx(reference.felt, rel=0.2)


class Bypassed(nn.Module):
    """Its second consumer is only called when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Bilinear(4, 4, 4), nn.Bilinear(4, 4, 4)

    def forward(self, x, both=False):
        y = self.near(x, 2 * x)
        return self.far(y, x) if both else y


def test_a_skip_that_the_example_does_not_use_is_reported():
    net = scalelong.apply(Bypassed(), ConstantScaling(0.5), sites=[Site("near"), Site("far")])
    met, missed = scalelong.describe(net, torch.randn(2, 4)).rows
    assert met.felt == pytest.approx(1.0, rel=0.2)
    assert missed.felt is None
    assert missed.note == "the example did not use this skip"
    assert "not called" in str(scalelong.describe(net, torch.randn(2, 4)))
    assert all(row.felt is not None for row in scalelong.describe(net, torch.randn(2, 4), both=True).rows)


def test_the_block_baselines_describe_the_skips_as_they_are():
    table = described(scalelong.apply(make("scalelong.UViT"), "stable"), "scalelong.UViT")
    assert [row.coefficient for row in table.rows] == [1.0, 1.0, 1.0]
    assert table.scaling.kind == "stable"


@pytest.mark.parametrize(
    "scaling", ["none", ConstantScaling(0.7), LearnableScaling(), LearnableScaling("scalar")], ids=str
)
@pytest.mark.parametrize("name", ["UNet2DModel", "scalelong.UViT"])
def test_a_network_on_the_meta_device_is_described_by_its_shapes(name, scaling):
    net = scalelong.apply(make(name), scaling).to("meta")
    call = example(name)
    without = scalelong.describe(net)
    measured = scalelong.describe(net, *(a.to("meta") for a in call.args), **call.kwargs)
    real = scalelong.describe(scalelong.apply(make(name), scaling), *call.args, **call.kwargs)
    assert [row.path for row in without.rows] == [row.path for row in real.rows]
    assert [row.shape for row in measured.rows] == [row.shape for row in real.rows]
    assert "×" in str(measured)


def test_a_dead_calibration_network_is_reported_and_a_new_one_is_not():
    name = "scalelong.UViT"
    call = example(name)
    for spec in (LearnableScaling(), LearnableScaling(init="identity"), LearnableScaling("ie")):
        alive = scalelong.describe(scalelong.apply(make(name), spec), *call.args, **call.kwargs)
        assert not any("does not depend" in row.note for row in alive.rows)
    net = scalelong.apply(make(name), LearnableScaling(activation="relu"))
    torch.nn.init.constant_(net.skip_scaling.networks.zeta.layer1.bias, -100.0)  # no ReLU is active any more
    dead = scalelong.describe(net, *call.args, **call.kwargs)
    assert all("does not depend on the input" in row.note for row in dead.rows)
    assert all(p.grad is None for p in net.parameters())


class BatchNormed(nn.Module):
    """One level whose concatenation goes to a BatchNorm."""

    def __init__(self):
        super().__init__()
        self.stem, self.low = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 1, 1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        skip = self.stem(x)
        return self.head(self.norm(torch.cat([self.low(skip.relu()), skip], dim=1)))


def test_batch_norm_cancels_kappa_in_training_only():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 8, 8)
    net = scalelong.apply(BatchNormed(), scalelong.UniformScaling(0.5), example=(x,))
    before = copy.deepcopy(net.state_dict())
    (training,) = scalelong.describe(net, x).rows
    (evaluation,) = scalelong.describe(net.eval(), x).rows
    assert training.norm_passes < 0.01 < 0.5 < evaluation.norm_passes
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
