"""Official weights give the official network's output, and a wrong file names the keys."""

import pytest
import torch
from reference_uvit import make_state_dict, run
from safetensors.torch import save_file

from scalelong import ConstantScaling, LearnableScaling, NoScaling, SkipTuning, UniformScaling, UViT, compose, describe
from scalelong.errors import DataError, InvalidValueError, UnsupportedNetworkError

SIZES = {"width": 48, "patches_side": 4, "patch": 2, "channels": 3, "n": 3}
CONDITIONS = {
    "plain": {},
    "plain without convolution": {"conv": False},
    "classes": {"classes": 11, "time_mlp": True},
    "classes without convolution": {"classes": 11, "conv": False, "qkv_bias": True},
    "text": {"text": (7, 20), "time_mlp": True},
    "text without convolution": {"text": (5, 12), "conv": False, "mlp": 2},
}
METHODS = {
    "standard": (None, None, {}),
    "uniform": (None, UniformScaling(), {"uniform": 2**-0.5}),
    "cs": (None, ConstantScaling(0.5), {"kappa": 0.5}),
    "ls": ("shared", None, {}),
    "ls of each skip": ("own", LearnableScaling(shared=False), {}),
}


def state_dict(se=None, **condition):
    return make_state_dict(**SIZES, **condition, se=se, generator=torch.Generator().manual_seed(3))


def inputs(state):
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([0.5, 731.25])
    extra = {}
    if "label_emb.weight" in state:
        extra["y"] = torch.tensor([3, 10])
    if "context_embed.weight" in state:
        tokens = state["pos_embed"].shape[1] - 17
        extra["context"] = torch.randn(2, tokens, state["context_embed.weight"].shape[1])
    return x, t, extra


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("method", METHODS)
def test_official_weights_give_the_reference_output(condition, method):
    se, scaling, options = METHODS[method]
    state = state_dict(se, **CONDITIONS[condition])
    model = UViT.from_official(state, img_size=8, num_heads=4, scaling=scaling)
    x, t, extra = inputs(state)
    expected = run(state, x, t, heads=4, **extra, **options)
    assert expected.std() > 0.05
    torch.testing.assert_close(model(x, t, **extra), expected, atol=1e-5, rtol=1e-5)


def test_methods_differ_so_that_the_comparison_means_something():
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([1.0, 500.0])
    outputs = [run(state_dict(se), x, t, heads=4, **options) for se, _, options in METHODS.values()]
    for k, a in enumerate(outputs):
        assert all((a - b).abs().max() > 1e-2 for b in outputs[k + 1 :])


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_files_load_without_pickle_being_run(tmp_path, suffix):
    state = state_dict("shared")
    path = tmp_path / f"weights{suffix}"
    torch.save(state, path) if suffix == ".pth" else save_file(state, path)
    model = UViT.from_official(path, img_size=8, num_heads=4)
    assert model.skip_scaling.spec == LearnableScaling(gate="tokens", activation="relu")
    x, t, _ = inputs(state)
    torch.testing.assert_close(model(x, t), run(state, x, t, heads=4), atol=1e-5, rtol=1e-5)


def test_a_pickle_that_contains_code_is_rejected_and_not_run(tmp_path):
    planted = tmp_path / "planted"

    class Bomb:
        def __reduce__(self):
            return open, (str(planted), "w")

    path = tmp_path / "weights.pth"
    torch.save({"x": Bomb()}, path)
    planted.unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"weights\.pth"):
        UViT.from_official(path, img_size=8, num_heads=4)
    assert not planted.exists()


def test_without_a_requested_scaling_the_weights_decide():
    assert describe(UViT.from_official(state_dict(), img_size=8, num_heads=4)).scaling == NoScaling()
    ls = UViT.from_official(state_dict("own"), img_size=8, num_heads=4)
    assert ls.skip_scaling.spec == LearnableScaling(shared=False, gate="tokens", activation="relu")


def test_ls_without_its_weights_names_the_keys_unless_it_starts_at_the_identity():
    with pytest.raises(UnsupportedNetworkError, match=r"se\.layer1\.weight"):
        UViT.from_official(state_dict(), img_size=8, num_heads=4, scaling=LearnableScaling())
    composed = compose(LearnableScaling(), SkipTuning(0.8))
    with pytest.raises(UnsupportedNetworkError, match=r"se\.layer1\.weight"):
        UViT.from_official(state_dict(), img_size=8, num_heads=4, scaling=composed)
    state = state_dict()
    model = UViT.from_official(state, img_size=8, num_heads=4, scaling=LearnableScaling(init="identity"))
    x, t, _ = inputs(state)
    torch.testing.assert_close(model(x, t), run(state, x, t, heads=4), atol=1e-5, rtol=1e-5)


def test_requested_ls_keeps_the_official_relu():
    state = state_dict("shared")
    model = UViT.from_official(state, img_size=8, num_heads=4, scaling=LearnableScaling())
    assert model.skip_scaling.spec == LearnableScaling(activation="relu")
    x, t, _ = inputs(state)
    torch.testing.assert_close(model(x, t), run(state, x, t, heads=4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [NoScaling(), ConstantScaling(0.5), LearnableScaling("ie"), LearnableScaling(shared=False),
     LearnableScaling(activation="mish")],
)  # fmt: skip
def test_weights_with_a_calibration_network_reject_a_scaling_that_does_not_fit(scaling):
    with pytest.raises(UnsupportedNetworkError, match=r"se\.layer1"):
        UViT.from_official(state_dict("shared"), img_size=8, num_heads=4, scaling=scaling)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda s: s.pop("norm.weight"), r"missing: norm\.weight"),
        (lambda s: s.pop("mid_block.attn.qkv.weight"), r"mid_block\.attn\.qkv\.weight"),
        (lambda s: s.update(extra=torch.zeros(1)), "unexpected: extra"),
        (lambda s: s.update({"norm.bias": torch.zeros(3)}), r"wrong shape: norm\.bias \(3,\) instead of \(48,\)"),
        (lambda s: [s.pop(k) for k in list(s) if k.startswith("out_blocks.1.")], r"out_blocks has blocks \[0, 2\]"),
        (lambda s: s.update({"se.layer1.weight": torch.zeros(1, 17)}), r"se\.layer2\.weight"),
        (lambda s: s.clear(), "pos_embed"),
    ],
)
def test_a_wrong_or_incomplete_file_names_the_keys(spoil, match):
    state = state_dict()
    spoil(state)
    with pytest.raises(UnsupportedNetworkError, match=match):
        UViT.from_official(state, img_size=8, num_heads=4)


def test_an_image_size_that_does_not_fit_shows_the_token_counts():
    with pytest.raises(InvalidValueError, match="img_size 16.*17 tokens, but 1 \\+ 64 patches make 65"):
        UViT.from_official(state_dict(), img_size=16, num_heads=4)
    with pytest.raises(InvalidValueError, match="-41 text tokens.*24 tokens, minus 64 patches"):
        UViT.from_official(state_dict(text=(7, 20)), img_size=16, num_heads=4)


def test_a_missing_or_invalid_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match=r"none\.pth"):
        UViT.from_official(tmp_path / "none.pth", img_size=8, num_heads=4)
    junk = tmp_path / "junk.pth"
    junk.write_bytes(b"not weights")
    with pytest.raises(DataError, match=r"junk\.pth"):
        UViT.from_official(junk, img_size=8, num_heads=4)
    with pytest.raises(DataError, match="state dict"):
        UViT.from_official({"a": 3}, img_size=8, num_heads=4)
