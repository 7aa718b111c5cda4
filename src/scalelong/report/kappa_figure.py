"""The figure of `scalelong kappa`: Fig. 3a and 3b for a dataset, and where its range of kappa comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import require
from scalelong.files import atomic_file
from scalelong.kappa import UPPER, KappaEstimate
from scalelong.ratios import Histogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_kappa(estimate: KappaEstimate, name: str) -> Any:
    """A matplotlib Figure."""
    figure_module = require("matplotlib.figure", "train", "figures")
    figure = figure_module.Figure(figsize=(15, 4.2), layout="constrained")
    pixels, inputs, ratios, sums = figure.subplots(1, 4)
    _bars(pixels, estimate.pixel_histogram)
    pixels.axhline(1 / 2, color="k", lw=1, label="uniform on [−1, 1]")
    pixels.set(title=f"{name}: x_0", xlabel="pixel", ylabel="density")
    pixels.legend(fontsize=8)

    _bars(inputs, estimate.input_histogram)
    inputs.axvline(estimate.mean_input_norm, color="#2e7d5b", label=f"mean {estimate.mean_input_norm:.3f}")
    lemma = f"Lemma 3.2: {estimate.lemma_input_norm:.3f}"
    inputs.axvline(estimate.lemma_input_norm, color="k", lw=1, ls="--", label=lemma)
    inputs.set(title=f"‖x_t‖²/m, {estimate.process}", xlabel="‖x_t‖²/m")
    inputs.legend(fontsize=8)

    _bars(ratios, estimate.histogram)
    ratios.axvline(estimate.mean_ratio, color="#2e7d5b", label=f"mean {estimate.mean_ratio:.2f}")
    ratios.axvline(UPPER, color="#bf616a", label=f"5: {estimate.share_below_5:.1%} lie below")
    ratios.set(title="‖ε‖²/‖x_t‖²", xlabel="ratio", yscale="log")
    ratios.legend(fontsize=8)
    _sums(sums, estimate)
    return figure


def save_kappa(estimate: KappaEstimate, name: str, path: Path | str) -> None:
    """Draw and write; the ending of the name chooses the format."""
    with atomic_file(path) as aside:
        draw_kappa(estimate, name).savefig(aside, dpi=130, format=Path(path).suffix.removeprefix(".") or "png")


def _bars(ax: Axes, histogram: Histogram) -> None:
    """Densities: they integrate to the share of all values that lies inside the edges."""
    total = sum(histogram.counts) + histogram.below + histogram.above
    edges = histogram.edges
    width = edges[1] - edges[0]
    heights = [count / total / width for count in histogram.counts]
    ax.bar(edges[:-1], heights, width, align="edge", color="#88a0c4")


def _sums(ax: Axes, estimate: KappaEstimate) -> None:
    """Σκ^{2(i−1)} against kappa, the range and the recommended value."""
    kappas = [k / 200 for k in range(1, 201)]
    ax.plot(kappas, [estimate.sum_at(kappa) for kappa in kappas], color="k")
    ax.axhline(estimate.mean_ratio, color="#2e7d5b", lw=1, label=f"mean ratio {estimate.mean_ratio:.2f}")
    ax.axhline(estimate.cap, color="#bf616a", lw=1, label=f"min(5, N) = {estimate.cap:g}")
    ax.axvspan(
        estimate.low, estimate.high, color="#ebcb8b", alpha=0.4, label=f"{estimate.low:.2f} to {estimate.high:.2f}"
    )
    sum_ = estimate.sum_at(estimate.recommended)
    ax.plot([estimate.recommended], [sum_], "o", color="#d08770", label=f"recommended {estimate.recommended:.2f}")
    ax.set(title=f"Σκ² with N = {estimate.num_skips} long skips", xlabel="kappa", ylim=(0, estimate.num_skips + 0.3))
    ax.legend(fontsize=8, loc="upper left")
