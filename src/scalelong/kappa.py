"""Choose kappa for CS from data (Section 4.1).

The network's output has a squared norm of order ‖x_t‖²·Σκ_i² and its target is ε, so Σκ_i² should match ‖ε‖²/‖x_t‖².
`estimate_kappa` measures that ratio on a dataset and solves for kappa. Under another objective than noise prediction
the ratio is that of its target to the network's input, ‖F‖²/‖c_in·x_t‖².
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scalelong.errors import DataError, ScalingWarning, invalid
from scalelong.objective import Objective, get_objective
from scalelong.process import Interpolant, get_process
from scalelong.scaling.base import UPPER, Notice
from scalelong.scaling.sums import choose_kappa, cs_sum
from scalelong.scaling.sums import kappa_for_sum as kappa_for_sum
from scalelong.scaling.sums import log_geometric_sum as log_geometric_sum
from scalelong.scaling.sums import sum_of_squares as sum_of_squares

LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # quantiles of the ratio
PIXEL_BINS = 64
ZERO_TO_ONE = "no pixel is negative: images in [0, 1] must be rescaled to [-1, 1] (2x − 1)"

PREDICTIONS = {"epsilon": "eps", "sample": "x0", "v_prediction": "v"}  # diffusers' names of objectives

ProcessLike = str | Interpolant | Sequence[float] | Tensor
Progress = Callable[[Iterable[int], str], Iterable[int]]  # such as scalelong.progress.track


@dataclass(frozen=True)
class Histogram:
    """Counts between consecutive edges; `below` and `above` count the values outside."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    below: int
    above: int


@dataclass(frozen=True, repr=False)
class KappaEstimate:
    """The range of kappa that suits a dataset and an objective (Section 4.1).

    Ratios are ‖ε‖²/‖x_t‖², or for another objective those of its target to the network's input, ‖F‖²/‖c_in·x_t‖².

    Attributes:
        num_skips: N, the number of long skips.
        low: The kappa for which Σκ^{2(i−1)} equals the mean ratio.
        high: The kappa for which it equals min(5, N).
        recommended: A value between them.
        reason: Why.
        mean_ratio: Mean of the ratio.
        ratio_of_means: E‖ε‖²/E‖x_t‖², which the long tail of the ratio does not affect.
        share_below_5: Share of ratios below 5.
        quantiles: Quantiles of the ratio.
        histogram: Histogram of the ratio (Fig. 3b).
        mean_input_norm: E‖x_t‖²/m of the network's input.
        lemma_input_norm: The same mean by Lemma 3.2, for uniform pixels.
        data_input_norm: The same mean with the second moment of these pixels.
        mean_alpha_bar: E ᾱ_t over training times: of (c_in·α)² where the process is not variance preserving.
        pixel_second_moment: E x_0² of the pixels.
        input_histogram: Histogram of ‖x_t‖²/m.
        pixel_histogram: Histogram of the pixels (Fig. 3a).
        process: Name of the noise process.
        samples: Number of (image, time, noise) triples.
        seed: Their seed.
        num_images: Number of images.
        dimension: m, the number of values per image.
        notices: Remarks on the result.
        objective: What the network predicts.

    Examples:
        >>> images = torch.rand(64, 3, 8, 8) * 2 - 1
        >>> estimate = scalelong.estimate_kappa(images, num_skips=6, samples=1000)
        >>> estimate.low < estimate.recommended < estimate.high, estimate.cap
        (True, 5.0)
        >>> estimate.sum_at(0.5)
        1.3330078125
        >>> sorted(estimate.to_dict())[:3]
        ['cap', 'data_input_norm', 'dimension']
    """

    num_skips: int
    low: float
    high: float
    recommended: float
    reason: str
    mean_ratio: float
    ratio_of_means: float
    share_below_5: float
    quantiles: dict[float, float]
    histogram: Histogram
    mean_input_norm: float
    lemma_input_norm: float
    data_input_norm: float
    mean_alpha_bar: float
    pixel_second_moment: float
    input_histogram: Histogram
    pixel_histogram: Histogram
    process: str
    samples: int
    seed: int
    num_images: int
    dimension: int
    notices: tuple[Notice, ...] = ()
    objective: str = "eps"

    def __repr__(self) -> str:
        shown = ("recommended", "low", "high", "num_skips", "mean_ratio", "share_below_5", "num_images", "process")
        values = ((name, getattr(self, name)) for name in shown)
        return (
            f"KappaEstimate({', '.join(f'{k}={v:.4g}' if isinstance(v, float) else f'{k}={v!r}' for k, v in values)})"
        )

    @property
    def cap(self) -> float:
        """The upper end of Σκ²: min(5, N)."""
        return min(UPPER, float(self.num_skips))

    def sum_at(self, kappa: float) -> float:
        """Return Σ_{i=1}^N κ^{2(i−1)} at another kappa, to compare with `mean_ratio` and `cap`.

        Args:
            kappa: κ of CS.

        Returns:
            The sum.
        """
        return cs_sum(kappa, self.num_skips)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON-ready values.

        Returns:
            The attributes, `cap` and `recommended_sum`.
        """
        values = asdict(self)
        values["quantiles"] = {f"{level:g}": value for level, value in self.quantiles.items()}
        return values | {"cap": self.cap, "recommended_sum": self.sum_at(self.recommended)}


def estimate_kappa(
    images: Any,
    num_skips: int | nn.Module,
    process: ProcessLike | Any = None,
    samples: int = 50_000,
    seed: int = 0,
    latents: bool = False,
    progress: Progress | None = None,
    objective: str | Objective = "eps",
) -> KappaEstimate:
    """Estimate a range of kappa for a dataset, and recommend a value (Section 4.1).

    Σκ² should lie between the mean of ‖ε‖²/‖x_t‖² and 5, because the ratio has a long tail, and cannot exceed N.

    Args:
        images: uint8 (n, h, w, c) or float (n, c, h, w) in [−1, 1], as a NumPy array or a tensor; a list of PIL images
            of one size; or a DataLoader, of which up to `samples` images or 2²⁷ pixels are read.
        num_skips: N, the number of long skips, or the network that has them.
        process: "ddpm" (default for eps, x0 and v), "vp", "cosine", "sd", a `Process`, a diffusers scheduler (its
            `prediction_type` is the objective), or the values of ᾱ_t; also "linear" and "edm".
        samples: number of (image, time, noise) triples to draw.
        seed: their seed.
        latents: the images are latents and may have any range.
        progress: called as `progress(chunks, description)` to show a progress bar; yields the chunks.
        objective: "eps", "x0", "v", "flow", "edm" or an `Objective`: what the network predicts. Values of ᾱ_t need
            "eps".

    Returns:
        The range, the recommended value and what was measured.

    Examples:
        >>> net, images = scalelong.StackedUNet(192, 6), torch.rand(64, 3, 8, 8) * 2 - 1
        >>> estimate = scalelong.estimate_kappa(images, net, samples=1000)
        >>> net = scalelong.apply(net, scalelong.ConstantScaling(estimate.recommended))
    """
    if isinstance(num_skips, nn.Module):
        num_skips = _count_skips(num_skips)
    images = _as_array(images, samples)
    source, process_name, objective_name = _source(objective, process)
    for name, value in (("num_skips", num_skips), ("samples", samples)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise invalid(name, "an integer >= 1", value)
    ratios = sample_ratios(images, source, samples, seed, latents, progress)
    mean, mean_alpha_bar = float(ratios.ratio.mean()), float(ratios.alpha_bar.mean())
    low, high, recommended, reason = choose_kappa(mean, num_skips)
    notices = _data_notices(ratios, latents or "uint8" in str(images.dtype))
    for notice in notices:
        if notice.text == ZERO_TO_ONE:
            warnings.warn(notice.text, ScalingWarning, stacklevel=2)
    return KappaEstimate(
        num_skips=num_skips,
        low=low,
        high=high,
        recommended=recommended,
        reason=reason,
        mean_ratio=mean,
        ratio_of_means=ratios.mean_target / mean_input if (mean_input := float(ratios.input_norm.mean())) else math.inf,
        share_below_5=float((ratios.ratio < UPPER).to(torch.float64).mean()),
        quantiles=dict(zip(LEVELS, _quantiles(ratios.ratio), strict=True)),
        histogram=histogram(ratios.ratio, 0.0, 10.0, 100),
        mean_input_norm=float(ratios.input_norm.mean()),
        lemma_input_norm=ratios.mean_noise + mean_alpha_bar / 3,  # Lemma 3.2; E x_0² = 1/3 for uniform pixels
        data_input_norm=ratios.mean_noise + mean_alpha_bar * ratios.pixel_second_moment,
        mean_alpha_bar=mean_alpha_bar,
        pixel_second_moment=ratios.pixel_second_moment,
        input_histogram=histogram(ratios.input_norm, 0.0, 2.0, 100),
        pixel_histogram=ratios.pixels,
        process=process_name,
        samples=samples,
        seed=seed,
        num_images=len(images),
        dimension=math.prod(images.shape[1:]),
        notices=notices,
        objective=objective_name,
    )


def _quantiles(values: Tensor) -> list[float]:
    """The LEVELS of any number of values; torch.quantile takes 16 million."""
    ordered = values.sort().values
    at = torch.tensor(LEVELS, dtype=torch.float64) * (len(ordered) - 1)
    low, high = ordered[at.floor().long()], ordered[at.ceil().long()]
    return torch.where(low == high, low, low + (high - low) * (at - at.floor())).tolist()


def _data_notices(ratios: Ratios, any_range: bool) -> tuple[Notice, ...]:
    texts = []
    if ratios.smallest == ratios.largest:
        texts.append(f"every pixel is {ratios.smallest:.3g}: the images are constant")
    elif ratios.smallest >= 0 and not any_range:
        texts.append(ZERO_TO_ONE)
    if not bool(torch.isfinite(ratios.ratio).all()):
        texts.append("some x_t are exactly zero, so their ratio is infinite")
    return tuple(Notice("warning", text) for text in texts)


@dataclass(frozen=True)
class Ratios:
    """Samples of ratio ‖F‖²/‖x‖² with target F and network input x, input_norm ‖x‖²/m and alpha_bar ᾱ_t, each
    (samples,), the mean share of noise in ‖x‖²/m, and image statistics. F is ε and x is x_t for noise prediction."""

    ratio: Tensor
    input_norm: Tensor
    alpha_bar: Tensor
    mean_noise: float
    mean_target: float  # E‖F‖²/m
    pixel_second_moment: float
    pixels: Histogram
    smallest: float
    largest: float


class _Table(NamedTuple):
    """Values of ᾱ_t, and what the network predicts: "eps", "x0" or "v"."""

    alpha_bar: Any
    target: str = "eps"


def sample_ratios(
    images: Any, source: Objective | ProcessLike | _Table, samples: int, seed: int, latents: bool,
    progress: Progress | None = None,
) -> Ratios:  # fmt: skip
    """Draw times and noise for the images and measure the ratio.

    Target and input are combinations of x_0 and ε, so their norms follow from ‖x_0‖², ⟨x_0, ε⟩ and ‖ε‖². The noise is
    not drawn pixel by pixel: ‖x_t‖² and ‖ε‖² depend on it only through z = ⟨ε, x_0⟩/‖x_0‖, which is
    N(0, 1), and ‖ε‖² − z², which is χ² with m − 1 degrees of freedom and independent of z. This is exact.
    Times are stratified: each of `samples` equal intervals contains one.
    """
    shape = checked_shape(images)
    generator, m = torch.Generator().manual_seed(seed), math.prod(shape[1:])
    chosen = torch.randperm(shape[0], generator=generator)[:samples].sort().values
    energy, pixels, smallest, largest = _energies(images, chosen, m, latents, progress)  # ‖x_0‖², (min(n, samples),)

    u = (torch.arange(samples) + torch.rand(samples, generator=generator, dtype=torch.float64)) / samples
    u = u[torch.randperm(samples, generator=generator)].clamp(1e-12, 1 - 1e-12)
    e = energy[torch.arange(samples) % len(energy)]  # every image gets its share of the shuffled times
    z = torch.randn(samples, generator=generator, dtype=torch.float64)
    eps = z.square()
    if m > 1:
        with torch.random.fork_rng(devices=[]):  # torch's gamma sampler takes no generator
            torch.default_generator.manual_seed(seed)
            eps += torch.distributions.Chi2(torch.tensor(m - 1.0, dtype=torch.float64)).sample((samples,))  # now ‖ε‖²
    second_moment = float(energy.mean() / m)
    if isinstance(source, (str, Interpolant)):
        source = get_objective(source)
    if isinstance(source, Objective):
        t = source.training_times(u)
        c, scale = source.coefficients(t), source.input_scale(t)
        a, noise = (c.alpha * scale).square(), (c.sigma * scale).square()
        target = c.p.square() * e + 2 * c.p * c.q * e.sqrt() * z + c.q.square() * eps  # ‖F‖²
        mean_target = float(c.p.square().mean()) * second_moment + float(c.q.square().mean())
    else:
        table = source if isinstance(source, _Table) else _Table(source)
        a = _alpha_bars(table.alpha_bar, u)  # (samples,)
        noise, (p, q) = 1 - a, _target(table.target, a)
        target = p.square() * e + 2 * p * q * e.sqrt() * z + q.square() * eps  # ‖F‖²
        mean_target = float(p.square().mean()) * second_moment + float(q.square().mean())
    x_t = a * e + 2 * (a * noise * e).sqrt() * z + noise * eps  # ‖x‖² of the network's input
    ratio = target / x_t.clamp(min=0)
    means = float(noise.mean()), mean_target, second_moment
    return Ratios(ratio, x_t / m, a, *means, pixels, smallest, largest)


def histogram(values: Tensor, low: float, high: float, bins: int) -> Histogram:
    """Count values in equal bins of [low, high]; infinite values count as above."""
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    inside = (values >= low) & (values <= high)
    counts = torch.histogram(values[inside].to(torch.float64), edges).hist
    below, above = int((values < low).sum()), int((values > high).sum())
    return Histogram(tuple(edges.tolist()), tuple(int(c) for c in counts.tolist()), below, above)


def _energies(
    images: Any, chosen: Tensor, m: int, latents: bool, progress: Progress | None
) -> tuple[Tensor, Histogram, float, float]:
    """Return ‖x_0‖² of the chosen images, the histogram of their pixels, and the smallest and largest pixel."""
    step = max(1, (1 << 22) // m)  # images converted to float at a time: about 4 million pixels
    energies: list[Tensor] = []
    counts = torch.zeros(PIXEL_BINS + 2, dtype=torch.long)
    smallest, largest, starts = math.inf, -math.inf, range(0, len(chosen), step)
    for start in starts if progress is None else progress(starts, "measuring images"):
        indices = chosen[start : start + step]
        if isinstance(images, Tensor):
            raw = images[indices.to(images.device)].detach().cpu()
        else:
            raw = torch.tensor(images[indices.numpy()])  # a copy: read-only memory maps must not be shared
        counts += _pixel_counts(raw)
        x = (raw.float() / 127.5 - 1 if raw.dtype == torch.uint8 else raw.float()).flatten(1)  # (b, m)
        low, high = (float(end) for end in x.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise DataError("images must be finite, got NaN or infinite values; remove or repair these images")
        if not latents and max(-low, high) > 1 + 1e-3:
            hint = "rescale them, pass uint8, or pass latents=True for an autoencoder's latents"
            raise DataError(f"float images must be in [-1, 1], got values from {low:.4g} to {high:.4g}; {hint}")
        smallest, largest = min(smallest, low), max(largest, high)
        energies.append(torch.linalg.vector_norm(x, dim=1).double().square())
    below, *inside, above = counts.tolist()
    edges = torch.linspace(-1, 1, PIXEL_BINS + 1, dtype=torch.float64).tolist()
    return torch.cat(energies), Histogram(tuple(edges), tuple(inside), below, above), smallest, largest


def _pixel_counts(raw: Tensor) -> Tensor:
    """Counts below −1, in PIXEL_BINS bins of [−1, 1], and above 1: of every byte, or of about every 16th float."""
    if raw.dtype == torch.uint8:  # four levels per bin
        levels = torch.bincount(raw.flatten(), minlength=256)
        return torch.nn.functional.pad(levels.view(PIXEL_BINS, -1).sum(1), (1, 1))
    stride = next(k for k in (17, 19, 23, 1) if all(size % k for size in raw.shape[1:]) or k == 1)  # sees every column
    part = histogram(raw.flatten()[::stride].double(), -1.0, 1.0, PIXEL_BINS)
    return torch.tensor([part.below, *part.counts, part.above])


def _count_skips(net: nn.Module) -> int:
    from scalelong.skips.application import scaled_root, sites_of

    return len(sites_of(scaled_root(net))[0])


def _source(objective: str | Objective, process: Any) -> tuple[Any, str, str]:
    """Return the objective, or a table of ᾱ and its target, and the names of process and objective."""
    if process is None or isinstance(process, (str, Interpolant, Mapping)):
        if isinstance(objective, str) and objective in ("eps", "x0", "v"):
            process = process or "ddpm"
        chosen = get_objective(objective, **({} if process is None else {"process": get_process(process)}))
        return chosen, chosen.process.name, chosen.name
    if hasattr(process, "alphas_cumprod"):
        prediction = getattr(getattr(process, "config", None), "prediction_type", "epsilon")
        if prediction not in PREDICTIONS:
            raise invalid("process.config.prediction_type", f"one of {', '.join(PREDICTIONS)}", prediction)
        predicted = PREDICTIONS[prediction]
        if objective not in ("eps", predicted):
            raise invalid("objective", f"{predicted!r}, the scheduler's prediction_type", objective)
        return _Table(process.alphas_cumprod, predicted), type(process).__name__, predicted
    if objective != "eps":
        got = type(process).__name__
        raise invalid(
            "process", f"a name or a process with objective {objective!r}", got, "ᾱ_t alone gives ‖ε‖²/‖x_t‖²"
        )
    if hasattr(process, "add_noise") or hasattr(process, "scale_noise"):  # flow matching has no ᾱ_t
        raise invalid("process", "a scheduler with alphas_cumprod", type(process).__name__, "or pass the values of ᾱ_t")
    return _Table(process), "custom ᾱ", "eps"


def _picture(item: Any) -> Any:
    """Return a PIL image, itself or in a row of a dataset; None if there is none."""
    values = item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else (item,)
    return next((value for value in values if hasattr(value, "tobytes") and hasattr(value, "convert")), None)


def _as_array(images: Any, samples: int) -> Any:
    """Return an array or tensor as it is; stack PIL images; read the batches of a DataLoader."""
    if (hasattr(images, "shape") and hasattr(images, "dtype")) or isinstance(images, (str, bytes)):
        return images
    if not isinstance(images, Iterable):
        return images
    batches: list[Tensor] = []
    for item in images:
        if (picture := _picture(item)) is not None:
            if picture.mode.startswith(("I", "F")):
                raise invalid("a PIL image", "8 bits per channel", f"mode {picture.mode!r}", "pass an array in [-1, 1]")
            picture = picture if picture.mode in ("L", "RGB") else picture.convert("RGB")
            pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
            batch = pixels.view(1, picture.height, picture.width, -1)
        else:
            tensors = list(_tensors(item))  # text tokens (n, l, d) may stand before the images
            found = next((x for least in (4, 3) for x in tensors if x.ndim >= least), None)
            if found is None:
                hint = "expected tensors (n, c, h, w), or tuples or dictionaries that hold one"
                raise invalid("images", "an array, PIL images or batches of images", type(item).__name__, hint)
            batch = found if found.ndim > 3 else found[None]
        if batches and batch.shape[1:] != batches[0].shape[1:]:
            sizes = f"{tuple(batches[0].shape[1:])} and {tuple(batch.shape[1:])}"
            raise DataError(f"all images must have one size and mode, got {sizes}; prepare them as for training")
        batches.append(batch.detach().cpu())
        seen = sum(map(len, batches))
        if seen >= samples or seen * batch[0].numel() >= 1 << 27:
            break
    if not batches:
        raise DataError("images must not be empty, got an empty list or DataLoader")
    return torch.cat(batches)


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif hasattr(item, "__array__"):
        yield torch.as_tensor(item)
    elif isinstance(item, (list, tuple, dict)):
        for value in item.values() if isinstance(item, dict) else item:
            yield from _tensors(value)


def checked_shape(images: Any) -> tuple[int, ...]:
    """Return the shape of an array of images, or raise what is wrong with it."""
    if not hasattr(images, "shape"):
        raise invalid("images", "a NumPy array or a tensor", type(images).__name__)
    shape, dtype = tuple(map(int, images.shape)), str(images.dtype).removeprefix("torch.")
    if len(shape) not in (4, 5):
        expected = "of shape (n, h, w, c) for uint8 or (n, c, h, w) for float"
        raise invalid("images", expected, shape, "volumes have one more axis; pass a single image as images[None]")
    if 0 in shape:
        raise DataError(f"images must not be empty, got shape {shape}")
    if dtype != "uint8" and "float" not in dtype:
        raise invalid("images", "uint8 (0 to 255) or float in [-1, 1]", dtype)
    return shape


def _alpha_bars(process: ProcessLike, u: Tensor) -> Tensor:
    """ᾱ drawn from a table by the uniforms `u`."""
    try:
        table = torch.as_tensor(process, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError):
        table = torch.empty(0)
    if table.ndim != 1 or not len(table) or not bool(((table >= 0) & (table <= 1)).all()):
        expected = "a name, a Process or values of ᾱ_t between 0 and 1, such as scheduler.alphas_cumprod"
        raise invalid("process", expected, process)
    return table[(u * len(table)).floor().long()]


def _target(name: str, alpha_bar: Tensor) -> tuple[Tensor, Tensor]:
    """p and q of the target F = p·x_0 + q·ε, as in `Objective.coefficients`."""
    if name == "v":
        return -(1 - alpha_bar).sqrt(), alpha_bar.sqrt()
    zero, one = torch.zeros_like(alpha_bar), torch.ones_like(alpha_bar)
    return (zero, one) if name == "eps" else (one, zero)
