"""How to choose kappa for CS: Section 4.1's estimate from a dataset, and notices about a choice made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scalelong.errors import ScaleLongError
from scalelong.ratios import Histogram, Ratios, histogram, process_name, sample_ratios
from scalelong.scaling.specs import PAPER_MEAN as PAPER_MEAN
from scalelong.scaling.specs import SMALLEST, UPPER, Notice, number
from scalelong.scaling.specs import kappa_notices as kappa_notices
from scalelong.theory.bounds import closed_sum_of_squares, expected_input_norm, kappa_for_sum

if TYPE_CHECKING:
    from scalelong.process import Process

LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True)
class KappaEstimate:
    """What a dataset and a noise process say about kappa (Section 4.1).

    low, high: the kappa that put Σκ^{2(i−1)} at the mean ratio and at min(5, N).
    recommended: a value between them; `reason` says why.
    mean_ratio, share_below_5, quantiles, histogram: of ‖ε‖²/‖x_t‖² (Fig. 3b).
    ratio_of_means: E‖ε‖²/E‖x_t‖², which the long tail does not lift.
    mean_input_norm: E‖x_t‖²/m, beside Lemma 3.2's value for uniform pixels and the same with the data's own E x_0².
    input_histogram, pixel_histogram: of ‖x_t‖²/m and of the pixels (Fig. 3a).
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

    @property
    def cap(self) -> float:
        """The upper end of Σκ²: min(5, N)."""
        return min(UPPER, float(self.num_skips))

    def sum_at(self, kappa: float) -> float:
        """Σ_{i=1}^N κ^{2(i−1)} for a kappa, to see where it lies between the mean ratio and the cap."""
        return _cs_sum(kappa, self.num_skips)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        values = asdict(self)
        values["quantiles"] = {f"{level:g}": value for level, value in self.quantiles.items()}
        return values | {"cap": self.cap, "recommended_sum": self.sum_at(self.recommended)}


def estimate_kappa(
    images: Any,
    num_skips: int,
    process: str | Process | Sequence[float] | Tensor = "ddpm",
    samples: int = 50_000,
    seed: int = 0,
    latents: bool = False,
) -> KappaEstimate:
    """The range of kappa that suits a dataset, and a recommended value (Section 4.1).

    The output's squared norm is of order ‖x_t‖²Σκ², and its target is ε, so Σκ² should be around ‖ε‖²/‖x_t‖²: from
    its mean up to 5 (its long tail calls for more than the mean), and no more than N, which is the unscaled network.

    Args:
        images: uint8 (n, h, w, c), or float (n, c, h, w) in [−1, 1]; a numpy array or a tensor.
        num_skips: N, the number of long skips (`scalelong.describe(net)` counts them).
        process: "ddpm", "vp", "sd", a process of `scalelong.diffusion`, or the values of ᾱ_t themselves
            (`scheduler.alphas_cumprod`; a single one is allowed).
        samples: how many (image, time, noise) to measure.
        seed: of the choice of images, times and noise.
        latents: the images are latents as the network sees them, in whatever range.
    """
    if isinstance(num_skips, bool) or not isinstance(num_skips, int) or num_skips < 1:
        raise ScaleLongError(f"num_skips is {num_skips!r}; it must be an integer of at least 1")
    ratios = sample_ratios(images, process, samples, seed, latents)
    mean = float(ratios.ratio.mean())
    low, high, recommended, reason = choose_kappa(mean, num_skips)
    mean_alpha_bar = float(ratios.alpha_bar.mean())
    quantiles = torch.quantile(ratios.ratio, torch.tensor(LEVELS, dtype=torch.float64)).tolist()
    return KappaEstimate(
        num_skips=num_skips,
        low=low,
        high=high,
        recommended=recommended,
        reason=reason,
        mean_ratio=mean,
        ratio_of_means=1 / float(ratios.input_norm.mean()) if ratios.input_norm.any() else math.inf,
        share_below_5=float((ratios.ratio < UPPER).to(torch.float64).mean()),
        quantiles=dict(zip(LEVELS, quantiles, strict=True)),
        histogram=histogram(ratios.ratio, 0.0, 10.0, 100),
        mean_input_norm=float(ratios.input_norm.mean()),
        lemma_input_norm=expected_input_norm(1, mean_alpha_bar),
        data_input_norm=expected_input_norm(1, mean_alpha_bar, ratios.pixel_second_moment),
        mean_alpha_bar=mean_alpha_bar,
        pixel_second_moment=ratios.pixel_second_moment,
        input_histogram=histogram(ratios.input_norm, 0.0, 2.0, 100),
        pixel_histogram=ratios.pixels,
        process=_name(process),
        samples=samples,
        seed=seed,
        num_images=ratios.num_images,
        dimension=ratios.dimension,
        notices=_data_notices(ratios, latents),
    )


def choose_kappa(mean_ratio: float, n: int) -> tuple[float, float, float, str]:
    """(low, high, recommended, reason) for a mean ratio and N long skips.

    Ratios are positive with a long tail, so the middle of their range is the geometric one: the recommended kappa
    puts Σκ² as many times above the mean as below the cap. Where that would leave the innermost skip below 0.01 it
    is raised as far as the range allows.
    """
    cap = min(UPPER, float(n))
    if n == 1:
        return 1.0, 1.0, 1.0, "one long skip: κ_1 = kappa^0 = 1 whatever kappa is, so CS changes nothing"
    high = kappa_for_sum(cap, n)
    if mean_ratio > cap:
        what = "the paper's bound of 5" if cap == UPPER else f"what {n} long skips can give"
        reason = (
            f"the mean ratio {number(mean_ratio)} lies above {what} (Σκ² ≤ {cap:g}), so the range is empty and its "
            "upper end is all that can be recommended; such data are close to zero, look at their scale before training"
        )
        return high, high, high, reason
    low = kappa_for_sum(mean_ratio, n)
    middle = kappa_for_sum(math.sqrt(max(mean_ratio, 1.0) * cap), n)
    kept = SMALLEST ** (1 / (n - 1))  # from here up the innermost skip is at least SMALLEST
    raised = min(max(middle, kept), high)
    recommended = _rounded(raised, max(low, min(kept, raised)), high)
    between = f"the geometric middle of the mean ratio {mean_ratio:.2f} and the cap {cap:g}"
    if raised > middle:
        reason = (
            f"{between} would be kappa = {middle:.2f}, which leaves the innermost of {n} skips at "
            f"{middle ** (n - 1):.2g}; raised to keep it at {recommended ** (n - 1):.2g}"
        )
    else:
        reason = f"Σκ² = {_cs_sum(recommended, n):.2f} lies in {between}"
        if mean_ratio < 1:
            reason += "; any kappa reaches the mean, because κ_1 = 1 alone gives Σκ² ≥ 1"
    return low, high, recommended, reason


def _rounded(kappa: float, low: float, high: float) -> float:
    """Two decimals are all that the estimate carries; they must not leave the range."""
    candidates = (round(kappa, 2), math.ceil(kappa * 100) / 100)
    return next((value for value in candidates if low <= value <= high), kappa)


def _data_notices(ratios: Ratios, latents: bool) -> tuple[Notice, ...]:
    notices = []
    if ratios.smallest == ratios.largest:
        notices.append(Notice("warning", f"every pixel is {ratios.smallest:.3g}: the images are constant"))
    elif ratios.smallest >= 0 and not latents:
        text = "no pixel is below 0: images in [0, 1] must be moved to [-1, 1] first (2x − 1)"
        notices.append(Notice("warning", text))
    if not bool(torch.isfinite(ratios.ratio).all()):
        notices.append(Notice("warning", "some x_t are exactly zero, so their ratio is infinite"))
    return tuple(notices)


def _name(process: str | Process | Sequence[float] | Tensor) -> str:
    return process if isinstance(process, str) else process_name(process) or "given ᾱ"


def _cs_sum(kappa: float, n: int) -> float:
    if kappa == 0:
        return 1.0
    from scalelong.scaling import ConstantScaling

    return closed_sum_of_squares(ConstantScaling(kappa), n)
