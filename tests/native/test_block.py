"""The block as one operation: the same numbers, and out of the way where something wants to see its parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scalelong.models import UViT
from scalelong.models.uvit import Block
from scalelong.native import available
from scalelong.native import block as native
from scalelong.native.library import has_products, library

pytestmark = pytest.mark.skipif(not available(), reason="no C compiler here")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch of every block that was run as one operation."""
    seen: list[int] = []
    run = native.block

    def watched(x: Tensor, *rest: object) -> Tensor:
        seen.append(len(x))
        return run(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(native, "block", watched)
    return seen


def small(qkv_bias: bool = False, tokens: int = 7, ratio: float = 4.0) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    block = Block(32, 2, ratio, qkv_bias)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block, torch.randn(3, tokens, 32)


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize(("tokens", "ratio"), [(7, 4.0), (1, 1.0), (100, 2.6)])  # rows in parts; a width of 83
def test_result_and_every_gradient_are_those_of_float64(
    calls: list[int], qkv_bias: bool, tokens: int, ratio: float
) -> None:
    block, x = small(qkv_bias, tokens, ratio)
    exact, z = copy.deepcopy(block).double(), x.double().requires_grad_()
    x.requires_grad_()
    out, expected = block(x), exact(z)
    assert calls == [3]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    expected.square().sum().backward()
    for mine, theirs in [(x, z), *zip(block.parameters(), exact.parameters(), strict=True)]:
        assert (mine.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()


def test_what_is_not_finite_stays_so(calls: list[int]) -> None:
    block, x = small()
    x[1, 2, 3] = float("nan")
    found = block(x.requires_grad_())
    assert found[1].isnan().any()
    assert found[[0, 2]].isfinite().all()
    found.sum().backward()
    assert block.mlp.fc1.weight.grad.isnan().any()  # type: ignore[union-attr]
    assert calls == [3]


def test_the_kernels_are_found_right_whatever_the_caller_s_defaults_are() -> None:
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert library.__wrapped__() is not None
            assert has_products.__wrapped__()
    finally:
        torch.set_default_dtype(was)


def test_without_torchs_matrix_product_the_parts_are_run(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = small()
    whole = block(x)
    monkeypatch.setattr(native, "has_products", lambda: False)
    torch.testing.assert_close(block(x), whole)
    assert calls == [3]


def test_a_norm_without_weights_is_left_to_torch(calls: list[int]) -> None:
    block, x = small()
    block.norm1 = torch.nn.LayerNorm(32, elementwise_affine=False)
    block(x).sum().backward()
    assert calls == []


@pytest.mark.parametrize(("batch", "tokens", "ratio"), [(3, 7, 4.0), (3, 7, 1.0), (50, 40, 2.6)])  # the last in parts
def test_without_gradients_the_result_is_the_same_bit_for_bit(
    calls: list[int], batch: int, tokens: int, ratio: float
) -> None:
    block, _ = small(tokens=tokens, ratio=ratio)
    x = torch.randn(batch, tokens, 32)
    kept = block(x)
    with torch.no_grad():
        assert torch.equal(block(x), kept)
    assert calls == [batch, batch]


def test_without_gradients_nothing_is_kept() -> None:
    loaded = library()
    assert loaded is not None
    sizes = (1000, 17, 64, 256, 4)
    assert 20 * loaded.block_keeps(*sizes, 0, 1) < loaded.block_keeps(*sizes, 1, 1)


def test_frozen_parameters_get_no_gradient_and_the_others_do(calls: list[int]) -> None:
    block, x = small()
    block.requires_grad_(False)
    block.mlp.fc1.weight.requires_grad_()
    block(x).sum().backward()
    assert [name for name, p in block.named_parameters() if p.grad is not None] == ["mlp.fc1.weight"]
    assert calls == [3]


def test_a_gradient_of_the_gradient_is_that_of_float64() -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        block, x = small()
        block, x = block.to(dtype), x.to(dtype).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has no second derivative
            (first,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), x)[0].double())
    assert (found[0] - found[1]).norm() < 1e-4 * found[1].norm()


def test_hooks_see_the_parts(calls: list[int]) -> None:
    block, x = small()
    plain = block(x)
    seen = []
    handle = block.mlp.fc1.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    torch.testing.assert_close(block(x), plain)
    assert seen == [(3, 7, 128)]
    assert calls == [3]
    handle.remove()
    block(x)
    assert calls == [3, 3]


def test_another_module_in_a_part_s_place_is_run(calls: list[int]) -> None:
    block, x = small()
    block.mlp.fc1 = torch.nn.Sequential(block.mlp.fc1)
    block(x)
    assert calls == []


def test_autocast_keeps_to_torch(calls: list[int]) -> None:
    block, x = small()
    with torch.autocast("cpu", torch.bfloat16):
        block(x)
    assert calls == []


def test_checkpointing_computes_the_same_gradients() -> None:
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        net = UViT(img_size=8, patch_size=2, in_chans=1, embed_dim=32, depth=2, num_heads=2)
        if checkpointed:
            net.enable_gradient_checkpointing()
        net(torch.randn(2, 1, 8, 8), torch.rand(2)).square().mean().backward()
        grads.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
