"""`ConstantScaling("auto")` chooses κ from an example, within the data's range, and stores the number."""

import pytest
import torch
from diffusers import UNet2DModel
from torch import nn

import scalelong
from scalelong import ConstantScaling, ExplicitScaling, UViT
from scalelong.errors import InvalidValueError
from scalelong.scaling.sums import choose_kappa
from scalelong.skips import find_sites
from scalelong.skips.auto import FELT, auto_kappa

T = torch.tensor([10.0, 300.0, 600.0, 900.0])


def small():
    torch.manual_seed(0)
    return UViT(img_size=8, in_chans=1, embed_dim=32, depth=8, num_heads=2, init_std=0.08)


def noisy():
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_auto_becomes_a_number_that_is_saved_with_the_network(tmp_path):
    net = scalelong.apply(small(), ConstantScaling("auto"), example=(noisy(), T))
    kappa = net.config["scaling"]["kappa"]
    assert isinstance(kappa, float)
    rows = scalelong.describe(net).rows
    assert [row.coefficient for row in rows] == pytest.approx([kappa**k for k in range(4)])
    net.save_pretrained(tmp_path)
    assert UViT.from_pretrained(tmp_path).config["scaling"]["kappa"] == kappa


def test_the_choice_lies_in_the_range_of_the_data_and_moves_the_features():
    net = small()
    found = auto_kappa(net, find_sites(net), "join", lambda: net(noisy(), T), mean_ratio=1.2)
    low, high, _, _ = choose_kappa(1.2, 4)
    assert low <= found.low <= found.kappa <= found.high <= high
    assert found.moved >= FELT * 0.99
    assert all(ratio > 0 for ratio in found.ratios)
    assert scalelong.skips.scaling_of(net) is None


def test_path_gains_are_the_derivative_of_the_outermost_features():
    net, outputs = small(), []
    found = auto_kappa(net, find_sites(net), "join", lambda: net(noisy(), T), mean_ratio=1.2)
    net.eval().out_blocks[-1].register_forward_hook(lambda *call: outputs.append(call[-1].detach().double()))
    for kappas in ([1.0] * 4, *([1.0 + 0.01 * (k == i) for k in range(4)] for i in range(4))):
        scalelong.apply(net, ExplicitScaling(kappas), replace=True)
        net(noisy(), T)
    plain, *nudged = outputs
    gains = [float((one - plain).norm() / plain.norm() / 0.01) for one in nudged]
    assert found.gains == pytest.approx(gains, rel=1e-3)


class Unknown(nn.Module):
    """A network that only an example shows."""

    def __init__(self):
        super().__init__()
        self.first, self.down, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 2, 2), nn.Conv2d(8, 8, 1)
        self.inner, self.up, self.last = nn.Conv2d(16, 4, 1), nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x, t):
        outer = self.first(x)
        inner = self.down(outer).relu()
        h = self.inner(torch.cat([self.middle(inner), inner], dim=1))
        return self.last(torch.cat([self.up(h), outer], dim=1))


def unet():
    return UNet2DModel(sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8, 16), layers_per_block=1,
                       norm_num_groups=4, down_block_types=("DownBlock2D",) * 2,
                       up_block_types=("UpBlock2D",) * 2)  # fmt: skip


@pytest.mark.parametrize("build", [unet, Unknown])
def test_other_networks_are_measured_too(build):
    torch.manual_seed(0)
    net = scalelong.apply(build(), "auto", example=(noisy(), T))
    assert 0 < scalelong.describe(net).rows[1].coefficient < 1


@pytest.mark.parametrize("call", [
    lambda: UViT(img_size=8, embed_dim=32, depth=4, num_heads=2, scaling="auto"),
    lambda: scalelong.apply(small(), "auto"),
    lambda: scalelong.apply(small(), "auto", example=(torch.zeros(4, 1, 8, 8), T)),
    lambda: ConstantScaling("auto").coefficients(4),
    lambda: ConstantScaling("auto", reverse=True),
    lambda: ConstantScaling("fast"),
    lambda: scalelong.compose(ConstantScaling("auto"), scalelong.FreeU()),
])  # fmt: skip
def test_what_auto_cannot_do_says_so(call):
    with pytest.raises(InvalidValueError, match="auto"):
        call()


@pytest.mark.parametrize("word", ["cs:0.7", "cs-reverse:0.7", "cs-innermost:0.1", "cs:auto", "explicit:1,0.5", "ls",
                                  "none", "norm:rms", "skip-tuning:0.9", "sparse:3"])  # fmt: skip
def test_the_short_form_of_a_scaling_reads_back(word):
    spec = scalelong.parse_scaling(word)
    assert scalelong.parse_scaling(spec.word) == spec


def test_auto_is_a_name_of_its_own():
    assert scalelong.parse_scaling("auto") == ConstantScaling("auto")
    assert ConstantScaling("auto").label == "cs-auto"
