"""`estimate_kappa` agrees with noise drawn pixel by pixel and with SciPy's root finder; edge cases and errors."""

import json
import math
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import integrate, optimize, stats

import scalelong
from scalelong import ConstantScaling, NoScaling, UniformScaling
from scalelong import kappa as kappa_module
from scalelong.errors import DataError, InvalidValueError, ScalingWarning, UnknownNameError
from scalelong.kappa import choose_kappa, estimate_kappa, histogram, sample_ratios
from scalelong.scaling.specs import kappa_notices


def some_images(n=64, size=8, seed=0):
    """Smooth grey-to-colour images, uint8 (n, h, w, c)."""
    rng = np.random.default_rng(seed)
    base = rng.uniform(0, 255, (n, 1, 1, 3))
    return np.clip(base + rng.normal(0, 40, (n, size, size, 3)), 0, 255).astype(np.uint8)


def drawn_ratios(images, samples, seed=0):
    """‖ε‖²/‖x_t‖² computed directly: diffusers' schedule, and noise for every pixel."""
    rng = np.random.default_rng(seed)
    alpha_bar = DDPMScheduler(1000, beta_start=1e-4, beta_end=0.02, beta_schedule="linear").alphas_cumprod.numpy()
    x_0 = (images.reshape(len(images), -1) / 127.5 - 1)[rng.integers(len(images), size=samples)]
    a = alpha_bar[rng.integers(1000, size=(samples, 1))]
    eps = rng.normal(size=x_0.shape)
    x_t = np.sqrt(a) * x_0 + np.sqrt(1 - a) * eps
    return (eps**2).sum(1) / (x_t**2).sum(1), (x_t**2).sum(1) / x_0.shape[1]


# ----------------------------------------------------------------------------------------- distribution


def test_the_distribution_is_that_of_noise_drawn_pixel_by_pixel():
    images = some_images()
    ratio, input_norm = drawn_ratios(images, 20_000)
    found = sample_ratios(images, "ddpm", samples=20_000, seed=1, latents=False)
    # Kolmogorov–Smirnov at 20,000 a side: a statistic of 0.0195 has a p-value of 0.001
    assert stats.ks_2samp(found.ratio.numpy(), ratio).statistic < 0.0195
    assert stats.ks_2samp(found.input_norm.numpy(), input_norm).statistic < 0.0195
    error = ratio.std() / math.sqrt(len(ratio))
    assert float(found.ratio.mean()) == pytest.approx(ratio.mean(), abs=5 * error)


def test_mean_share_and_quantiles_are_those_of_the_samples():
    images = some_images()
    ratio = sample_ratios(images, "ddpm", samples=5_000, seed=0, latents=False).ratio.numpy()
    found = estimate_kappa(images, num_skips=6, samples=5_000)
    assert found.mean_ratio == pytest.approx(ratio.mean())
    assert found.share_below_5 == pytest.approx((ratio < 5).mean())
    for level, value in found.quantiles.items():
        assert value == pytest.approx(np.quantile(ratio, level))


def test_the_histogram_holds_every_sample_and_agrees_with_numpy():
    found = estimate_kappa(some_images(), num_skips=6, samples=5_000)
    ratio = sample_ratios(some_images(), "ddpm", samples=5_000, seed=0, latents=False).ratio.numpy()
    counts, _ = np.histogram(ratio, np.array(found.histogram.edges))
    assert found.histogram.counts == tuple(counts)
    assert sum(found.histogram.counts) + found.histogram.below + found.histogram.above == 5_000
    assert found.histogram.above == (ratio > 10).sum()


@pytest.mark.parametrize("as_float", [False, True])
def test_the_pixel_histogram_agrees_with_numpy(as_float):
    images = some_images(n=16)
    x = images / 127.5 - 1
    pixels = torch.tensor(x, dtype=torch.float32).permute(0, 3, 1, 2) if as_float else images
    found = estimate_kappa(pixels, num_skips=6, samples=100).pixel_histogram
    values = pixels.numpy().ravel()[::17] if as_float else x.ravel()
    counts, _ = np.histogram(values, np.linspace(-1, 1, 65))
    assert found.counts == tuple(counts)


@pytest.mark.parametrize("width", [8, 16, 17, 32])
def test_the_pixel_histogram_of_floats_sees_every_column(width):
    row = torch.linspace(-1, 1, width)
    found = estimate_kappa(row.expand(64, 1, width, width).clone(), num_skips=6, samples=100).pixel_histogram
    counts, _ = np.histogram(row.numpy(), np.linspace(-1, 1, 65))
    assert [count > 0 for count in found.counts] == [count > 0 for count in counts]


def test_quantiles_are_torchs():
    values = torch.rand(1001, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.quantile(values, torch.tensor(kappa_module.LEVELS, dtype=torch.float64)).tolist()
    assert kappa_module._quantiles(values) == pytest.approx(expected)


def test_only_floats_are_asked_for_another_range():
    bright = torch.randint(200, 256, (16, 8, 8, 3), dtype=torch.uint8)
    assert estimate_kappa(bright, num_skips=6, samples=50).notices == ()


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_pictures_of_more_than_eight_bits_are_refused(mode):
    with pytest.raises(InvalidValueError, match=f"8 bits per channel.*{mode}"):
        estimate_kappa([Image.new(mode, (8, 8))], num_skips=6, samples=10)


def test_rows_of_a_dataset_may_hold_pictures():
    pictures = [Image.fromarray(image) for image in some_images(n=8)]
    rows = [{"label": 3, "image": picture} for picture in pictures]
    assert estimate_kappa(rows, 6, samples=50).mean_ratio == estimate_kappa(pictures, 6, samples=50).mean_ratio


def test_a_mean_ratio_below_one_is_named_as_such():
    *_, recommended, reason = choose_kappa(0.41, 6)
    assert "1 (the mean ratio 0.41 is less)" in reason
    assert scalelong.kappa.cs_sum(recommended, 6) == pytest.approx(5**0.5, rel=0.02)


def test_lemma_3_2_on_uniform_pixels():
    """E‖x_t‖²/m = 1 − 2E ᾱ/3 = 0.816 with E ᾱ = 0.2755 for DDPM; the paper rounds it to 0.27."""
    uniform = torch.rand(4_000, 3, 8, 8) * 2 - 1
    found = estimate_kappa(uniform, num_skips=6, samples=20_000)
    alpha_bar = DDPMScheduler(1000, beta_start=1e-4, beta_end=0.02, beta_schedule="linear").alphas_cumprod
    assert found.mean_alpha_bar == pytest.approx(float(alpha_bar.mean()), rel=1e-3)
    assert found.mean_alpha_bar == pytest.approx(0.27, abs=0.01)
    assert found.lemma_input_norm == pytest.approx(1 - 2 * found.mean_alpha_bar / 3)
    assert found.mean_input_norm == pytest.approx(found.lemma_input_norm, rel=5e-3)
    assert found.data_input_norm == pytest.approx(found.lemma_input_norm, rel=5e-3)


def test_the_paper_s_1_22_is_the_ratio_of_means_for_uniform_pixels():
    uniform = torch.rand(4_000, 3, 32, 32) * 2 - 1
    found = estimate_kappa(uniform, num_skips=6, samples=4_000)
    assert found.ratio_of_means == pytest.approx(1.22, abs=0.01)
    assert found.mean_ratio > found.ratio_of_means  # Jensen
    # in high dimension ‖x_t‖²/m is ᾱ/3 + 1 − ᾱ, so the mean of the ratio is E 1/(1 − 2ᾱ/3)
    alpha_bar = DDPMScheduler(1000, beta_start=1e-4, beta_end=0.02, beta_schedule="linear").alphas_cumprod.double()
    assert found.mean_ratio == pytest.approx(float((1 / (1 - 2 * alpha_bar / 3)).mean()), rel=5e-3)


def test_every_process_has_its_own_mean():
    """For pixels ±1 the ratio in high dimension is 1 at every time; for pixels 0.1 it is 1/(1 − 0.99ᾱ)."""
    images = torch.full((10, 3, 32, 32), 0.1)
    images[..., 0] = -0.1
    for process, alpha_bar in {
        "vp": lambda t: math.exp(-0.1 * t - 0.5 * 19.9 * t * t),
        "ddpm": None,
        "sd": None,
    }.items():
        found = estimate_kappa(images, 6, process=process, samples=20_000)
        if alpha_bar is not None:
            expected, _ = integrate.quad(lambda t, a=alpha_bar: 1 / (1 - 0.99 * a(t)), 0, 1)
        else:
            betas = {"ddpm": np.linspace(1e-4, 0.02, 1000), "sd": np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2}
            expected = (1 / (1 - 0.99 * np.cumprod(1 - betas[process]))).mean()
        assert found.mean_ratio == pytest.approx(expected, rel=0.02)


def test_process_can_be_a_scheduler_s_values_of_alpha_bar():
    images = some_images()
    alpha_bar = DDPMScheduler(1000, beta_start=1e-4, beta_end=0.02, beta_schedule="linear").alphas_cumprod
    by_name, by_value = (estimate_kappa(images, 6, process=p, samples=5_000) for p in ("ddpm", alpha_bar))
    assert by_value.mean_ratio == pytest.approx(by_name.mean_ratio, rel=1e-4)
    assert by_value.process == "custom ᾱ"


def test_a_single_timestep_is_enough():
    found = estimate_kappa(torch.full((4, 3, 16, 16), 0.5) * torch.randn(4, 3, 16, 16).sign(), 6, process=[0.5])
    assert found.mean_ratio == pytest.approx(1 / (0.5 * 0.25 + 0.5), rel=0.01)
    assert found.mean_alpha_bar == 0.5


def test_the_same_seed_gives_the_same_estimate_and_keeps_the_global_random_state():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, second, other = (estimate_kappa(some_images(), 6, samples=500, seed=s) for s in (0, 0, 1))
    assert first == second
    assert first.mean_ratio != other.mean_ratio
    assert torch.equal(torch.random.get_rng_state(), before)


def test_layout_and_array_type_do_not_matter(tmp_path):
    images = some_images()
    np.save(tmp_path / "images.npy", images)
    stored = np.load(tmp_path / "images.npy", mmap_mode="r")  # read-only, as prepared data are
    as_float = torch.tensor(images).permute(0, 3, 1, 2) / 127.5 - 1
    means = [estimate_kappa(x, 6, samples=500).mean_ratio for x in (images, torch.tensor(images), stored)]
    floats = [estimate_kappa(x, 6, samples=500).mean_ratio for x in (as_float, as_float.numpy(), as_float.double())]
    assert means[0] == means[1] == means[2]
    assert floats == pytest.approx([means[0]] * 3, rel=1e-6)


def test_more_images_than_samples_are_sampled_from_all_of_them():
    dark, bright = torch.full((500, 1, 8, 8), 0.01), torch.full((500, 1, 8, 8), 1.0)
    dark[..., 0], bright[..., 0] = -0.01, -1.0
    found = estimate_kappa(torch.cat([dark, bright]), 6, samples=200)
    assert found.pixel_second_moment == pytest.approx(0.5, abs=0.1)
    assert found.num_images == 1000


# ------------------------------------------------------------------------------------------------ range


@given(mean=st.floats(1.0, 4.99), n=st.integers(5, 50))
def test_the_range_solves_the_sums_as_scipy_does(mean, n):
    low, high, recommended, _ = choose_kappa(mean, n)

    def solve(total):
        return optimize.brentq(lambda k: sum(k ** (2 * i) for i in range(n)) - total, 0, 1)

    assert low == pytest.approx(solve(mean), abs=1e-7)
    assert high == pytest.approx(solve(5.0), abs=1e-7)
    assert low <= recommended <= high


def test_the_paper_s_mean_and_networks_give_its_range():
    """Section 4.1: a mean of 1.22 and U-ViT's and the U-Net's N give κ in about [0.5, 0.95]."""
    lows, highs = zip(*(choose_kappa(1.22, n)[:2] for n in (6, 8, 10, 12)), strict=True)
    assert min(lows) == pytest.approx(0.5, abs=0.08)
    assert max(highs) == pytest.approx(0.95, abs=0.02)


def test_the_recommended_sum_is_the_geometric_mean():
    for n in (6, 8, 12):
        recommended = choose_kappa(1.5, n)[2]
        total = sum(recommended ** (2 * i) for i in range(n))
        assert total == pytest.approx(math.sqrt(1.5 * 5), rel=0.03)  # two decimals of kappa


@pytest.mark.parametrize("n", range(2, 31))
def test_the_recommended_kappa_never_cuts_a_skip_that_the_range_can_keep(n):
    for mean in (0.9, 1.2, 2.0, 4.0):
        low, high, recommended, reason = choose_kappa(mean, n)
        assert low <= recommended <= high
        assert recommended ** (n - 1) >= 0.01
        assert reason


def test_many_skips_raise_kappa_and_the_reason_says_so():
    low, high, recommended, reason = choose_kappa(1.2, 30)
    assert recommended == pytest.approx(0.86)
    assert low < recommended < high
    assert "raised" in reason


def test_one_skip_gives_kappa_1():
    found = estimate_kappa(some_images(), num_skips=1, samples=500)
    assert (found.low, found.high, found.recommended) == (1.0, 1.0, 1.0)
    assert "one long skip" in found.reason


def test_a_mean_above_the_cap_is_explained():
    low, high, recommended, reason = choose_kappa(7.0, 8)
    assert low == high == recommended
    assert sum(high ** (2 * i) for i in range(8)) == pytest.approx(5.0)
    assert "7 is above the paper's bound of 5" in reason
    low, high, recommended, reason = choose_kappa(3.0, 2)
    assert (low, high, recommended) == (1.0, 1.0, 1.0)
    assert "above the largest sum of 2 long skips" in reason


def test_a_mean_below_one_allows_every_kappa():
    low, high, recommended, reason = choose_kappa(0.8, 6)
    assert low == 0.0
    assert 0 < recommended < high
    assert "any kappa" in reason


# ------------------------------------------------------------------------------------------------- edges


def test_images_of_zeros_have_a_mean_far_above_the_cap():
    found = estimate_kappa(torch.zeros(3, 1, 8, 8), num_skips=6, samples=2_000)
    alpha_bar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    assert found.mean_ratio == pytest.approx((1 / (1 - alpha_bar)).mean(), rel=0.1)
    assert found.low == found.high == found.recommended
    assert "above" in found.reason
    assert "constant" in found.notices[0].text


def test_zero_images_without_noise_are_infinite_but_do_not_fail():
    found = estimate_kappa(torch.zeros(3, 1, 8, 8), num_skips=6, process=[1.0], samples=100)
    assert found.mean_ratio == math.inf
    assert found.recommended == found.high < 1
    assert any("exactly zero" in str(notice) for notice in found.notices)
    assert found.histogram.above == 100


def test_constant_images_raise_a_notice():
    found = estimate_kappa(torch.full((3, 1, 8, 8), -0.5), num_skips=6, samples=500)
    assert any(notice.level == "warning" and "constant" in notice.text for notice in found.notices)
    assert math.isfinite(found.mean_ratio)


def test_images_in_0_1_raise_a_notice():
    with pytest.warns(ScalingWarning, match="2x − 1"):
        found = estimate_kappa(torch.rand(3, 1, 8, 8), num_skips=6, samples=500)
    assert any("2x − 1" in str(notice) for notice in found.notices)
    assert not estimate_kappa(torch.rand(3, 1, 8, 8) * 2 - 1, num_skips=6, samples=500).notices


def test_a_single_pixel_is_an_image():
    found = estimate_kappa(torch.full((1, 1, 1, 1), 0.5), num_skips=3, process=[0.0], samples=100)
    assert found.mean_ratio == pytest.approx(1.0)


def test_latents_can_have_any_range():
    latents = torch.randn(20, 4, 8, 8) * 3
    with pytest.raises(DataError, match=r"latents=True"):
        estimate_kappa(latents, num_skips=6)
    assert estimate_kappa(latents, num_skips=6, latents=True, samples=500).mean_ratio < 1


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (torch.full((2, 1, 8, 8), math.nan), DataError, "NaN"),
        (torch.full((2, 1, 8, 8), math.inf), DataError, "infinite"),
        (torch.zeros(0, 1, 8, 8), DataError, r"\(0, 1, 8, 8\)"),
        (torch.zeros(8, 8, 3), InvalidValueError, r"\(8, 8, 3\).*images\[None\]"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.int64), InvalidValueError, "int64"),
        ([[1, 2]], InvalidValueError, "list"),
        (torch.full((2, 1, 8, 8), 255.0), DataError, "255"),
    ],
)
def test_unusable_images_raise_with_the_offending_value(images, error, message):
    with pytest.raises(error, match=message):
        estimate_kappa(images, num_skips=6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_skips": 0}, InvalidValueError, "num_skips.*0"),
        ({"num_skips": 2.5}, InvalidValueError, "num_skips.*2.5"),
        ({"num_skips": 6, "samples": 0}, InvalidValueError, "samples.*0"),
        ({"num_skips": 6, "process": "dppm"}, UnknownNameError, "ddpm"),
        ({"num_skips": 6, "process": [1.5]}, InvalidValueError, "process.*1.5"),
        ({"num_skips": 6, "process": []}, InvalidValueError, "process"),
    ],
)
def test_bad_options_raise_with_name_and_value(options, error, message):
    with pytest.raises(error, match=message):
        estimate_kappa(some_images(), **options)


def test_the_estimate_is_json_ready():
    found = estimate_kappa(some_images(), num_skips=6, samples=500)
    read = json.loads(json.dumps(found.to_dict()))
    assert read["recommended"] == found.recommended
    assert read["quantiles"]["0.5"] == pytest.approx(found.quantiles[0.5])
    assert read["recommended_sum"] == pytest.approx(found.sum_at(found.recommended))


def test_histogram_counts_what_lies_outside():
    found = histogram(torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, math.inf]), 0.0, 1.0, 2)
    assert (found.below, found.counts, found.above) == (1, (1, 2), 2)


def test_estimate_kappa_needs_torch_alone():
    """In a fresh process in which NumPy and the extras cannot be imported."""
    script = """
import sys
import types
for name in ("numpy", "diffusers", "accelerate", "rich", "typer", "matplotlib", "sklearn", "PIL", "scipy"):
    sys.modules[name] = None
import torch, scalelong
images = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
for process in ("ddpm", "vp", "sd"):
    print(scalelong.estimate_kappa(images, num_skips=6, process=process, samples=500).recommended)
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    images = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = [estimate_kappa(images, 6, process=p, samples=500).recommended for p in ("ddpm", "vp", "sd")]
    assert [float(line) for line in run.stdout.split()] == expected


@pytest.mark.slow
def test_real_cifar10_agrees_with_noise_drawn_pixel_by_pixel():
    """The paper: more than 97 % of the ratios lie below 5."""
    from scalelong.data import load

    images = load("cifar10", split="train").images
    found = estimate_kappa(images, num_skips=6)
    ratio, input_norm = drawn_ratios(np.asarray(images[::5]), 20_000)
    assert found.mean_ratio == pytest.approx(ratio.mean(), abs=5 * ratio.std() / math.sqrt(len(ratio)))
    assert found.mean_input_norm == pytest.approx(input_norm.mean(), rel=0.01)
    assert found.share_below_5 > 0.97
    assert found.mean_ratio == pytest.approx(1.60, abs=0.03)
    assert found.ratio_of_means == pytest.approx(1.26, abs=0.01)


def test_the_package_exports_estimate_kappa():
    assert scalelong.estimate_kappa is estimate_kappa


# ---------------------------------------------------------------------------------------------- notices


def test_a_sum_within_the_range_gives_no_notice():
    assert kappa_notices(ConstantScaling(0.7).coefficients(6), kappa=0.7) == []
    assert kappa_notices((1.0,)) == []  # one skip, unscaled
    assert kappa_notices(NoScaling().coefficients(4)) == []


def test_a_sum_outside_the_range_is_an_info_notice():
    (above,) = kappa_notices(NoScaling().coefficients(12))
    assert (above.level, "12.00 is above 5" in str(above)) == ("info", True)
    (below,) = kappa_notices(UniformScaling(0.3).coefficients(6))
    assert (below.level, "0.54 is below the paper's mean ratio 1.22" in str(below)) == ("info", True)
    (below,) = kappa_notices(ConstantScaling(0.5).coefficients(6), kappa=0.5, mean_ratio=2.0)
    assert "1.33 is below the data's mean ratio 2" in str(below)


def test_an_almost_cut_skip_is_a_warning():
    (warning,) = kappa_notices(ConstantScaling(0.5).coefficients(12), kappa=0.5)
    assert warning.level == "warning"
    assert "0.00049" in str(warning)
    assert "kappa >= 0.66" in str(warning)
    assert round(0.01 ** (1 / 11), 2) == 0.66


# ------------------------------------------------------------------------- what people have in their hands


def test_pil_images_loaders_and_arrays_give_one_estimate():
    images = some_images(n=40)
    expected = estimate_kappa(images, num_skips=6, samples=2000)
    pictures = [Image.fromarray(image) for image in images]
    floats = torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1
    labelled = torch.utils.data.TensorDataset(floats, torch.arange(40))
    for source in (
        pictures,
        torch.utils.data.DataLoader(labelled, batch_size=16),
        [{"pixel_values": floats}],
        list(floats),
    ):
        found = estimate_kappa(source, num_skips=6, samples=2000)
        assert found.num_images == 40
        assert found.mean_ratio == pytest.approx(expected.mean_ratio, rel=1e-5)
    assert estimate_kappa(torch.utils.data.DataLoader(floats, batch_size=16), 6, samples=20).num_images == 32


def test_pil_images_of_other_modes_are_read_as_colour_and_other_sizes_are_an_error():
    grey, clear = Image.new("L", (8, 6), 10), Image.new("RGBA", (8, 6), (200, 10, 10, 0))
    assert estimate_kappa([grey, grey], 6, samples=100).dimension == 48
    assert estimate_kappa([clear, clear], 6, samples=100).dimension == 144
    with pytest.raises(DataError, match="one size"):
        estimate_kappa([grey, Image.new("L", (9, 6))], 6, samples=100)
    with pytest.raises(DataError, match="empty"):
        estimate_kappa([], 6)
    with pytest.raises(InvalidValueError, match="str"):
        estimate_kappa(["a.png"], 6)


@pytest.mark.parametrize(("prediction", "name"), [("epsilon", "eps"), ("sample", "x0"), ("v_prediction", "v")])
def test_a_schedulers_prediction_type_is_the_objective(prediction, name):
    sizes = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
    scheduler = DDPMScheduler(1000, **sizes, prediction_type=prediction)
    found = estimate_kappa(some_images(), 6, process=scheduler, samples=2000)
    expected = estimate_kappa(some_images(), 6, process="ddpm", objective=name, samples=2000)
    assert found.objective == name
    assert (found.mean_ratio, found.ratio_of_means) == pytest.approx(
        (expected.mean_ratio, expected.ratio_of_means), rel=1e-3
    )  # the schedulers' ᾱ are float32
    assert estimate_kappa(some_images(), 6, process=scheduler, objective=name, samples=2000) == found


def test_a_scheduler_of_another_objective_is_refused():
    with pytest.raises(InvalidValueError, match="objective must be 'x0', the scheduler's prediction_type, got 'v'"):
        estimate_kappa(some_images(), 6, process=DDPMScheduler(prediction_type="sample"), objective="v")
    other = types.SimpleNamespace(alphas_cumprod=[0.5], config=types.SimpleNamespace(prediction_type="score"))
    with pytest.raises(InvalidValueError, match="prediction_type must be one of epsilon, sample, v_prediction"):
        estimate_kappa(some_images(), 6, process=other)


def test_a_process_may_be_a_mapping_and_nothing_else_unknown():
    found = estimate_kappa(some_images(), 6, process={"name": "vp", "beta_max": 10.0}, samples=1000)
    assert found.process == "vp"
    for process in (object(), {"name": "vpp"}, [[0.1], [0.2, 0.3]]):
        with pytest.raises(InvalidValueError, match="process"):
            estimate_kappa(some_images(), 6, process=process, samples=1000)


def test_images_of_a_batch_are_not_taken_for_its_text_tokens():
    images, tokens = torch.rand(4, 3, 8, 8) * 2 - 1, torch.randn(4, 7, 16)
    found = estimate_kappa([{"context": tokens, "mask": torch.ones(4, 7), "pixels": images}], 6, samples=1000)
    assert (found.num_images, found.dimension) == (4, 192)
    assert estimate_kappa([images[0], images[1]], 6, samples=1000).num_images == 2  # one image each


def test_a_scheduler_stands_for_its_alphas_and_a_network_for_its_skips():
    images, scheduler = some_images(), DDPMScheduler(1000, beta_schedule="squaredcos_cap_v2")
    net = scalelong.UViT(img_size=8, embed_dim=32, depth=6, num_heads=2)
    found = estimate_kappa(images, num_skips=net, process=scheduler, samples=2000)
    expected = estimate_kappa(images, num_skips=3, process=scheduler.alphas_cumprod, samples=2000)
    assert (found.recommended, found.num_skips, found.process) == (expected.recommended, 3, "DDPMScheduler")
    with pytest.raises(InvalidValueError, match="alphas_cumprod"):
        estimate_kappa(images, 6, process=FlowMatchEulerDiscreteScheduler())


def test_the_repr_is_short():
    text = repr(estimate_kappa(some_images(), num_skips=6, samples=500))
    assert len(text) < 250
    assert "recommended=" in text


@pytest.mark.parametrize("name", ["eps", "x0", "v", "flow", "edm"])
def test_the_ratio_of_an_objective_is_that_of_its_target_to_the_networks_input(name):
    """Against noise drawn pixel by pixel through the objective's own functions."""
    from scalelong.diffusion import get_objective

    images = some_images()
    objective = get_objective(name, **({"process": "ddpm"} if name in ("eps", "x0", "v") else {}))
    found = estimate_kappa(images, 6, objective=name, samples=20_000, seed=1)
    assert (found.objective, found.process) == (name, objective.process.name)
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.from_numpy(images).float().div(127.5).sub(1).permute(0, 3, 1, 2)
    x_0 = x_0[torch.arange(4000) % len(x_0)].double()
    t = objective.training_times((torch.randperm(4000, generator=generator) + 0.5) / 4000)
    eps = torch.randn(x_0.shape, generator=generator, dtype=torch.float64)
    x, _ = objective.network_inputs(objective.process.add_noise(x_0, eps, t), t)
    target = objective.target_of(x_0, eps, t)
    ratios = target.flatten(1).square().sum(1) / x.flatten(1).square().sum(1)
    assert found.mean_ratio == pytest.approx(ratios.mean().item(), rel=0.03)
    of_means = target.square().mean().item() / x.square().mean().item()
    assert found.ratio_of_means == pytest.approx(of_means, rel=0.03)


def test_edm_makes_the_ratio_1_for_the_standard_deviation_of_the_data():
    from scalelong.diffusion import get_objective

    images = some_images()
    rms = (images.astype("float64") / 127.5 - 1).__pow__(2).mean() ** 0.5
    found = estimate_kappa(images, 6, objective=get_objective("edm", sigma_data=float(rms)))
    assert found.ratio_of_means == pytest.approx(1, abs=0.02)
    assert found.low < 0.5  # κ_1 = 1 alone reaches the mean ratio: the lower bound excludes almost nothing


def test_a_table_of_alpha_bar_needs_noise_prediction():
    with pytest.raises(InvalidValueError, match="objective 'v'"):
        estimate_kappa(some_images(), 6, process=[0.9, 0.5, 0.1], objective="v")
