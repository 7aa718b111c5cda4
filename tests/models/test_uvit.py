"""The U-ViT: sizes, inputs, scaling by the common mechanism, and what a training stack does to a model."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scalelong
from scalelong import (
    ConstantScaling,
    ExplicitScaling,
    LearnableScaling,
    NoScaling,
    ReZeroScaling,
    ScaleLongError,
    StableScaling,
    UniformScaling,
    UViT,
)

TINY = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 32, "depth": 6, "num_heads": 4}
SCALINGS = [NoScaling(), UniformScaling(), ConstantScaling(0.5), LearnableScaling(), LearnableScaling(shared=False)]


def tiny(seed=0, **options):
    torch.manual_seed(seed)
    model = UViT(**TINY, **options)
    with torch.no_grad():  # initial weights are small: make every part count
        for p in model.parameters():
            p.mul_(3) if p.ndim > 1 else None
    return model


def batch(n=2):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 1, 8, 8, generator=g), torch.rand(n, generator=g) * 1000


PAPER = {
    "cifar10-uvit-s": ({"img_size": 32, "patch_size": 2}, 44e6),
    "celeba64-uvit-s": ({"img_size": 64, "patch_size": 4}, 44e6),
    "imagenet64-uvit-m": (
        {"img_size": 64, "patch_size": 4, "embed_dim": 768, "depth": 16, "num_heads": 12, "num_classes": 1001},
        131e6,
    ),
    "imagenet64-uvit-l": (
        {"img_size": 64, "patch_size": 4, "embed_dim": 1024, "depth": 20, "num_heads": 16, "num_classes": 1001},
        287e6,
    ),
    "coco-uvit-s": ({"img_size": 32, "in_chans": 4, "clip_dim": 768, "num_clip_token": 77}, 45e6),
    "coco-uvit-s deep": ({"img_size": 32, "in_chans": 4, "clip_dim": 768, "num_clip_token": 77, "depth": 16}, 58e6),
}


@pytest.mark.parametrize("name", PAPER)
def test_parameter_counts_are_the_papers_within_two_per_cent(name):
    sizes, expected = PAPER[name]
    with torch.device("meta"):
        model = UViT(**sizes)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected, rel=0.02)


def test_kappa_one_is_the_unscaled_network_bit_for_bit():
    x, t = batch()
    plain = tiny()(x, t)
    assert torch.equal(tiny(scaling=ExplicitScaling([1, 1, 1]))(x, t), plain)
    assert torch.equal(tiny(scaling=ConstantScaling(1.0))(x, t), plain)
    assert torch.equal(tiny(scaling=LearnableScaling(init="identity"))(x, t), plain)
    assert torch.equal(tiny(scaling=LearnableScaling("scalar"))(x, t), plain)


def test_skip_1_is_the_outermost():
    """Cutting skip i must make the output independent of what in_blocks[i-1] passes over the skip."""
    model = tiny(scaling=ExplicitScaling([1, 0, 1]))
    x, t = batch()
    before = model(x, t)
    hook = model.out_blocks[1].register_forward_pre_hook(lambda m, a: (a[0], a[1] + 100.0))
    assert not torch.equal(model(x, t), before)
    hook.remove()
    seen = {}
    for k in range(3):
        model.out_blocks[k].register_forward_hook(lambda m, a, o, k=k: seen.__setitem__(k, a[1]))
    model(x, t)
    assert (seen[1] == 0).all()  # out_blocks[1] consumes skip 2
    assert (seen[0] != 0).any()
    assert (seen[2] != 0).any()


def test_scaling_in_the_constructor_equals_apply_afterwards():
    x, t = batch()
    scaled = scalelong.apply(tiny(), ConstantScaling(0.5))
    assert torch.equal(scaled(x, t), tiny(scaling=ConstantScaling(0.5))(x, t))
    assert [row.coefficient for row in scalelong.describe(scaled).rows] == [1.0, 0.5, 0.25]
    assert torch.equal(scalelong.remove(scaled)(x, t), tiny()(x, t))


def test_no_scaling_counts_as_unscaled():
    model = tiny(scaling=NoScaling())
    assert not hasattr(model, "skip_scaling")
    scalelong.apply(model, ConstantScaling(0.5))
    with pytest.raises(ScaleLongError, match="already scaled"):
        scalelong.apply(model, ConstantScaling(0.7))


def test_learnable_scaling_leaves_the_other_initial_weights_alone():
    plain, ls = tiny(seed=5), tiny(seed=5, scaling=LearnableScaling())
    for name, value in plain.state_dict().items():
        assert torch.equal(ls.state_dict()[name], value), name


def test_cs_adds_no_key_and_ls_few():
    keys = set(tiny().state_dict())
    assert set(tiny(scaling=ConstantScaling(0.5)).state_dict()) == keys
    assert {k.split(".")[0] for k in set(tiny(scaling=LearnableScaling()).state_dict()) - keys} == {"skip_scaling"}


def test_initialisation_is_truncated_normal_with_zero_biases():
    model = UViT(img_size=16, embed_dim=256, depth=2, num_heads=4, num_classes=11, mlp_time_embed=True)
    assert model.mid_block.mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.05)
    assert all((m.bias == 0).all() for m in model.modules() if isinstance(m, torch.nn.Linear) and m.bias is not None)
    assert model.label_emb.weight.std().item() == pytest.approx(1.0, rel=0.1)  # PyTorch's own
    wide = UViT(img_size=16, embed_dim=256, depth=2, num_heads=4, init_std=0.1)
    assert wide.mid_block.attn.qkv.weight.std().item() == pytest.approx(0.1, rel=0.05)


def test_time_may_be_fractional_a_number_or_whole():
    model = tiny()
    x, _ = batch()
    assert torch.equal(model(x, 10), model(x, torch.tensor([10, 10])))
    assert torch.equal(model(x, torch.tensor(10.0)), model(x, torch.tensor([10.0, 10.0])))
    assert not torch.equal(model(x, 10.25), model(x, 10.5))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"img_size": 9}, "img_size.*patch_size=2.*9"),
        ({"embed_dim": 30}, "embed_dim.*num_heads=4.*30"),
        ({"depth": 1}, "depth.*1"),
        ({"depth": 0}, "depth.*0"),
        ({"patch_size": 0}, "patch_size.*0"),
        ({"in_chans": -1}, "in_chans.*-1"),
        ({"embed_dim": 32.0}, "embed_dim.*32.0"),
        ({"mlp_ratio": 0}, "mlp_ratio.*0"),
        ({"num_classes": 3, "clip_dim": 4, "num_clip_token": 2}, "num_classes and clip_dim"),
        ({"clip_dim": 4}, "num_clip_token"),
        ({"scaling": "css"}, "did you mean 'cs'"),
        ({"scaling": ExplicitScaling([1, 1])}, "3 long skips"),
    ],
)
def test_invalid_sizes_are_rejected_by_name(options, match):
    with pytest.raises(ValueError, match=match):
        UViT(**{**TINY, **options})


def test_invalid_inputs_are_rejected():
    model, (x, t) = tiny(), batch()
    for bad in (x[0], x[:, :, :6], x.expand(2, 3, 8, 8)):
        with pytest.raises(ValueError, match=r"\(batch, 1, 8, 8\)"):
            model(bad, t)
    with pytest.raises(ValueError, match="no classes"):
        model(x, t, y=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"y must be labels \(num_classes=4\)"):
        tiny(num_classes=4)(x, t)
    with pytest.raises(ValueError, match=r"y must be \(2,\), got \(1,\)"):
        tiny(num_classes=4)(x, t, y=torch.tensor([1]))
    text = tiny(clip_dim=6, num_clip_token=5)
    with pytest.raises(ValueError, match="context must be text tokens"):
        text(x, t)
    with pytest.raises(ValueError, match=r"\(2, 5, 6\), got \(2, 4, 6\)"):
        text(x, t, context=torch.randn(2, 4, 6))


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_save_and_load_round_trip_weights_and_scaling(tmp_path, scaling):
    model, (x, t) = tiny(scaling=scaling), batch()
    model.save_pretrained(tmp_path)
    loaded = UViT.from_pretrained(tmp_path)
    assert torch.equal(loaded(x, t), model(x, t))
    assert scalelong.describe(loaded).scaling == scaling


def test_a_scaling_changed_later_is_the_one_that_is_saved(tmp_path):
    model, (x, t) = tiny(scaling=ConstantScaling(0.5)), batch()
    scalelong.apply(model, LearnableScaling(), replace=True)
    model.save_pretrained(tmp_path / "ls")
    assert torch.equal(UViT.from_pretrained(tmp_path / "ls")(x, t), model(x, t))
    scalelong.remove(model)
    model.save_pretrained(tmp_path / "none")
    loaded = UViT.from_pretrained(tmp_path / "none")
    assert not hasattr(loaded, "skip_scaling")
    assert torch.equal(loaded(x, t), model(x, t))


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_a_deep_copy_is_independent(scaling):
    model, (x, t) = tiny(scaling=scaling), batch()
    twin = copy.deepcopy(model)
    before = twin(x, t)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert torch.equal(twin(x, t), before)


@pytest.mark.parametrize("scaling", [ConstantScaling(0.5), LearnableScaling()], ids=repr)
def test_gradient_checkpointing_gives_equal_gradients(scaling):
    x, t = batch()
    plain, checkpointed = tiny(scaling=scaling), tiny(scaling=scaling)
    checkpointed.enable_gradient_checkpointing()
    for model in (plain, checkpointed):
        model(x, t).square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_compiles_as_one_graph_and_only_once(scaling):
    torch._dynamo.reset()
    model, (x, t) = tiny(scaling=scaling), batch()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            # a compiled network takes torch's operators where the other takes our kernels
            torch.testing.assert_close(compiled(x + step, t), model(x + step, t), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_runs_and_learns_under_bf16_autocast(scaling):
    model, (x, t) = tiny(scaling=scaling), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x, t)
        out.float().square().mean().backward()
    exact = model(x, t)
    assert (out.float() - exact).norm() / exact.norm() < 0.05
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_half_precision_weights_stay_half():
    model = tiny(scaling=LearnableScaling()).to(torch.bfloat16)
    x, t = batch()
    assert model(x.to(torch.bfloat16), t).dtype == torch.bfloat16


@settings(max_examples=15, deadline=None)
@given(
    side=st.integers(1, 3),
    patch=st.integers(1, 3),
    chans=st.integers(1, 3),
    n=st.integers(1, 4),
    kappa=st.floats(0.3, 1.0),
    classes=st.sampled_from([None, 3]),
)
def test_any_size_keeps_the_shape_and_the_order_of_kappa(side, patch, chans, n, kappa, classes):
    size = side * patch
    model = UViT(img_size=size, patch_size=patch, in_chans=chans, embed_dim=8, depth=2 * n, num_heads=2,
                 num_classes=classes, scaling=ConstantScaling(kappa))  # fmt: skip
    x = torch.randn(2, chans, size, size)
    y = torch.tensor([0, 2]) if classes else None
    assert model(x, torch.tensor([1.0, 2.0]), y=y).shape == x.shape
    assert [row.coefficient for row in scalelong.describe(model).rows] == [kappa ** (i - 1) for i in range(1, n + 1)]


# ------------------------------------------------------------------------- Table 3: scaling block outputs


def test_stable_tau_scales_every_branch(monkeypatch):
    x, t = batch()
    model = tiny(scaling=StableScaling(0.3))
    block = model.mid_block
    v = torch.randn(2, 17, 32)
    scalelong.remove(model)
    after_attention = v + 0.3 * block.attn(block.norm1(v))
    expected = after_attention + 0.3 * block.mlp(block.norm2(after_attention))
    scalelong.apply(model, StableScaling(0.3))
    torch.testing.assert_close(block(v), expected)
    assert not torch.equal(model(x, t), tiny()(x, t))
    assert torch.equal(tiny(scaling=StableScaling(1.0))(x, t), tiny()(x, t))


def test_rezero_starts_as_the_identity_of_every_block_and_learns():
    model = tiny(scaling=ReZeroScaling())
    v = torch.randn(2, 17, 32)
    assert torch.equal(model.mid_block(v), v)
    x, t = batch()
    model(x, t).square().mean().backward()
    alpha = model.skip_scaling.alpha
    assert alpha.shape == (7,)
    assert (alpha.grad != 0).all()
    assert list(scalelong.parameters(model))[0] is alpha


def test_block_scaling_requires_a_uvit():
    net = scalelong.build_unet("cifar10", block_out_channels=(32, 32, 32, 32), attention_head_dim=8)
    with pytest.raises(ScaleLongError, match="rezero.*UNet2DModel"):
        scalelong.apply(net, ReZeroScaling())


def test_a_kappa_that_almost_cuts_a_skip_warns():
    with pytest.warns(scalelong.ScalingWarning, match="0.00049"):
        UViT(**{**TINY, "depth": 24}, scaling=ConstantScaling(0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        UViT(**{**TINY, "depth": 12}, scaling=ConstantScaling(0.5))
