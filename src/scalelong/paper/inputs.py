"""Figure 3: the inputs' norms and ratios, and what extra noise at the input does to trained networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import ScaleLongError
from scalelong.experiments.statistics import mean_interval, paired_ratio
from scalelong.experiments.table import plus_minus
from scalelong.paper.claims import label, where
from scalelong.paper.drawing import EXTRA, colour, log_scale
from scalelong.paper.item import Outcome, Table
from scalelong.paper.trained import Trained
from scalelong.paper.verdict import Claim, Region, above, below

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA = ("cifar10", "fashion-mnist", "emoji", "digits")
THE_PAPERS = "cifar10"  # the one of the paper's datasets that the CPU size has
SAMPLES, REPEATS = 10_000, 3
VARIANCE = 0.1  # of the extra noise where the claims are judged; the curves have more
VARIANCES = (0.003, 0.01, 0.03, 0.1, 0.3)


def figure_3(studies: Sequence[Trained], size: str) -> Outcome:
    names = DATA if size == "cpu" else ("cifar10", "celeba64", "imagenet64")
    claims: list[Claim] = []
    rows, histograms, notes = [], {}, []
    for name in names:
        try:
            found = [_estimate(name, seed) for seed in range(REPEATS)]
        except (ScaleLongError, OSError) as error:
            notes.append(f"{name} is not to be had here: {error}")
            continue
        ratio, share, norm, lemma, means = (
            mean_interval([one[key] for one in found]) for key in ("ratio", "share", "norm", "lemma", "means")
        )
        shown = (plus_minus(norm), f"{lemma.mean:.3f}", plus_minus(ratio), plus_minus(means))
        rows.append((name, *shown, f"{100 * share.mean:.1f} %"))
        histograms[name] = found[0]["histogram"]
        if name != THE_PAPERS and size == "cpu":
            continue
        claims += [
            Claim(
                f"{name}: E‖x_t‖² is Lemma 3.2's, within 10 %", "E‖x_t‖² / (m(1 − 2Eᾱ_t/3))", Region(0.9, 1.1),
                mean_interval([one["norm"] / one["lemma"] for one in found]), "holds universally",
            ),
            Claim(
                f"{name}: the mean of ‖ε‖²/‖x_t‖² is about 1.22, within 10 %", "mean of ‖ε‖²/‖x_t‖²",
                Region(1.22 * 0.9, 1.22 * 1.1), ratio, "1.22",
            ),
            Claim(
                f"{name}: more than 97 % of the ratios are below 5", "share below 5", above(0.97), share, "> 97 %",
            ),
        ]  # fmt: skip
    table = Table(
        f"{SAMPLES:,} draws of (image, t, ε), DDPM's linear schedule, {REPEATS} repetitions",
        ("data", "E‖x_t‖²/m", "Lemma 3.2", "mean of ‖ε‖²/‖x_t‖²", "E‖ε‖²/E‖x_t‖²", "below 5"),
        tuple(rows),
    )
    noise, noisy, panels = _noise(studies)
    notes.append(
        "The long tail lifts the mean of the ratios above the ratio of the means. By Lemma 3.2 the latter is "
        "1/(1 − 2Eᾱ_t/3) = 1.23 for uniform pixels, which is close to the 1.22 that the paper prints."
    )
    notes.append(
        "(c) at CPU size is the validation loss at x_t + δ, δ ~ N(0, σ_δ²·I), of networks trained without extra noise; "
        "the gain is √(E‖Δε̂‖²/E‖δ‖²). 128 held-out images, the same δ for every network."
    )
    return Outcome((*claims, *noise), (table, *noisy), {"histograms": histograms, "noise": panels}, tuple(notes))


def _estimate(name: str, seed: int) -> dict[str, Any]:
    from scalelong.data import load
    from scalelong.kappa import estimate_kappa

    found = estimate_kappa(load(name, split="train").images, num_skips=6, samples=SAMPLES, seed=seed)
    histogram = found.to_dict()["histogram"]
    return {
        "ratio": found.mean_ratio, "share": found.share_below_5, "norm": found.mean_input_norm,
        "lemma": found.lemma_input_norm, "means": found.ratio_of_means, "histogram": histogram,
    }  # fmt: skip


def _noise(studies: Sequence[Trained]) -> tuple[list[Claim], list[Table], list[dict[str, Any]]]:
    claims, tables, panels = [], [], []
    for trained in studies:
        found = {v: {run.seed: sensitivity(Path(run.folder)) for run in trained.of(v)} for v in trained.variants}
        rises = {
            v: {s: one["loss"][VARIANCE] / one["loss"][0.0] for s, one in runs.items()} for v, runs in found.items()
        }
        gains = {v: {s: one["gain"][VARIANCE] for s, one in runs.items()} for v, runs in found.items()}
        for kind in ("cs", "ls"):
            variant = trained.named(kind)
            if variant is None:
                continue
            for what, values in (("loss's rise", rises), ("gain", gains)):
                claims.append(
                    Claim(
                        f"{where(trained)}{label(variant)} lowers the {what} under extra noise of σ_δ² = {VARIANCE:g}",
                        f"{what}, {label(variant)} / no scaling",
                        below(1.0),
                        paired_ratio(values[variant], values["none"]),
                    )
                )
        rows = [
            (
                label(v),
                *(plus_minus(mean_interval(list(each[v].values()))) if each[v] else "–" for each in (rises, gains)),
            )
            for v in trained.variants
        ]
        title = f"{trained.title}: extra noise of σ_δ² = {VARIANCE:g}"
        tables.append(Table(title, ("variant", "loss with / without", "gain"), tuple(rows)))
        panels.append({"label": trained.title, "losses": _losses(found)})
    return claims, tables, panels


def _losses(found: dict[str, dict[int, dict[str, dict[float, float]]]]) -> dict[str, list[list[float]]]:
    """variant → [σ_δ², mean loss over seeds]."""
    return {
        variant: [
            [variance, round(math.fsum(one["loss"][variance] for one in runs.values()) / len(runs), 5)]
            for variance in (0.0, *VARIANCES)
        ]
        for variant, runs in found.items()
        if runs
    }


def sensitivity(folder: Path) -> dict[str, dict[float, float]]:
    """The loss and the gain of a run's EMA network by the variance of the extra noise."""
    from scalelong.experiments.robustness import measure_run
    from scalelong.runs.run import load_run

    rows = measure_run(load_run(folder), variances=VARIANCES, images=128, draws=2, points=0, samples=0).sensitivity
    return {
        "loss": {row.variance: row.overall.loss for row in rows},
        "gain": {row.variance: row.overall.gain for row in rows},
    }


def draw_figure_3(data: dict[str, Any], figure: Figure) -> None:
    axes = figure.subplots(1, 1 + len(data["noise"]), squeeze=False)[0]
    for (name, histogram), line in zip(data["histograms"].items(), ("#000000", *EXTRA), strict=False):
        total = sum(histogram["counts"]) + histogram["below"] + histogram["above"]
        axes[0].stairs([count / total for count in histogram["counts"]], histogram["edges"], label=name, color=line)
    axes[0].axvline(5, color="#999999", ls=":", lw=1)
    axes[0].set(title="(b) ‖ε‖²/‖x_t‖² of images, times and noise", xlabel="‖ε‖²/‖x_t‖²", ylabel="share", xlim=(0, 10))
    axes[0].set_yscale("log")
    if data["histograms"]:
        axes[0].legend(fontsize=8)
    for ax, panel in zip(axes[1:], data["noise"], strict=True):
        for variant, points in panel["losses"].items():
            variances, losses = zip(*points, strict=True)
            ax.plot(variances, losses, "o-", ms=4, color=colour(variant), label=label(variant))
        ax.set(title=f"(c) {panel['label']}", xlabel="σ_δ² of the extra noise", ylabel="validation loss (EMA)")
        ax.set_xscale("symlog", linthresh=VARIANCES[0])
        ax.set_xticks([0, *VARIANCES], ["0", *(f"{variance:g}" for variance in VARIANCES)])
        log_scale(ax)
        ax.legend(fontsize=8)
