"""Unsupported networks, wrappers, scalings and sites raise an error that names the value and what to do."""

import pytest
import torch
from skip_networks import make
from torch import nn

import scalelong
from peers import lucidrains
from scalelong import ConstantScaling, LearnableScaling, Site, UniformScaling
from scalelong.errors import InvalidValueError, ScalingStateError, UnknownNameError, UnsupportedNetworkError
from scalelong.skips import finders

CS = ConstantScaling(0.7)


def uvit_2d():
    """aMUSEd's: a U-ViT by name, but without long skips."""
    from diffusers import UVit2DModel

    return UVit2DModel(
        hidden_size=8, cond_embed_dim=8, encoder_hidden_size=8, vocab_size=8, codebook_size=4, in_channels=8,
        block_out_channels=8, num_res_blocks=1, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        micro_cond_embed_dim=8, micro_cond_encode_dim=2, sample_size=4, block_num_heads=2,
    )  # fmt: skip


def autoencoder():
    from diffusers import AutoencoderKL

    return AutoencoderKL(block_out_channels=(4,), norm_num_groups=2)


def value_function():
    """The encoder half of a U-Net."""
    from diffusers import UNet1DModel

    return UNet1DModel(
        in_channels=2, out_channels=2, block_out_channels=(32, 64), layers_per_block=1, down_block_types=
        ("DownResnetBlock1D", "DownResnetBlock1D"), up_block_types=(), mid_block_type="ValueFunctionMidBlock1D",
        out_block_type="ValueFunction", use_timestep_embedding=True, downsample_each_block=True, act_fn="mish",
        time_embedding_type="positional",
    )  # fmt: skip


def plain_cnn():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3))


@pytest.mark.parametrize("build", [uvit_2d, autoencoder, value_function, plain_cnn])
def test_networks_without_known_skips_are_rejected(build):
    net = build()
    for use in (lambda: scalelong.apply(net, CS), lambda: scalelong.describe(net)):
        with pytest.raises(UnsupportedNetworkError) as caught:
            use()
        message = str(caught.value)
        assert type(net).__qualname__ in message
        assert "example=(x, t)" in message
        assert "sites=[" in message
        assert "register_adapter" in message
        assert "scale_skip" in message
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())


def test_a_wrapper_is_rejected_with_the_submodule_to_pass():
    """lucidrains' GaussianDiffusion holds the U-Net as `model`; others have a `unet` in a LightningModule."""
    net = lucidrains().GaussianDiffusion(make("lucidrains Unet"), image_size=8, timesteps=10)
    with pytest.raises(UnsupportedNetworkError, match=r"'model' \(Unet\).*net\.model"):
        scalelong.apply(net, CS)
    scalelong.apply(net.model, CS)


def test_a_pipeline_is_rejected_with_where_its_network_is():
    from diffusers import DDPMPipeline, DDPMScheduler

    pipe = DDPMPipeline(make("UNet2DModel"), DDPMScheduler())
    for use in (scalelong.describe, scalelong.remove, lambda pipe: scalelong.apply(pipe, CS)):
        with pytest.raises(InvalidValueError, match=r"DDPMPipeline.*pipe\.unet"):
            use(pipe)


def test_a_wrapped_network_is_rejected_with_the_right_order(tmp_path):
    net = make("guided-diffusion")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(net)
        order = r"apply\(net, scaling\) first, then DistributedDataParallel and the optimizer"
        with pytest.raises(ScalingStateError, match="the network.*DistributedDataParallel.*" + order):
            scalelong.apply(ddp, CS)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ScalingStateError, match=r"first, then DataParallel"):
        scalelong.apply(nn.DataParallel(net), CS)


def compiled_whole(net):
    return torch.compile(net, backend="eager")


def compiled_in_place(net):
    net.compile(backend="eager")
    return net


def compiled_forward(net):
    net.forward = torch.compile(net.forward, backend="eager")
    return net


def compiled_part(net):
    net.output_blocks[1].compile(backend="eager")
    return net


@pytest.mark.parametrize("wrap", [compiled_whole, compiled_in_place, compiled_forward, compiled_part])
def test_a_compiled_network_is_rejected_because_its_graphs_would_not_run_the_hooks(wrap):
    net = wrap(make("guided-diffusion"))
    what = "module 'output_blocks.1'" if wrap is compiled_part else "the network"
    with pytest.raises(ScalingStateError, match=rf"^{what}.*torch.compile.*apply\(net, scaling\) first"):
        scalelong.apply(net, CS)
    scaled = wrap(scalelong.apply(make("guided-diffusion"), CS))
    with pytest.raises(ScalingStateError, match="torch.compile.*wrap it again"):
        scalelong.remove(scaled)
    assert len(scalelong.describe(scaled).rows) == 4


def test_an_invalid_network_scaling_or_placement_is_rejected():
    net = make("UNet2DModel")
    with pytest.raises(InvalidValueError, match="net .*ConstantScaling"):
        scalelong.apply(CS, net)
    with pytest.raises(UnknownNameError, match="scaling 'sc'"):
        scalelong.apply(net, "sc")
    with pytest.raises(InvalidValueError, match="scaling.*0.7"):
        scalelong.apply(net, 0.7)
    with pytest.raises(UnknownNameError, match="placement 'after-norm'; did you mean 'after_norm'"):
        scalelong.apply(net, CS, placement="after-norm")
    with pytest.raises(UnsupportedNetworkError, match='gate="tokens"'):
        scalelong.apply(net, LearnableScaling(gate="tokens"))


@pytest.mark.parametrize(
    ("sites", "error", "match"),
    [
        ([], InvalidValueError, r"sites.*UNet2DModel.*\[\]"),
        ("up_blocks.0", InvalidValueError, "sites.*'up_blocks.0'"),
        ([3], InvalidValueError, "sites.*3"),
        (["up_block.0"], UnsupportedNetworkError, "'up_block.0'; did you mean 'up_blocks.0'"),
        ([Site("up_blocks.0", "res_tuple")], UnsupportedNetworkError, "'res_tuple'; it has hidden_states, res_hidden"),
        ([Site("conv_in", 9)], UnsupportedNetworkError, "Conv2d.forward has no argument 9; it has input"),
        ([Site("up_blocks.0", 1, item=-1)] * 2, UnsupportedNetworkError, "two sites"),
    ],
)
def test_sites_that_do_not_fit_are_rejected(sites, error, match):
    with pytest.raises(error, match=match):
        scalelong.apply(make("UNet2DModel"), CS, sites=sites)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"path": ""}, "path.*''"),
        ({"path": "a", "argument": -1}, "argument.*-1"),
        ({"path": "a", "argument": None}, "argument.*None"),
        ({"path": "a", "item": 1.5}, "item.*1.5"),
        ({"path": "a", "leading": True}, "channels=…"),
        ({"path": "a", "leading": True, "trailing": True, "channels": 3}, "both"),
        ({"path": "a", "call": 2, "calls": 2}, "call.*2"),
        ({"path": "a", "join": "cat"}, "join.*'cat'"),
        ({"path": "a", "channels": 0}, "channels.*0"),
        ({"path": "a", "channels": True}, "channels.*True"),
        ({"path": "a", "trailing": True}, "channels=…"),
        ({"path": "a", "norm": "b"}, "channels=…"),
        ({"path": "a", "norm": 3}, "norm.*3"),
        ({"path": "a", "trailing": 1, "channels": 3}, "trailing.*1"),
    ],
)
def test_a_site_validates_its_fields(fields, match):
    with pytest.raises(InvalidValueError, match=match):
        Site(**fields)


def test_a_call_without_the_skip_is_rejected():
    net = make("UNet2DModel")
    x, temb = torch.randn(1, 16, 4, 4), torch.randn(1, 32)
    scalelong.apply(net, UniformScaling(0.5))
    with pytest.raises(UnsupportedNetworkError, match="without argument 'res_hidden_states_tuple'.*long skip 3"):
        net.up_blocks[0](x, temb=temb)
    with pytest.raises(UnsupportedNetworkError, match="1 items, but long skip 3 is item -2"):
        net.up_blocks[0](x, (x,), temb)
    with pytest.raises(UnsupportedNetworkError, match="long skip 3.*tuple, list or dict, got Tensor"):
        net.up_blocks[0](x, x, temb)
    with pytest.raises(UnsupportedNetworkError, match="long skip 3 .*NoneType"):
        net.up_blocks[0](x, (None, x), temb)


def test_adapters_are_registered_for_classes_with_functions(monkeypatch):
    monkeypatch.setattr(finders, "_ADAPTERS", {})
    with pytest.raises(InvalidValueError, match="find_skips"):
        scalelong.register_adapter(nn.Bilinear, ["path"])
    with pytest.raises(InvalidValueError, match="cls.*3"):
        scalelong.register_adapter(3, lambda net: [])
    with pytest.raises(InvalidValueError, match="cls.*dict"):
        scalelong.register_adapter(dict, lambda net: [])
    scalelong.register_adapter(nn.Sequential, lambda net: [])
    with pytest.raises(InvalidValueError, match="sites.*Sequential"):
        scalelong.apply(plain_cnn(), CS)
