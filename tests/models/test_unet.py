"""diffusers' U-Nets at the paper's sizes, scaled by the common modules."""

import diffusers
import pytest
import torch

import scalelong
from scalelong import ConstantScaling, LearnableScaling, NoScaling, ScaleLongError, build_unet
from scalelong.models.unet import UNETS

SMALL = {"block_out_channels": (32, 32, 64, 64), "attention_head_dim": 8}


@pytest.mark.parametrize(
    ("name", "parameters", "tolerance", "skips"),
    [("cifar10", 35.7e6, 0.02, 12), ("imagenet64", 144e6, 0.03, 16), ("coco", 53e6, 0.03, 9)],
)
def test_sizes_are_the_papers(name, parameters, tolerance, skips):
    with torch.device("meta"):
        net = build_unet(name)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(parameters, rel=tolerance)
    assert len(scalelong.describe(net).rows) == skips


def test_no_scaling_is_diffusers_own_network_bit_for_bit():
    config = {**UNETS["cifar10"], **SMALL}
    torch.manual_seed(0)
    theirs = getattr(diffusers, config.pop("class"))(**config)
    torch.manual_seed(0)
    ours = build_unet("cifar10", scaling=NoScaling(), **SMALL)
    assert type(ours) is type(theirs)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    x, t = torch.randn(2, 3, 32, 32), torch.tensor([1, 900])
    assert torch.equal(ours(x, t).sample, theirs(x, t).sample)


def test_every_skip_is_scaled_and_ls_shares_one_network():
    net = build_unet("cifar10", scaling=ConstantScaling(0.9), **SMALL)
    assert [row.coefficient for row in scalelong.describe(net).rows] == pytest.approx([0.9**k for k in range(12)])
    net = build_unet("cifar10", scaling=LearnableScaling(), **SMALL)
    assert net.skip_scaling.networks.zeta.layer1.in_features == 32
    assert set(net.skip_scaling.networks.encoders) == {"32", "64"}


def test_class_and_text_networks_run():
    small = {"block_out_channels": (32, 32), "layers_per_block": 1, "sample_size": 8, "attention_head_dim": 8}
    net = build_unet("imagenet64", scaling=ConstantScaling(0.7), **small, num_class_embeds=5,
                     down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                     up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip
    assert net(torch.randn(2, 3, 8, 8), 5, class_labels=torch.tensor([0, 4])).sample.shape == (2, 3, 8, 8)
    net = build_unet("coco", scaling=LearnableScaling(), **small, cross_attention_dim=16,
                     down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                     up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))  # fmt: skip
    out = net(torch.randn(2, 4, 8, 8), 5, encoder_hidden_states=torch.randn(2, 7, 16)).sample
    assert out.shape == (2, 4, 8, 8)


def test_a_misspelt_name_suggests_the_right_one():
    with pytest.raises(ScaleLongError, match="did you mean 'cifar10'"):
        build_unet("cifar-10")
