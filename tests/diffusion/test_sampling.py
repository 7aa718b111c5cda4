"""The image generator: independent of the batch size, without side effects."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from diffusers import UNet2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scalelong import counter
from scalelong.counter import Stream
from scalelong.diffusion import SAMPLERS, RangeCheck, get_process, get_sampler, guided, sample, to_uint8
from scalelong.errors import InvalidValueError, ScaleLongError

SHAPE = (3, 5, 5)
LABELS = torch.arange(7) % 3
TEXT = torch.linspace(-1, 1, 7 * 4 * 2).reshape(7, 4, 2)


def toy(x, t, y=None, context=None):
    """Elementwise, so equal inputs give equal bits in any batch."""
    eps = 0.9 * x + (t / 4000).reshape(-1, 1, 1, 1)
    if y is not None:
        eps = eps + 0.1 * y.to(x).reshape(-1, 1, 1, 1)
    if context is not None:
        eps = eps - 0.1 * context[:, 0, 0].reshape(-1, 1, 1, 1)
    return eps


def images(net=toy, n=7, process="vp", **settings):
    return torch.cat(list(sample(net, n, SHAPE, process, **settings)))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_the_batch_size_does_not_change_an_image(sampler, guidance):
    settings = {
        "sampler": sampler,
        "steps": 8,
        "seed": 3,
        "clip": False,
        "y": LABELS,
        "context": TEXT,
        "guidance": guidance,
        "null_y": 3,
        "null_context": TEXT[0],
    }
    whole = images(batch_size=64, **settings)
    assert whole.shape == (7, *SHAPE)
    for batch_size in (1, 2, 3, 7):
        assert torch.equal(images(batch_size=batch_size, **settings), whole)


@given(first=st.integers(0, 6), count=st.integers(0, 7))
@settings(max_examples=20, deadline=None)
def test_image_k_does_not_depend_on_where_sampling_starts(first, count):
    count = min(count, 7 - first)
    whole = images(sampler="euler-maruyama", steps=5)
    parts = list(sample(toy, count, SHAPE, "vp", sampler="euler-maruyama", steps=5, first=first, batch_size=2))
    assert torch.equal(torch.cat([whole[:0], *parts]), whole[first : first + count])


def test_batch_size_changes_a_real_networks_images_by_rounding_only():
    unet = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    net = lambda x, t: unet(x, t).sample
    one, five = (
        torch.cat(list(sample(net, 5, (1, 8, 8), "vp", steps=12, batch_size=size, clip=False))) for size in (1, 5)
    )
    torch.testing.assert_close(one, five, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", ["euler-maruyama", "ddpm"])
def test_every_noise_draw_has_its_own_counter(sampler):
    process, draw = get_process("vp"), lambda k: counter.normal(4, Stream.SAMPLE, k + 1, 20, 7, SHAPE)
    expected = get_sampler(sampler)(guided(toy, process), draw(-1), process, 6, draw)
    assert torch.equal(images(sampler=sampler, steps=6, seed=4, first=20, clip=False), expected)


def test_seeds_and_images_differ():
    both = torch.cat([images(seed=0, clip=False), images(seed=1, clip=False)]).flatten(1)
    distances = torch.cdist(both, both) + torch.eye(14) * 100
    assert distances.min() > 1e-2


def test_sampling_does_not_use_the_global_random_state():
    before = torch.get_rng_state()
    first = [images(sampler=name, steps=4) for name in SAMPLERS]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    for one, two in zip(first, [images(sampler=name, steps=4) for name in SAMPLERS], strict=True):
        assert torch.equal(one, two)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.9))
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.precisions = set()

    def forward(self, x, t):
        mixed = x.flatten(1) @ (self.weight * torch.eye(x[0].numel()))
        self.precisions.add(mixed.dtype)
        return self.frozen(self.dropout(mixed)).reshape(x.shape)


def test_the_network_samples_in_eval_mode_and_keeps_its_modes():
    net = Dropping()
    one, two = images(net, steps=4), images(net, steps=4)
    assert torch.equal(one, two)
    assert net.training
    assert net.dropout.training
    assert not net.frozen.training


def test_no_context_leaks_into_the_consumer_between_batches():
    net = Dropping()
    for batch in sample(net, 4, SHAPE, "vp", steps=3, batch_size=2, autocast=torch.bfloat16):
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert net.dropout.training
        assert not batch.requires_grad
        assert not batch.is_inference()


def test_modes_are_restored_when_the_network_raises():
    net = Dropping()
    net.dropout.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        images(net, steps=3)
    assert net.dropout.training


def test_autocast_reaches_the_network_and_images_stay_float32():
    net = Dropping()
    x = images(net, steps=6, autocast=torch.bfloat16, clip=False)
    assert net.precisions == {torch.bfloat16}
    assert x.dtype == torch.float32
    exact = images(net, steps=6, clip=False)
    assert 0 < (x - exact).norm() < 0.05 * exact.norm()


def test_clip_clamps_images():
    loud = lambda x, t: 0.1 * x
    assert images(loud).abs().max() == 1.0
    assert images(loud, clip=False).abs().max() > 1.0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_clip_denoised_keeps_every_sampler_in_range_with_guidance_too(sampler):
    settings = {"sampler": sampler, "steps": 20, "clip": False, "y": 2, "guidance": 5.0, "null_y": 0}
    loud = lambda x, t, y: 0.1 * x - 0.05 * y.view(-1, 1, 1, 1)
    free, clipped = RangeCheck(), RangeCheck()
    images(loud, **settings, check=free)
    x = images(loud, **settings, clip_denoised=True, check=clipped)
    assert free.share == 1.0
    assert free.largest > 3
    # DDPM, DDIM and DPM-Solver++ return the predicted image; the others end at a small noise level
    assert x.abs().max() <= 1.0 + (1e-6 if sampler in ("ddpm", "ddim", "dpm-solver++") else 0.1)
    assert (clipped.far, clipped.share, str(clipped)) == (0, 0.0, "")
    assert clipped.largest == pytest.approx(x.abs().max().item())


def test_the_range_check_counts_samples_before_the_final_clamp():
    check = RangeCheck()
    for batch in (torch.tensor([[0.5, -1.4], [0.0, 1.6]]), torch.tensor([[-7.5, 0.0]])):
        check(batch)
    assert (check.n, check.far, check.largest, check.share) == (3, 2, 7.5, 2 / 3)
    assert "2 of 3" in str(check)
    assert "7.5" in str(check)


def test_one_condition_broadcasts_to_all_images():
    settings = {"guidance": 2.0, "null_y": 3, "null_context": TEXT[1]}
    each = images(y=torch.full((7,), 2), context=TEXT[5].expand(7, 4, 2), **settings)
    assert torch.equal(images(y=2, context=TEXT[5], **settings), each)
    assert not torch.equal(images(y=1, context=TEXT[5], **settings), each)


def test_guidance_moves_images_along_their_condition():
    # The toy's noise increases with y, so the mean of its images decreases with y; guidance amplifies that.
    means = {g: images(y=2, guidance=g, null_y=0, clip=False).mean().item() for g in (0.0, 1.0, 3.0)}
    assert means[0.0] > means[1.0] > means[3.0]


def test_n_0_yields_nothing():
    assert list(sample(toy, 0, SHAPE, "vp")) == []


def test_sample_accepts_sampler_and_process_objects():
    assert torch.equal(
        images(process=get_process("sd"), sampler=get_sampler("ddim")), images(process="sd", sampler="ddim")
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"process": "vpp"}, "did you mean 'vp'"),
        ({"sampler": "dimm"}, "did you mean 'ddim'"),
        ({"steps": 0}, "steps.*got 0"),
        ({"sampler": "ddim", "steps": 1001}, "steps.*got 1001"),
        ({"process": "sd", "sampler": "euler-ode"}, "euler-ode.*sd"),
        ({"batch_size": 0}, "batch_size.*got 0"),
        ({"y": torch.zeros(3).long()}, r"y must be.* 7 images.*\(3,\)"),
        ({"context": torch.zeros(2, 4, 2)}, r"context.*\(2, 4, 2\)"),
        ({"guidance": 3.0}, "guidance.*3"),
        ({"guidance": 3.0, "y": 1}, "null_y"),
        ({"guidance": 3.0, "context": TEXT, "null_context": TEXT[0, :3]}, r"null_context.*\(3, 2\)"),
    ],
)
def test_invalid_arguments_raise_before_the_first_batch(settings, message):
    with pytest.raises(InvalidValueError, match=message):
        sample(toy, 7, SHAPE, **{"process": "vp", **settings})


def test_non_finite_images_raise_with_their_indices():
    with pytest.raises(ScaleLongError, match=r"10 … 13 .*'ddim', 5 steps"):
        list(sample(lambda x, t: x * float("nan"), 8, SHAPE, "vp", sampler="ddim", steps=5, first=10, batch_size=4))


def test_importing_the_package_imports_nothing_heavier_than_torch():
    heavy = {"diffusers", "transformers", "accelerate", "scipy", "sklearn", "scalelong.skips", "scalelong.models"}
    code = f"import sys, scalelong.diffusion; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_to_uint8_rounds_to_the_nearest_level():
    levels = torch.arange(256, dtype=torch.float32)
    samples = (levels / 127.5 - 1).view(1, 1, 16, 16)
    assert torch.equal(to_uint8(samples).view(-1), levels.to(torch.uint8))
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0]).view(1, 1, 1, 5)
    assert to_uint8(values).flatten().tolist() == [0, 0, 128, 255, 255]


def test_evaluation_exports_the_same_to_uint8():
    from scalelong import evaluation

    assert evaluation.to_uint8 is to_uint8


def test_to_uint8_moves_channels_last():
    samples = torch.linspace(-1, 1, 2 * 3 * 4 * 5).view(2, 3, 4, 5)
    assert to_uint8(samples).shape == (2, 4, 5, 3)
    assert to_uint8(samples)[1, 2, 3, 0] == to_uint8(samples[1:, :1])[0, 2, 3, 0]


def test_to_uint8_rejects_nan_and_other_shapes():
    samples = torch.zeros(4, 3, 2, 2)
    samples[2, 0, 0, 0] = float("nan")
    with pytest.raises(InvalidValueError, match="1 of 4"):
        to_uint8(samples)
    with pytest.raises(InvalidValueError, match=r"\(2, 2\)"):
        to_uint8(torch.zeros(2, 2))
