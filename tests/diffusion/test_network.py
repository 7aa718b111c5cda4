"""The calling convention `eps = net(x, t, y=, context=)` on our networks, diffusers' and wrapped ones."""

import pytest
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from torch import nn
from torch.overrides import TorchFunctionMode

from scalelong import UViT
from scalelong.diffusion import Denoiser, get_process, simple_loss
from scalelong.errors import InvalidValueError

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
T, Y = torch.tensor([1.0, 900.0]), torch.tensor([0, 2])
TEXT = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
UNET = {
    "sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "block_out_channels": (8, 8),
    "norm_num_groups": 4,
}  # fmt: skip


class Wrapper(nn.Module):
    """Holds a network under `module`, as DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def test_u_vit_receives_labels_and_tokens_under_their_own_names():
    net = UViT(img_size=8, patch_size=2, in_chans=1, embed_dim=16, depth=2, num_heads=2, num_classes=3).eval()
    assert torch.equal(Denoiser(net)(X, T, y=Y), net(X, T, y=Y))


def test_unet2d_receives_labels_as_class_labels_and_returns_a_tensor():
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    net = UNet2DModel(**UNET, **blocks, num_class_embeds=3).eval()
    assert torch.equal(Denoiser(net)(X, T, y=Y), net(X, T, class_labels=Y).sample)


def test_unet2d_condition_receives_tokens_as_encoder_hidden_states():
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",) * 2, "up_block_types": ("CrossAttnUpBlock2D",) * 2}
    net = UNet2DConditionModel(**UNET, **blocks, cross_attention_dim=8, attention_head_dim=2).eval()
    expected = net(X, T, encoder_hidden_states=TEXT).sample
    assert torch.equal(Denoiser(net)(X, T, context=TEXT), expected)
    assert torch.equal(Denoiser(Wrapper(net))(X, T, context=TEXT), expected)
    assert Denoiser(net).arguments(context=TEXT).keys() == {"encoder_hidden_states"}


def test_a_condition_that_the_network_does_not_accept_raises():
    class Unconditional(nn.Module):
        def forward(self, x, t):
            return x

    net = Denoiser(Unconditional())
    assert torch.equal(net(X, T), X)
    with pytest.raises(InvalidValueError, match="Unconditional.*'y'"):
        net(X, T, y=Y)
    with pytest.raises(InvalidValueError, match="Unconditional.*'context'"):
        net(X, T, context=TEXT)


class Uploads(TorchFunctionMode):
    """Counts what the host copies to a device: numbers, and its own tensors. On CUDA each copy waits for the device."""

    found = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.as_tensor, torch.tensor, torch.Tensor.to) and result.device.type != "cpu":
            self.found += not isinstance(args[0], torch.Tensor) or args[0].device.type == "cpu"
        return result


@pytest.mark.parametrize("process", ["ddpm", "cosine", "sd", "vp"])
def test_a_loss_on_a_device_copies_nothing_from_the_host(process):
    """The table of a discrete process is on the device after the first loss; a null label is filled in there."""
    x_0, t, y = (value.to("meta") for value in (X, T, Y))
    given = {"y": y, "drop": torch.zeros(2, dtype=torch.bool, device="meta"), "null_y": 10}
    with Uploads() as uploads:
        for _ in range(2):
            uploads.found = 0
            losses = simple_loss(lambda x, t, y: x + y.view(-1, 1, 1, 1), get_process(process), x_0, t, x_0, **given)
    assert losses.device.type == "meta"
    assert uploads.found == 0


def test_a_dropped_label_is_the_null_label():
    seen = {}
    simple_loss(
        lambda x, t, y: seen.setdefault("y", y)[:, None, None, None] + x,
        get_process("vp"), X, T / 1000, X, y=Y, drop=torch.tensor([True, False]), null_y=10,
    )  # fmt: skip
    assert seen["y"].tolist() == [10, 2]
    assert seen["y"].dtype == Y.dtype
