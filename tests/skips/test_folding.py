"""Fold κ into the weights: the same output, no trace of the package, or a refusal that changes nothing."""

import subprocess
import sys

import pytest
import torch
from diffusers import UNet2DModel
from skip_networks import NETWORKS, example, make, run
from torch import nn

import scalelong
from scalelong import ConstantScaling, LearnableScaling, ReZeroScaling, Site, UniformScaling
from scalelong.errors import ScalingStateError, ScalingWarning, UnsupportedNetworkError
from scalelong.skips import scaling_of
from scalelong.skips.folding import TOLERANCE

EXACT = {  # network: whether it needs an example
    "UNet2DModel": False, "UNetMotionModel": False, "HunyuanDiT2DModel": False, "scalelong.UViT": False,
    "original U-ViT": False, "guided-diffusion": False, "MONAI DiffusionModelUNet": False, "UNet1DModel": True,
    "lucidrains Unet": True, "MONAI BasicUNet 2D": True,
}  # fmt: skip


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


def state(net):
    return {key: value.clone() for key, value in net.state_dict().items()}


def scaled(name, kappa=0.7):
    return scalelong.apply(
        make(name), UniformScaling(kappa), placement="after_norm" if NETWORKS[name].normed else "join"
    )


@pytest.mark.parametrize("name", EXACT)
@torch.no_grad()
def test_a_folded_network_equals_the_scaled_one(name):
    net = scaled(name)
    keys, expected, call = set(make(name).state_dict()), run(net, name), example(name)
    if EXACT[name]:
        before = state(net)
        with pytest.raises(UnsupportedNetworkError, match=r"fold\(net, \*example\)"):
            scalelong.fold(net)
        assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
        assert torch.equal(run(net, name), expected)
        assert scalelong.fold(net, *call.args, **call.kwargs) is net
    else:
        assert scalelong.fold(net) is net
    assert scaling_of(net) is None
    assert set(net.state_dict()) == keys
    plain = make(name)
    plain.load_state_dict(net.state_dict())
    assert relative(run(plain, name), expected) < 1e-5
    assert relative(run(make(name), name), expected) > 1e-3  # κ had an effect


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@torch.no_grad()
def test_half_and_double_precision_fold_to_their_own_tolerance(dtype):
    torch.manual_seed(0)
    net = scalelong.UViT(img_size=8, patch_size=2, embed_dim=32, depth=4, num_heads=2).to(dtype)
    scalelong.apply(net, ConstantScaling(0.7))
    x, t = torch.randn(2, 3, 8, 8, dtype=dtype), torch.tensor([1.0, 500.0])
    expected = net(x, t)
    scalelong.fold(net, x, t)
    assert relative(net(x, t), expected) <= TOLERANCE[dtype]


class Convolutional(nn.Module):
    """[skip, x] into a grouped convolution, and x + skip: only the first can be folded."""

    def __init__(self, groups: int = 1, add: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.long_skips = (4, 4)
        self.stem, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.join = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1, groups=groups) for _ in range(2))
        if shared:
            self.join[1] = self.join[0]
        self.add = add

    def forward(self, x):
        a = self.stem(x)
        b = self.down(a.relu())
        h, a, b = b.relu(), scalelong.scale_skip(self, a, 1), scalelong.scale_skip(self, b, 2)
        h = self.join[1](torch.cat([b, h], dim=1))
        h = self.join[0](torch.cat([a, h.relu()], dim=1))
        return h + b if self.add else h


@pytest.mark.parametrize("groups", [1, 2, 4])
@torch.no_grad()
def test_convolutions_with_the_skip_in_front_and_with_groups_fold(groups):
    torch.manual_seed(0)
    net, x = scalelong.apply(Convolutional(groups), UniformScaling(0.3)), torch.randn(2, 3, 8, 8)
    expected = net(x)
    assert relative(scalelong.fold(net, x)(x), expected) < 1e-5


@pytest.mark.parametrize(
    ("options", "match"), [({"add": True}, "used elsewhere"), ({"shared": True}, "consumes several skips|shares")]
)
@torch.no_grad()
def test_other_uses_of_a_skip_are_refused_and_change_nothing(options, match):
    torch.manual_seed(0)
    net, x = scalelong.apply(Convolutional(**options), UniformScaling(0.3)), torch.randn(2, 3, 8, 8)
    expected = net(x)
    with pytest.raises(UnsupportedNetworkError, match=match):
        scalelong.fold(net, x)
    assert torch.equal(net(x), expected)


def test_what_cannot_be_folded_says_why():
    with pytest.raises(UnsupportedNetworkError, match="after_norm"):
        scalelong.fold(scalelong.apply(make("UNet2DModel"), ConstantScaling(0.7)))  # a GroupNorm behind the join
    with pytest.raises(UnsupportedNetworkError, match="from the input"):
        scalelong.fold(scalelong.apply(make("scalelong.UViT"), LearnableScaling()))
    with pytest.raises(UnsupportedNetworkError, match="outputs of blocks"):
        scalelong.fold(scalelong.apply(make("scalelong.UViT"), ReZeroScaling()))
    with pytest.raises(ScalingStateError, match="not scaled"):
        scalelong.fold(make("scalelong.UViT"))
    with torch.device("meta"):
        net = scalelong.UViT(img_size=8, embed_dim=32, depth=4, num_heads=2, scaling=ConstantScaling(0.7))
    with pytest.raises(UnsupportedNetworkError):
        scalelong.fold(net)


@torch.no_grad()
def test_learned_scalars_and_user_sites_fold():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(4, 4), nn.Sequential(nn.Linear(8, 4), nn.SiLU())

        def forward(self, x):
            h = self.down(x)
            return self.up(torch.cat([h.tanh(), h], dim=-1))

    torch.manual_seed(0)
    site = Site("up", 0, channels=4, trailing=True, dim=-1)
    net = scalelong.apply(Net(), LearnableScaling(calibration="scalar"), sites=[site])
    net.skip_scaling.kappa.fill_(0.4)
    x = torch.randn(3, 4)
    expected = net(x)
    assert relative(scalelong.fold(net)(x), expected) < 1e-5


def tiny_unet():
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    return UNet2DModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, **blocks)


def test_saving_a_scaled_network_warns_and_leaves_a_record_in_its_config(tmp_path):
    net = scalelong.apply(tiny_unet(), ConstantScaling(0.7), placement="after_norm")
    with pytest.warns(ScalingWarning, match="unscaled.*fold"):
        net.save_pretrained(tmp_path)
    again = UNet2DModel.from_pretrained(tmp_path)
    assert scaling_of(again) is None
    assert "ConstantScaling(kappa=0.7" in str(scalelong.describe(again))  # says that it is not applied
    scalelong.apply(again, **again.config["scalelong"])
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([1, 500])
    with torch.no_grad():
        assert torch.equal(again(x, t).sample, net(x, t).sample)


def test_the_record_goes_with_the_scaling(tmp_path):
    net = scalelong.apply(tiny_unet(), ConstantScaling(0.7), placement="after_norm")
    with scalelong.unscaled(net):
        assert "scalelong" not in net.config
        net.save_pretrained(tmp_path)  # warnings are errors here
    assert net.config["scalelong"]["scaling"]["kind"] == "cs"
    scalelong.fold(net)
    assert "scalelong" not in net.config
    net.save_pretrained(tmp_path)


def test_a_folded_network_loads_in_a_process_without_this_package(tmp_path):
    net = scalelong.apply(tiny_unet(), ConstantScaling(0.7), placement="after_norm")
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([1, 500])
    with torch.no_grad():
        torch.save({"x": x, "t": t, "expected": net(x, t).sample}, tmp_path / "call.pt")
    scalelong.fold(net).save_pretrained(tmp_path / "net")
    script = f"""
import sys, torch
sys.modules["scalelong"] = None
from diffusers import UNet2DModel
net, call = UNet2DModel.from_pretrained({str(tmp_path / "net")!r}), torch.load({str(tmp_path / "call.pt")!r})
with torch.no_grad():
    torch.testing.assert_close(net(call["x"], call["t"]).sample, call["expected"], rtol=1e-5, atol=1e-5)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "not expected" not in result.stderr
