"""What every method promises, for every network; and FreeU, Hunyuan-DiT's norm, compile and storage from outside."""

import copy
import logging
import warnings

import pytest
import torch
from gallery import Add, Root
from homemade import OriginalUViT
from skip_networks import NETWORKS, example, make, run
from torch import nn

import scalelong
from scalelong import (
    ConstantScaling,
    ExplicitScaling,
    FreeU,
    GatedScaling,
    LearnableScaling,
    LerpScaling,
    MagnitudePreserving,
    NormScaling,
    ScalingWarning,
    SelfConditioning,
    SkipAdapter,
    SkipTuning,
    SparseScaling,
    UniformScaling,
    compose,
)
from scalelong.errors import InvalidValueError, ScalingStateError, UnsupportedNetworkError
from scalelong.skips import scaling_of

EVERY = pytest.mark.parametrize("name", NETWORKS)
METHODS = [
    NormScaling(), NormScaling("rms", over="both"), MagnitudePreserving(0.4), GatedScaling(), LerpScaling(0.3),
    SparseScaling(2), ConstantScaling(innermost=0.2), SkipTuning(0.6), FreeU(), FreeU(version=2), SkipAdapter(4),
    compose(ConstantScaling(0.7), FreeU()), compose(SkipAdapter(4), ConstantScaling(0.7)),
]  # fmt: skip
SMALL = ("UNet2DModel", "scalelong.UViT", "original U-ViT", "guided-diffusion", "StackedUNet")
REFUSED = {  # what makes no sense for the network's joins
    "StackedUNet": ("norm-rms-over-both", "mp", "freeu", "+freeu"),  # it adds vectors
}


def refused(name: str, spec) -> bool:
    labels = REFUSED.get(name, ("lerp",))  # all others concatenate
    return spec.label.startswith(labels) or (spec.label.endswith("+freeu") and "+freeu" in labels)


def wake(net: nn.Module) -> nn.Module:
    """Give parameters that start as nothing something to say."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in scalelong.parameters(net):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return net


@EVERY
@torch.no_grad()
def test_every_method_acts_and_is_removed_without_a_trace(name):
    net = make(name)
    plain, flags = run(net, name), [p.requires_grad for p in net.parameters()]
    for spec in METHODS:
        if refused(name, spec):
            with pytest.raises(UnsupportedNetworkError, match=r"needs skips that are|FreeU filters a map"):
                scalelong.apply(net, spec)
            continue
        output = run(wake(scalelong.apply(net, spec)), name)
        assert output.isfinite().all()
        same_width = spec.kind == "mp" and torch.equal(output, plain)
        assert same_width or not torch.allclose(output, plain, rtol=1e-3, atol=1e-3), spec
        assert len(scalelong.describe(net).rows) == NETWORKS[name].skips
        scalelong.remove(net)
        assert torch.equal(run(net, name), plain), spec
        assert [p.requires_grad for p in net.parameters()] == flags


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("spec", METHODS, ids=lambda spec: spec.label)
@torch.no_grad()
def test_files_copies_and_descriptions(name, spec, tmp_path):
    if refused(name, spec):
        return
    call = example(name)
    net = wake(scalelong.apply(make(name), spec))
    expected, twin = run(net, name), copy.deepcopy(net)
    rows = scalelong.describe(net, *call.args, **call.kwargs).rows
    assert all(row.felt is not None for row in rows)
    assert spec.kind in str(scalelong.describe(net)) or spec.factor
    scalelong.save_scaling(net, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a loaded scaling was trained: no word of phases
        again = scalelong.load_scaling(make(name), tmp_path)
    assert scaling_of(again).spec == spec
    assert torch.equal(run(again, name), expected)
    for parameter in scalelong.parameters(net):
        parameter.zero_()
    assert torch.equal(run(twin, name), expected)
    assert torch.equal(run(scalelong.remove(twin), name), run(make(name), name))


@pytest.mark.parametrize("name", ["UNet2DModel", "guided-diffusion", "scalelong.UViT", "original U-ViT", "StackedUNet"])
def test_every_parameter_of_every_method_has_a_gradient(name):
    for spec in METHODS:
        if refused(name, spec) or not (learned := list(scalelong.parameters(net := _trained(name, spec)))):
            continue
        run(net, name).square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in learned), spec


def _trained(name, spec):
    return (
        wake(scalelong.apply(make(name).train(), spec))
        if spec.phase != "inference"
        else scalelong.apply(make(name), spec)
    )


# ------------------------------------------------------------------------------------------------- from outside


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "SDXL", "UNet3DConditionModel", "UNetMotionModel"])
@torch.no_grad()
def test_freeu_equals_diffusers(name):
    ours, theirs = make(name), make(name)
    scalelong.apply(ours, FreeU(b1=1.5, b2=1.6, s1=0.9, s2=0.2))
    theirs.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
    difference = (run(ours, name) - run(theirs, name)).abs().max()
    assert difference <= 1e-6 * run(theirs, name).abs().max().clamp(min=1)


@torch.no_grad()
def test_freeu_finds_the_two_innermost_stages_of_a_deeper_network_at_any_size():
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    net = UNet2DConditionModel(
        block_out_channels=(8, 16, 16), layers_per_block=2, norm_num_groups=4, cross_attention_dim=8,
        attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip
    theirs = copy.deepcopy(net)
    theirs.enable_freeu(s1=0.9, s2=0.2, b1=1.3, b2=1.4)
    scalelong.apply(net, FreeU.named("sdxl"))
    for size in ((16, 16), (24, 8), (12, 20), (16, 16)):  # also sizes that are no power of two
        x, text = torch.randn(2, 4, *size), torch.randn(2, 3, 8)
        torch.testing.assert_close(net(x, 10, text).sample, theirs(x, 10, text).sample, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_version_2_of_freeu_follows_the_published_formula():
    x, s = torch.randn(2, 6, 8, 8), torch.randn(2, 4, 8, 8)
    module = FreeU(1.5, 1.6, 1.0, 1.0, version=2).build([scalelong.SkipShape(4)])
    skip, backbone = module.join(s, x, 1)
    mean = x.mean(1, keepdim=True)
    low, high = mean.amin((2, 3), keepdim=True), mean.amax((2, 3), keepdim=True)
    expected = x.clone()
    expected[:, :3] *= 1 + 0.5 * (mean - low) / (high - low)
    torch.testing.assert_close(backbone, expected)
    torch.testing.assert_close(skip, s)  # s = 1


@torch.no_grad()
def test_freeu_on_tokens_filters_the_map_and_leaves_the_other_tokens_alone():
    net = scalelong.apply(make("scalelong.UViT"), FreeU(2.0, 1.0, 0.0, 1.0))
    skip, x = torch.randn(2, 17, 16), torch.randn(2, 17, 16)
    s, h = scalelong.scale_skip(net, skip, 3, x)  # the innermost
    assert torch.equal(s[:, 0], skip[:, 0])
    assert torch.equal(h[:, 0], x[:, 0])
    torch.testing.assert_close(h[:, 1:, :8], 2 * x[:, 1:, :8])
    assert torch.equal(h[:, :, 8:], x[:, :, 8:])
    assert s[:, 1:].mean(1).abs().max() < 1e-6  # s = 0 cuts the mean, the lowest frequency
    assert torch.equal(scalelong.scale_skip(net, skip, 1, x)[0], skip)  # the outermost is in no stage


@torch.no_grad()
def test_norm_over_both_equals_hunyuan_dits_skip_norm():
    """A U-ViT block with the norm from outside equals Hunyuan-DiT's own norm in front of its `skip_linear`."""
    from diffusers.models.normalization import FP32LayerNorm

    torch.manual_seed(0)
    net = OriginalUViT().eval()
    norms = [FP32LayerNorm(32, elementwise_affine=True, eps=1e-6) for _ in range(3)]
    reference = copy.deepcopy(net)
    for k, norm in enumerate(norms):  # out_blocks[k] joins skip 3 − k
        nn.init.normal_(norm.weight, mean=1.0, std=0.2)
        nn.init.normal_(norm.bias, std=0.2)
        linear = reference.out_blocks[k].skip_linear
        reference.out_blocks[k].skip_linear = nn.Sequential(norm, linear)
    scalelong.apply(net, NormScaling("layer", over="both"))
    for k, norm in enumerate(norms):
        net.skip_scaling.gains[2 - k].copy_(norm.weight)
        net.skip_scaling.offsets[2 - k].copy_(norm.bias)
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([3, 400])
    torch.testing.assert_close(net(x, t), reference(x, t), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_identity_init_starts_near_the_trained_network_and_reports_how_far(caplog):
    name = "UNet2DModel"
    call = example(name)
    plain, far = run(make(name), name), run(scalelong.apply(make(name), NormScaling()), name)
    with pytest.raises(InvalidValueError, match="example must be the arguments of one call"):
        scalelong.apply(make(name), NormScaling(init="identity"))
    for over in ("skip", "both"):
        with caplog.at_level(logging.INFO, logger="scalelong"):
            net = scalelong.apply(make(name), NormScaling(init="identity", over=over), example=call.args)
        moved = ((run(net, name) - plain).norm() / plain.norm()).item()
        assert moved < ((far - plain).norm() / plain.norm()).item()
        assert f"moves the output by {moved:.3g}" in caplog.text
        assert f"moves the output by {moved:.3g}" in str(scalelong.describe(net))


@EVERY
@torch.no_grad()
def test_skip_tuning_with_rho_of_one_is_bit_equal(name):
    net = make(name)
    plain = run(net, name)
    assert torch.equal(run(scalelong.apply(net, SkipTuning(1.0)), name), plain)


@pytest.mark.parametrize("name", ["UNet2DModel", "UNetMotionModel", "scalelong.UViT", "lucidrains Unet"])
@torch.no_grad()
def test_skip_tuning_within_a_range_of_timesteps(name):
    call = example(name)  # t = 3 and 400, UNetMotionModel's 3 alone
    plain, tuned = run(make(name), name), run(scalelong.apply(make(name), SkipTuning(0.5)), name)
    for span, expected in (((0, 1000), tuned), ((500, 600), plain), ((0, 100), None)):
        output = run(scalelong.apply(make(name), SkipTuning(0.5, timesteps=span)), name)
        if expected is None:  # the first sample only
            frames = len(output) // len(call.args[1])
            torch.testing.assert_close(output[:frames], tuned[:frames])
            torch.testing.assert_close(output[frames:], plain[frames:])
        else:
            torch.testing.assert_close(output, expected)


def test_the_adapter_starts_bit_equal_trains_alone_and_is_saved_alone(tmp_path):
    from safetensors.torch import load_file

    name = "UNet2DConditionModel"
    reference = make(name).requires_grad_(False)  # torch selects kernels by this flag
    before = {key: value.clone() for key, value in reference.state_dict().items()}
    net = scalelong.apply(make(name).train(), SkipAdapter(rank=4))
    assert torch.equal(run(net.eval(), name), run(reference, name))
    optimizer = torch.optim.AdamW([p for p in net.train().parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        run(net, name).square().mean().backward()
        optimizer.step()
    changed = [key for key, value in net.state_dict().items() if not torch.equal(value, before.get(key, value + 1))]
    assert changed
    assert all(key.startswith("skip_scaling.") for key in changed)
    scalelong.save_scaling(net, tmp_path)
    assert set(load_file(tmp_path / "scaling.safetensors")) == {key.removeprefix("skip_scaling.") for key in changed}
    tuned = scalelong.load_scaling(make(name), tmp_path)
    assert torch.equal(run(tuned, name), run(net.eval(), name))


# ---------------------------------------------------------------------------------- joins, phases, placement


def test_lerp_on_sums_and_mp_on_concatenations_found_by_an_example():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    added, joined = Add().eval(), Root().eval()
    scalelong.apply(added, LerpScaling(0.3), example=(x,))
    one = added.stem(x).relu()
    two = added.down(one).relu()
    up = nn.functional.interpolate
    h = torch.lerp(two, up(added.middle(added.low(two).relu()), scale_factor=2.0), 0.3)
    h = torch.lerp(one, up(added.up2(h).relu(), scale_factor=2.0), 0.3)
    torch.testing.assert_close(added(x), added.head(added.up1(h).relu()))
    with pytest.raises(UnsupportedNetworkError, match=r"MagnitudePreserving.*concatenated, but long skip 1 .*added"):
        scalelong.apply(added, MagnitudePreserving(), example=(x,), replace=True)
    with pytest.raises(UnsupportedNetworkError, match=r"LerpScaling.*added, but long skip 1 .*concatenated"):
        scalelong.apply(joined, LerpScaling(), example=(x,))
    scalelong.apply(joined, MagnitudePreserving(0.3), example=(x,))
    assert not torch.allclose(joined(x), scalelong.remove(joined)(x))


def test_a_network_that_passes_the_skip_alone_is_told_to_pass_the_backbone():
    class Own(nn.Module):
        long_skips = (4,)

        def forward(self, x):
            return torch.cat([x, scalelong.scale_skip(self, x, 1)], dim=1)

    net, x = scalelong.apply(Own(), MagnitudePreserving()), torch.randn(1, 4, 2, 2)
    with pytest.raises(UnsupportedNetworkError, match=r"skip, x = scale_skip\(self, skip, i, x\)"):
        net(x)


def test_after_the_norm_only_factors_act():
    for spec in (SkipTuning(0.6), GatedScaling(), SparseScaling(2), compose(ConstantScaling(0.7), SkipTuning(0.5))):
        net = scalelong.apply(make("UNet2DModel"), spec, placement="after_norm")
        assert run(net, "UNet2DModel").isfinite().all()
    for spec in (NormScaling(), MagnitudePreserving(), FreeU(), SkipAdapter()):
        with pytest.raises(UnsupportedNetworkError, match="not a factor on the skip"):
            scalelong.apply(make("UNet2DModel"), spec, placement="after_norm")


@pytest.mark.filterwarnings("always")
def test_apply_warns_in_another_phase():
    for spec, training in ((FreeU(), True), (SkipTuning(), True), (NormScaling(), False), (SkipAdapter(), False)):
        net = make("UNet2DModel").train(training)
        with pytest.warns(ScalingWarning, match=f"{type(spec).__name__} is a.*network is in"):
            scalelong.apply(net, spec)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scalelong.apply(net.train(not training), spec, replace=True)
            scalelong.apply(net.train(training), ExplicitScaling([1, 0.9, 0.8, 0.7]), replace=True)


@torch.no_grad()
def test_fold_takes_constants_and_refuses_the_rest():
    name = "scalelong.UViT"
    for spec in (GatedScaling(), SparseScaling(2), SkipTuning(0.6), ConstantScaling(innermost=0.3)):
        net = wake(scalelong.apply(make(name), spec))
        expected = run(net, name)
        torch.testing.assert_close(run(scalelong.fold(net), name), expected, rtol=1e-5, atol=1e-5)
    for spec in (NormScaling(), MagnitudePreserving(), SkipAdapter(), FreeU()):
        with pytest.raises(UnsupportedNetworkError, match="cannot be folded.*not a factor"):
            scalelong.fold(scalelong.apply(make(name), spec))


# ------------------------------------------------------------------------- other values between two samples


@torch.no_grad()
def test_set_coefficients_equals_a_new_scaling_and_touches_no_hook():
    name = "UNet2DModel"
    net = scalelong.apply(make(name), SkipTuning(0.9))
    scaler, hooks = scaling_of(net), [dict(m._forward_pre_hooks) for m in net.modules()]
    for spec in (SkipTuning(0.5), ConstantScaling(0.7), UniformScaling(0.3)):
        assert scalelong.set_coefficients(net, spec) is net
        assert torch.equal(run(net, name), run(scalelong.apply(make(name), spec), name))
        assert scalelong.describe(net).scaling == spec
        assert net.config["scalelong"]["scaling"] == spec.to_dict()
    scalelong.set_coefficients(net, [1.0, 0.9, 0.8, 0.7])
    assert [row.coefficient for row in scalelong.describe(net).rows] == [1.0, 0.9, 0.8, 0.7]
    assert scaling_of(net) is scaler
    assert [dict(m._forward_pre_hooks) for m in net.modules()] == hooks
    with pytest.raises(UnsupportedNetworkError, match="3 values but there are 4"):
        scalelong.set_coefficients(net, [1.0, 0.9, 0.8])
    with pytest.raises(UnsupportedNetworkError, match="not to FreeU"):
        scalelong.set_coefficients(net, FreeU())
    with pytest.raises(UnsupportedNetworkError, match="not to SelfConditioning"):
        scalelong.set_coefficients(net, SelfConditioning("mid_block"))
    with pytest.raises(ScalingStateError, match="not scaled"):
        scalelong.set_coefficients(make(name), [1.0] * 4)
    with pytest.raises(UnsupportedNetworkError, match="no coefficients that can be set"):
        scalelong.set_coefficients(scalelong.apply(make(name), LearnableScaling()), [1.0] * 4)


@torch.no_grad()
def test_a_part_of_a_composition_is_set_alone():
    name = "UNet2DModel"
    net = scalelong.apply(make(name), compose(ConstantScaling(0.7), FreeU()))
    scalelong.set_coefficients(net, FreeU.named("sd1.5"))
    expected = compose(ConstantScaling(0.7), FreeU.named("sd1.5"))
    assert scaling_of(net).spec == expected
    assert torch.equal(run(net, name), run(scalelong.apply(make(name), expected), name))


TUNED = {
    "skip-tuning": (SkipTuning(1.0), SkipTuning(0.6)),
    "cs": (ConstantScaling(0.7), [1.0, 0.3, 0.2, 0.1]),
    "timesteps": (SkipTuning(0.8, timesteps=(0, 100)), SkipTuning(0.5, timesteps=(0, 900))),
    "freeu": (FreeU(), FreeU.named("sd1.5")),
    "composed": (compose(ConstantScaling(0.7), FreeU()), FreeU.named("sd1.5")),
}


@pytest.mark.parametrize("case", TUNED)
@torch.no_grad()
def test_a_compiled_network_takes_other_coefficients_without_recompiling(case):
    first, second = TUNED[case]
    name = "guided-diffusion"
    net = scalelong.apply(make(name), first)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, name), run(net, name), rtol=1e-5, atol=1e-5)
    scalelong.set_coefficients(compiled, second)
    with torch._dynamo.config.patch(error_on_recompile=True):
        output = run(compiled, name)
    torch.testing.assert_close(output, run(net, name), rtol=1e-5, atol=1e-5)
    scalelong.set_coefficients(net, first)
    assert not torch.allclose(output, run(net, name), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["UNet2DModel", "UNet2DConditionModel", "scalelong.UViT", "original U-ViT", "StackedUNet"]
)
def test_every_method_compiles_to_one_graph(name):
    from test_training_stack import compiled_once

    for spec in METHODS:
        if not refused(name, spec):
            compiled_once(scalelong.apply(make(name), spec), name)


# --------------------------------------------------------------------------- what a pipeline brings along


@torch.no_grad()
def test_controlnet_residuals_are_scaled_with_the_skip():
    from diffusers import ControlNetModel

    name = "UNet2DConditionModel"
    net = make(name)
    control = ControlNetModel.from_unet(net, conditioning_embedding_out_channels=(4, 4, 4, 8)).eval()
    x, t, text = example(name).args
    torch.manual_seed(0)
    downs, mid = control(x, t, text, controlnet_cond=torch.rand(2, 3, 64, 64), return_dict=False)
    downs = [torch.randn_like(d) for d in downs]  # a trained one is not zero
    kwargs = {"down_block_additional_residuals": tuple(downs), "mid_block_additional_residual": mid}
    plain = net(x, t, text, **kwargs).sample
    assert torch.equal(scalelong.apply(net, SkipTuning(1.0))(x, t, text, **kwargs).sample, plain)
    seen = {}
    scaling_of(net).register_forward_hook(lambda m, args, out: seen.setdefault(args[1], args[0].clone()))
    net(x, t, text, **kwargs)
    with_control = dict(seen)
    seen.clear()
    net(x, t, text)
    assert all(not torch.allclose(with_control[i], seen[i]) for i in seen)  # skip and residual together


def test_a_pass_that_reaches_no_hook_of_the_network_does_not_reuse_a_timestep():
    name = "UNet2DModel"
    net = scalelong.apply(make(name), SkipTuning(0.5, timesteps=(0, 500)))
    x = example(name).args[0]
    with torch.no_grad():
        net(x, 10)
        with pytest.raises(UnsupportedNetworkError, match="has not seen a timestep"):
            net.forward(x, 900)
        with pytest.raises(RuntimeError):
            net(torch.randn(1, 1, 8, 8), 10)  # a pass that fails
    assert scaling_of(net).active is None


@pytest.mark.parametrize("spec", [SkipTuning(0.5, timesteps=(0, 500)),
                                  compose(SkipAdapter(4), SkipTuning(0.5, timesteps=(0, 500)))], ids=str)  # fmt: skip
def test_checkpointed_blocks_are_recomputed_with_the_timestep_of_their_pass(spec):
    name = "UNet2DConditionModel"
    x, t, text = example(name).args
    gradients = []
    for checkpointed in (False, True):
        net = wake(scalelong.apply(make(name), spec)).train().requires_grad_(True)
        if checkpointed:
            net.enable_gradient_checkpointing()
        net(x, t, text).sample.square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_freeus_b_is_not_rounded_to_half_precision():
    backbone = torch.full((1, 4, 4, 4), 192.0, dtype=torch.bfloat16)
    module = FreeU(1.3, 1.4, 1.0, 1.0).build([scalelong.SkipShape(4)] * 2)
    _, amplified = module(backbone, 2, backbone)
    assert torch.equal(amplified[:, :2], (backbone * 1.3)[:, :2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision(dtype):
    name = "UNet2DConditionModel"
    x, t, text = example(name).args
    for spec in (SkipTuning(0.7), SkipTuning(0.7, timesteps=(0, 500)), FreeU(), FreeU(version=2), NormScaling("rms")):
        net = scalelong.apply(make(name), spec)
        exact = net(x, t, text).sample
        half = net.to(dtype)(x.to(dtype), t, text.to(dtype)).sample
        assert half.dtype == dtype
        assert (half.float() - exact).norm() < 0.05 * exact.norm(), spec


@torch.no_grad()
def test_freeu_and_skip_tuning_act_beside_a_lora():
    from test_training_stack import lora
    from test_training_stack import wake as wake_lora

    name = "UNet2DConditionModel"
    for spec in (SkipTuning(0.6), FreeU()):
        net = make(name)
        net.add_adapter(lora())
        with_lora = run(wake_lora(net), name)
        both = run(scalelong.apply(net, spec), name)
        assert not torch.allclose(both, with_lora, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(both, run(scalelong.apply(make(name), spec), name), rtol=1e-3, atol=1e-3)
        assert torch.equal(run(scalelong.remove(net), name), with_lora)


def test_two_processes_train_a_two_sided_method(tmp_path):
    from ddp_worker import run_two_processes

    run_two_processes(["guided-diffusion"], tmp_path, NormScaling("rms", over="both"))
