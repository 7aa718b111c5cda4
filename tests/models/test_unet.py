"""diffusers' U-Nets at the paper's sizes, scaled by the common modules."""

import diffusers
import pytest
import torch

import scalelong
from scalelong import ConstantScaling, LearnableScaling, NoScaling, ScaleLongError, build_unet
from scalelong.errors import InvalidValueError
from scalelong.models.registry import Shapes, get_model
from scalelong.models.unet import UNETS, unet_settings
from scalelong.runs.config import Config, override
from scalelong.runs.run import build_network

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


# ---------------------------------------------------------------------------- any size, any number of levels


def configured(shapes, **model):
    settings = {f"model.{name}": value for name, value in {"kind": "unet", **model}.items()}
    return build_network(override(Config(), settings), shapes)


@pytest.mark.parametrize("condition", [{}, {"label_rows": 5}, {"text_tokens": 4, "text_width": 16}])
@pytest.mark.parametrize(
    ("size", "channels", "attention"),
    [(1, (4,), None), (7, (6,), (7,)), (8, (8, 16), None), (8, (16, 16, 32), ()),
     (12, (10, 15, 20), (3, 12)), (28, (8, 8, 8), (7,))],
)  # fmt: skip
def test_a_unet_of_any_size_and_number_of_levels_runs_and_has_all_its_skips(size, channels, attention, condition):
    net = configured(Shapes(1, size, **condition), channels=channels, layers=1, attention=attention)
    x, t = torch.randn(2, 1, size, size), torch.tensor([0.5, 999.0])
    y = torch.tensor([0, 4]) if "label_rows" in condition else None
    context = torch.randn(2, 4, 16) if "text_width" in condition else None
    assert get_model("unet").adapt(net)(x, t, y=y, context=context).shape == x.shape
    assert net.config.block_out_channels == channels
    # a level has `layers` skips and its downsampling one; the last has no downsampling, the input convolution one
    assert len(scalelong.describe(net).rows) == 2 * len(channels)


def test_without_channels_the_levels_fit_the_size():
    levels = {size: len(unet_settings(size)["block_out_channels"]) for size in (3, 7, 8, 12, 14, 16, 28, 32, 64, 96)}
    assert levels == {3: 1, 7: 1, 8: 2, 12: 2, 14: 2, 16: 3, 28: 3, 32: 4, 64: 4, 96: 4}


def test_attention_stands_at_the_sizes_asked_for():
    blocks = unet_settings(32, (8, 8, 8), attention=(32, 16))
    assert blocks["down_block_types"] == ("AttnDownBlock2D", "AttnDownBlock2D", "DownBlock2D")
    assert blocks["up_block_types"] == ("UpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D")
    with_none = build_unet(unet_settings(32, (8, 8, 8), attention=()))
    assert not any("attention" in name for name, _ in with_none.named_modules() if not name.endswith("attentions"))


@pytest.mark.parametrize(
    ("channels", "groups"), [((32, 64), 8), ((128, 256), 32), ((6, 9), 1), ((24, 48), 6), ((5,), 1)]
)
def test_small_widths_have_groups_of_several_channels(channels, groups):
    net = configured(Shapes(3, 8), channels=channels, layers=1)
    assert net.config.norm_num_groups == groups


@pytest.mark.parametrize(
    ("size", "model", "value"),
    [
        (12, {"channels": (8, 8, 8, 8)}, "12"),
        (28, {"unet": "cifar10"}, "28"),
        (8, {"channels": (8, 8), "attention": (5,)}, "5"),
        (8, {"channels": ()}, "channels"),
        (32, {"unet": "cifar10", "channels": (32, 64)}, "32, 64"),
        (8, {"depth": 3}, "model.depth"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(size, model, value):
    with pytest.raises(InvalidValueError, match=value):
        configured(Shapes(1, size), **model)
