"""Self-conditioning: bit-equal at first, felt with weights, and applied, described, removed and saved as a scaling."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

import scalelong
from scalelong import ConstantScaling, FreeU, GatedScaling, LearnableScaling, NormScaling, SelfConditioning, compose
from scalelong.errors import InvalidValueError, UnknownNameError, UnsupportedNetworkError
from scalelong.models.unet import unet_settings
from scalelong.training import train
from tiny_runs import losses, tiny_config


def uvit(**options):
    torch.manual_seed(0)
    return scalelong.UViT(img_size=8, embed_dim=16, depth=4, num_heads=2, **options)


def unet(text=None):
    torch.manual_seed(0)
    return scalelong.build_unet(unet_settings(8, (8, 16), 1, (), text), in_channels=3, out_channels=3)


NETWORKS = {"uvit": (uvit, "mid_block"), "unet": (unet, "down_blocks.1"), "uvit-late": (uvit, "out_blocks.0")}
SCALINGS = [ConstantScaling(0.5), LearnableScaling(), NormScaling(), GatedScaling(), FreeU()]
X, T = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([10.0, 500.0])


def output(net):
    with torch.no_grad():
        result = net.eval()(X, T)
    return result if isinstance(result, torch.Tensor) else result.sample


def projection(net):
    (part,) = net.skip_scaling.conditioners
    return part.projection.weight


@pytest.fixture(params=NETWORKS)
def case(request):
    make, block = NETWORKS[request.param]
    return make, SelfConditioning(block)


def test_it_starts_bit_equal_feels_its_weights_and_is_removed_bit_for_bit(case):
    make, spec = case
    before = output(make())
    net = scalelong.apply(make().train(), spec)
    assert torch.equal(output(net), before)
    nn.init.normal_(projection(net), std=0.5)
    assert not torch.allclose(output(net), before, atol=1e-4)
    scalelong.remove(net)
    assert torch.equal(output(net), before)
    assert list(net.state_dict()) == list(make().state_dict())


def test_the_zero_projection_gets_a_gradient_and_no_graph_stays(case):
    make, spec = case
    net = scalelong.apply(make().train(), spec)
    result = net(X, T)
    (result if isinstance(result, torch.Tensor) else result.sample).square().mean().backward()
    assert projection(net).grad.norm() > 0
    assert net.skip_scaling.features is None
    copied = copy.deepcopy(net)
    nn.init.normal_(projection(copied), std=0.5)
    assert torch.equal(output(net), output(scalelong.apply(make().train(), spec)))  # hooks of the copy act on the copy


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("name", ["uvit", "unet"])
@pytest.mark.filterwarnings("ignore::scalelong.errors.ScalingWarning")
def test_composed_with_any_scaling_it_starts_as_that_scaling_alone(scaling, name):
    make, block = NETWORKS[name]
    alone = output(scalelong.apply(make().train(), scaling))
    for parts in ((scaling, SelfConditioning(block)), (SelfConditioning(block), scaling)):
        net = scalelong.apply(make().train(), compose(*parts))
        assert torch.equal(output(net), alone)
        nn.init.normal_(projection(net), std=0.5)
        assert not torch.allclose(output(net), alone, atol=1e-4)


def test_it_is_saved_and_loaded(case, tmp_path):
    make, spec = case
    net = scalelong.apply(make().train(), compose(ConstantScaling(0.5), spec))
    nn.init.normal_(projection(net), std=0.5)
    scalelong.save_scaling(net, tmp_path)
    assert torch.equal(output(scalelong.load_scaling(make(), tmp_path)), output(net))


def test_a_u_vit_saves_it_with_its_own_config(tmp_path):
    net = uvit(scaling=SelfConditioning("in_blocks.1"), num_classes=3)
    nn.init.normal_(projection(net), std=0.5)
    net.save_pretrained(tmp_path)
    loaded = scalelong.UViT.from_pretrained(tmp_path).eval()
    labels = torch.tensor([0, 2])
    with torch.no_grad():
        assert torch.equal(loaded(X, T, y=labels), net.eval()(X, T, y=labels))


def test_describe_names_the_blocks_and_keeps_kappa():
    net = scalelong.apply(uvit().train(), compose(ConstantScaling(0.5), SelfConditioning("mid_block")))
    described = scalelong.describe(net)
    assert [row.coefficient for row in described.rows] == [1.0, 0.5]
    assert "the features of mid_block condition out_blocks.0, out_blocks.1" in str(described)
    assert scalelong.describe(net, X, T).rows[0].felt > 0


def test_only_later_blocks_are_conditioned():
    net = scalelong.apply(unet().train(), SelfConditioning("mid_block"))
    assert net.skip_scaling.targets == ("up_blocks.0", "up_blocks.1")
    assert scalelong.apply(uvit().train(), SelfConditioning("in_blocks.0")).skip_scaling.targets == (
        "out_blocks.0",
        "out_blocks.1",
    )


def test_the_conditioning_is_the_mean_over_patches_at_the_time_token():
    net = scalelong.apply(uvit(num_classes=3).train(), SelfConditioning("mid_block"))
    nn.init.normal_(projection(net), std=0.5)
    seen = {}
    net.mid_block.register_forward_hook(lambda m, a, out: seen.update(mid=out))
    net.out_blocks[0].register_forward_pre_hook(lambda m, a: seen.update(first=a[0]))
    with torch.no_grad():
        net(X, T, y=torch.tensor([0, 1]))
        expected = seen["mid"].clone()
        expected[:, 1] += seen["mid"][:, 2:].mean(1) @ projection(net).T
    assert torch.allclose(seen["first"], expected, atol=1e-6)


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        net = scalelong.apply(uvit().train(), SelfConditioning("mid_block"))
        with torch.no_grad():
            projection(net).copy_(torch.eye(16) * 0.3)
        if checkpointing:
            net.enable_gradient_checkpointing()
        net(X, T).square().mean().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("make", [uvit, partial(unet, text=16)], ids=["uvit", "text"])
def test_it_is_one_graph_for_the_compiler_also_in_a_network_with_text(make):
    net = scalelong.apply(make().train(), compose(ConstantScaling(0.7), SelfConditioning("mid_block")))
    example = (X, T) if make is uvit else (X, T, torch.ones(2, 3, 16))
    before = net(*example)
    nn.init.normal_(projection(net), std=0.5)
    compiled, plain = torch.compile(net, backend="eager", fullgraph=True)(*example), net(*example)
    if make is not uvit:
        before, compiled, plain = before.sample, compiled.sample, plain.sample
    assert torch.equal(compiled, plain)
    assert not torch.allclose(plain, before, atol=1e-4)


def test_training_reaches_it_by_a_setting_and_resumes(tmp_path):
    settings = {"self_conditioning__block": "mid_block", "scaling": ConstantScaling(0.7)}
    whole = train(tiny_config(**settings), tmp_path / "whole", quiet=True).run
    train(tiny_config(**settings, train__steps=3), tmp_path / "parts", quiet=True)
    parts = train(tiny_config(**settings), tmp_path / "parts", quiet=True).run
    assert losses(parts.folder) == losses(whole.folder)
    assert whole.net.skip_scaling.spec == compose(ConstantScaling(0.7), SelfConditioning("mid_block"))
    assert projection(whole.net).abs().sum() > 0
    off = train(tiny_config(scaling=ConstantScaling(0.7)), tmp_path / "off", quiet=True).run
    assert losses(off.folder)[0][:2] == losses(whole.folder)[0][:2]  # step and loss; the gradient has the projection's


def test_unknown_blocks_and_unsupported_networks_are_refused():
    with pytest.raises(UnknownNameError, match="in_blocks.0, in_blocks.1, mid_block"):
        scalelong.apply(uvit().train(), SelfConditioning("middle"))
    with pytest.raises(InvalidValueError, match="followed by"):
        scalelong.apply(uvit().train(), SelfConditioning("out_blocks.1"))
    with pytest.raises(InvalidValueError, match="block must be"):
        SelfConditioning("")
    with pytest.raises(UnsupportedNetworkError, match="no conditioning"):
        scalelong.apply(Plain().train(), SelfConditioning("mid_block"))
    with pytest.raises(InvalidValueError, match="cannot be composed"):
        compose(SelfConditioning("mid_block"), SelfConditioning("in_blocks.0"))
    with pytest.raises(UnsupportedNetworkError, match="cannot be folded"):
        scalelong.fold(scalelong.apply(uvit().train(), SelfConditioning("mid_block")))
    assert scalelong.parse_scaling("self-conditioning:mid_block") == SelfConditioning("mid_block")


class Plain(nn.Module):
    """A network with a long skip and no conditioning."""

    long_skips = (4,)

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x, t):
        h = self.first(x)
        return self.last(torch.cat([h, scalelong.scale_skip(self, h, 1)], dim=1))


def test_it_is_pickled_with_the_network():
    net = scalelong.apply(unet().train(), SelfConditioning("mid_block"))
    nn.init.normal_(projection(net), std=0.5)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    assert torch.equal(output(torch.load(buffer, weights_only=False)), output(net))
