"""What is not understood is refused by a sentence that says what was looked for and what to do; nothing is silent."""

import pytest
import torch
from skip_networks import make
from torch import nn

import scalelong
from peers import lucidrains
from scalelong import ConstantScaling, LearnableScaling, ScaleLongError, Site, UniformScaling
from scalelong.skips import adapters

CS = ConstantScaling(0.7)


def uvit_2d():
    """aMUSEd's: a U-ViT by name, but without long skips."""
    from diffusers import UVit2DModel

    return UVit2DModel(
        hidden_size=8, cond_embed_dim=8, encoder_hidden_size=8, vocab_size=8, codebook_size=4, in_channels=8,
        block_out_channels=8, num_res_blocks=1, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        micro_cond_embed_dim=8, micro_cond_encode_dim=2, sample_size=4, block_num_heads=2,
    )  # fmt: skip


def karras_unet():
    return lucidrains().KarrasUnet(image_size=8, dim=8, dim_max=8, num_downsamples=1, num_blocks_per_stage=1)


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


def stable_cascade():
    from diffusers.models import StableCascadeUNet

    return StableCascadeUNet(
        in_channels=4, out_channels=4, patch_size=1, conditioning_dim=8, block_out_channels=(8, 8),
        num_attention_heads=(2, 2), down_num_layers_per_block=(1, 1), up_num_layers_per_block=(1, 1),
        down_blocks_repeat_mappers=(1, 1), up_blocks_repeat_mappers=(1, 1), timestep_ratio_embedding_dim=4,
        block_types_per_layer=(("SDCascadeResBlock",), ("SDCascadeResBlock",)), clip_text_pooled_in_channels=4,
        clip_seq=1,
    )  # fmt: skip


def plain_cnn():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3))


@pytest.mark.parametrize("build", [uvit_2d, karras_unet, autoencoder, value_function, stable_cascade, plain_cnn])
def test_networks_without_understood_skips_are_refused(build):
    net = build()
    for use in (lambda: scalelong.apply(net, CS), lambda: scalelong.describe(net)):
        with pytest.raises(ScaleLongError) as caught:
            use()
        message = str(caught.value)
        assert type(net).__qualname__ in message
        assert "no long skips were understood" in message
        assert "res_hidden_states_tuple" in message
        assert "sites=[" in message
        assert "register_adapter" in message
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())


def test_a_wrapper_is_refused_with_the_part_that_is_meant():
    """lucidrains' GaussianDiffusion holds the U-Net as `model`; others have a `unet` in a LightningModule."""
    net = lucidrains().GaussianDiffusion(make("lucidrains Unet"), image_size=8, timesteps=10)
    with pytest.raises(ScaleLongError, match=r"Its part 'model' \(Unet\) is understood: apply to net.model"):
        scalelong.apply(net, CS)
    scalelong.apply(net.model, CS)


def test_a_pipeline_is_refused_with_where_its_network_is():
    from diffusers import DDPMPipeline, DDPMScheduler

    pipe = DDPMPipeline(make("UNet2DModel"), DDPMScheduler())
    for use in (scalelong.describe, scalelong.remove, lambda pipe: scalelong.apply(pipe, CS)):
        with pytest.raises(
            ScaleLongError, match=r"is scaled, not DDPMPipeline; of a diffusers pipeline take pipe\.unet"
        ):
            use(pipe)


def test_a_network_that_is_wrapped_already_is_refused_with_the_right_order(tmp_path):
    net = make("guided-diffusion")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(net)
        order = r"apply\(net, scaling\) first, then DistributedDataParallel and the optimizer"
        with pytest.raises(ScaleLongError, match="the network is wrapped by DistributedDataParallel already.*" + order):
            scalelong.apply(ddp, CS)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ScaleLongError, match=r"wrapped by DataParallel already.*first, then DataParallel"):
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
def test_a_compiled_network_is_refused_because_its_graphs_would_not_see_the_hooks(wrap):
    net = wrap(make("guided-diffusion"))
    what = "its part 'output_blocks.1'" if wrap is compiled_part else "the network"
    with pytest.raises(
        ScaleLongError, match=rf"^{what} is wrapped by torch.compile already; the right order is .*apply"
    ):
        scalelong.apply(net, CS)
    scaled = wrap(scalelong.apply(make("guided-diffusion"), CS))
    with pytest.raises(ScaleLongError, match="take the scaling off the network itself, then wrap it anew"):
        scalelong.remove(scaled)
    assert len(scalelong.describe(scaled).rows) == 4


def test_what_is_not_a_scaling_or_a_placement_is_refused():
    net = make("UNet2DModel")
    with pytest.raises(ScaleLongError, match=r"a network \(torch.nn.Module\) is scaled, not ConstantScaling"):
        scalelong.apply(CS, net)
    with pytest.raises(ScaleLongError, match="unknown scaling 'sc'"):
        scalelong.apply(net, "sc")
    with pytest.raises(ScaleLongError, match="0.7"):
        scalelong.apply(net, 0.7)
    with pytest.raises(ScaleLongError, match="unknown placement 'after-norm'; did you mean 'after_norm'"):
        scalelong.apply(net, CS, placement="after-norm")
    with pytest.raises(ScaleLongError, match='gate="tokens"'):
        scalelong.apply(net, LearnableScaling(gate="tokens"))


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ([], "no sites were given for UNet2DModel"),
        ("up_blocks.0", "sites is a list"),
        ([3], "a site is a scalelong.Site or a module's path, not 3"),
        (["up_block.0"], "no module 'up_block.0'; did you mean 'up_blocks.0'"),
        ([Site("up_blocks.0", "res_tuple")], "has no argument 'res_tuple'; it has hidden_states, res_hidden"),
        ([Site("conv_in", 9)], "Conv2d.forward has no argument 9; it has input"),
        ([Site("up_blocks.0", 1, item=-1)] * 2, "two sites name the same argument"),
    ],
)
def test_sites_that_do_not_fit_are_refused(sites, message):
    with pytest.raises(ScaleLongError, match=message):
        scalelong.apply(make("UNet2DModel"), CS, sites=sites)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": ""}, "a site's path is the dotted name"),
        ({"path": "a", "argument": -1}, "argument counts from 0"),
        ({"path": "a", "argument": None}, "argument is the name or the position"),
        ({"path": "a", "item": "last"}, "item is a whole number, not 'last'"),
        ({"path": "a", "channels": 0}, "channels is a whole number from 1 up, not 0"),
        ({"path": "a", "channels": True}, "channels is a whole number"),
        ({"path": "a", "trailing": True}, r"the number of the skip's channels is needed \(channels=…\)"),
        ({"path": "a", "norm": "b"}, "channels is needed"),
        ({"path": "a", "norm": 3}, "norm is a module's dotted name, not 3"),
    ],
)
def test_a_site_checks_its_fields(fields, message):
    with pytest.raises(ScaleLongError, match=message):
        Site(**fields)


def test_a_call_that_brings_no_skip_says_so():
    net = make("UNet2DModel")
    x, temb = torch.randn(1, 16, 4, 4), torch.randn(1, 32)
    scalelong.apply(net, UniformScaling(0.5))
    with pytest.raises(
        ScaleLongError, match=r"called without argument 'res_hidden_states_tuple', which brings long skip 3"
    ):
        net.up_blocks[0](x, temb=temb)
    with pytest.raises(ScaleLongError, match=r"has 1 items, but long skip 3 is its item -2"):
        net.up_blocks[0](x, (x,), temb)
    with pytest.raises(ScaleLongError, match=r"in a tuple or list, is a Tensor"):
        net.up_blocks[0](x, x, temb)
    with pytest.raises(ScaleLongError, match=r"long skip 3 is a tensor, but a NoneType arrived"):
        net.up_blocks[0](x, (None, x), temb)


def test_adapters_are_registered_for_classes_with_functions(monkeypatch):
    monkeypatch.setattr(adapters, "_ADAPTERS", {})
    with pytest.raises(ScaleLongError, match="find_skips is a function"):
        scalelong.register_adapter(nn.Bilinear, ["path"])
    with pytest.raises(ScaleLongError, match="for a network class or its qualified name, not 3"):
        scalelong.register_adapter(3, lambda net: [])
    with pytest.raises(ScaleLongError, match="for a network class"):
        scalelong.register_adapter(dict, lambda net: [])
    scalelong.register_adapter(nn.Sequential, lambda net: [])
    with pytest.raises(ScaleLongError, match="no sites were given for Sequential"):
        scalelong.apply(plain_cnn(), CS)
