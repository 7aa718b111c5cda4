"""‖b_i∘a_i‖ of real networks (Fig. 11) against whole Jacobians of their blocks."""

import pytest
import torch
from dense import dense_jacobian
from diffusers import UNet2DConditionModel, UNet2DModel

from scalelong import ConstantScaling, Site, UViT, apply
from scalelong.errors import InvalidValueError, UnsupportedNetworkError
from scalelong.robustness import block_norms, spectral_norm
from scalelong.theory.lipschitz import measure_robustness
from scalelong.theory.stacked import StackedUNet

PRECISE = {"iterations": 500, "tolerance": 1e-8}


def norm(matrix):
    return float(torch.linalg.matrix_norm(matrix.detach(), 2))


def small_uvit(**options):
    net = UViT(img_size=4, patch_size=2, in_chans=1, embed_dim=8, depth=6, num_heads=2, mlp_time_embed=False, **options)
    return net.double().eval()


def small_unet():
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    ).eval()


@pytest.mark.parametrize("kappa", [None, 0.7])
def test_on_eq_3_the_norms_are_the_papers(kappa):
    scaling = None if kappa is None else ConstantScaling(kappa)
    net, x = StackedUNet(16, 4, scaling=scaling).double(), torch.randn(16, dtype=torch.float64)
    result = block_norms(net, x[None], **PRECISE)
    assert result.norms == pytest.approx(measure_robustness(net, x).composed, rel=1e-4)
    assert result.m0 == max(result.norms)
    assert all(one.converged for one in result.details)


@pytest.mark.parametrize("scaled", [False, True])
def test_on_u_vit_the_norms_are_those_of_the_blocks_jacobians(scaled):
    net = small_uvit(scaling=ConstantScaling(0.5) if scaled else None)
    x, t = torch.randn(1, 1, 4, 4, dtype=torch.float64), torch.tensor([300.0])
    calls = {}
    hooks = [
        block.register_forward_hook(lambda module, args, output, k=k: calls.__setitem__(k, (args, output)))
        for k, block in {f"in{k}": b for k, b in enumerate(net.in_blocks)}.items()
    ] + [
        block.register_forward_hook(lambda module, args, output, k=k: calls.__setitem__(k, (args, output)))
        for k, block in {f"out{k}": b for k, b in enumerate(net.out_blocks)}.items()
    ]
    net(x, t)
    for hook in hooks:
        hook.remove()
    result = block_norms(net, x, t, **PRECISE)
    i = 2  # skip 2 of 3: in_blocks.1 and out_blocks.1; its b ends where the backbone reaches out_blocks.2
    (source,), _ = calls["in1"]
    (hidden, skip), _ = calls["out1"]  # the skip as out_blocks.1 gets it, after κ
    block = type(net.out_blocks[1]).forward  # the block itself, without the scaling's hook
    J_a = dense_jacobian(net.in_blocks[1], source.detach())
    J_b = dense_jacobian(lambda s: block(net.out_blocks[1], hidden.detach(), s), skip.detach())
    assert result.norms[i - 1] == pytest.approx(norm(J_b @ J_a), rel=1e-4)


def test_on_a_diffusers_unet_the_norms_are_those_of_whole_jacobians():
    net = small_unet().double()
    x, t = torch.randn(1, 1, 8, 8, dtype=torch.float64), torch.tensor([300])
    result = block_norms(net, x, t, **PRECISE)
    assert len(result.norms) == 4

    # i = 1 by replacement: a_1 is conv_in; b_1 maps the last skip alone to the output
    skip = net.conv_in(x).detach()

    def output_of(replaced):
        def hook(module, args, kwargs):
            hidden, skips, *rest = args
            return (hidden, (replaced, *skips[1:]), *rest), kwargs

        handle = net.up_blocks[-1].register_forward_pre_hook(hook, with_kwargs=True)
        try:
            return net(x, t).sample
        finally:
            handle.remove()

    assert torch.allclose(output_of(skip), net(x, t).sample)  # the hook replaces the right tensor
    J = dense_jacobian(output_of, skip) @ dense_jacobian(net.conv_in, x)
    assert result.norms[0] == pytest.approx(norm(J), rel=1e-4)


def test_scaling_by_one_does_not_change_the_norms():
    net, x, t = small_unet(), torch.randn(1, 1, 8, 8), torch.tensor([300])
    before = block_norms(net, x, t)
    apply(net, ConstantScaling(1.0))
    assert block_norms(net, x, t).norms == pytest.approx(before.norms, rel=1e-4)


def test_other_arguments_reach_a_conditional_unet():
    net = UNet2DConditionModel(
        sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8, attention_head_dim=2,
    ).eval()  # fmt: skip
    context = torch.randn(1, 3, 8)
    result = block_norms(net, torch.randn(1, 2, 8, 8), torch.tensor([10]), encoder_hidden_states=context, iterations=5)
    assert len(result.norms) == 4
    assert all(value > 0 for value in result.norms)


def test_the_norm_over_a_batch_is_the_largest_of_its_samples():
    net, x = StackedUNet(8, 2).double(), torch.randn(3, 8, dtype=torch.float64)
    each = [block_norms(net, x[k : k + 1], **PRECISE).norms for k in range(3)]
    expected = [max(norms) for norms in zip(*each, strict=True)]
    assert block_norms(net, x, **PRECISE).norms == pytest.approx(expected, rel=1e-4)


def test_spectral_norm_of_a_composition_of_callables():
    """‖b∘a‖ of two functions is the norm of their composition."""
    A, B = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    x = torch.randn(4, dtype=torch.float64)
    result = spectral_norm(lambda v: B @ (A @ v), x, **PRECISE)
    assert result.value == pytest.approx(norm(B @ A), rel=1e-6)


def test_measuring_does_not_change_the_network():
    net, x, t = small_unet(), torch.randn(1, 1, 8, 8), torch.tensor([300])
    before = net(x, t).sample
    block_norms(net, x, t, iterations=2)
    assert torch.equal(net(x, t).sample, before)
    assert all(not module._forward_pre_hooks for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_unsupported_examples_and_sites_raise():
    net = StackedUNet(8, 2)
    with pytest.raises(InvalidValueError, match="x_t"):
        block_norms(net)
    with pytest.raises(InvalidValueError, match="x_t"):
        block_norms(net, torch.zeros(1, 8, dtype=torch.long))
    trailing = [Site("0", 0, channels=4, trailing=True)]
    with pytest.raises(UnsupportedNetworkError, match="spectral_norm"):
        block_norms(torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.zeros(1, 8), sites=trailing)
