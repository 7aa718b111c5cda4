"""Figure 3: the norms and ratios of inputs, and the effect of extra input noise on trained networks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from scalelong.errors import ScaleLongError
from scalelong.experiments.statistics import mean_interval, paired_ratio, plus_minus
from scalelong.paper.drawing import GRAY, SERIES, color, label, log_scale
from scalelong.paper.judge import LESS, Claim, Outcome, Region, Table, above, cell, mean
from scalelong.paper.study import Trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA = {"cpu": ("cifar10", "fashion-mnist", "emoji", "digits"), "paper": ("cifar10", "celeba64", "imagenet64")}
JUDGED = {"cpu": ("cifar10",), "paper": DATA["paper"]}  # the paper's own datasets
SAMPLES, REPEATS = 10_000, 3
VARIANCE = 0.1  # of the extra noise in the claims; the curves have more
LEMMA, RATIO = "E‖x_t‖² / (m(1 − 2Eᾱ_t/3))", "mean of ‖ε‖²/‖x_t‖²"
VARIANCES = (0.003, 0.01, 0.03, 0.1, 0.3)
NOTES = (
    "The long tail lifts the mean of the ratios above the ratio of the means. By Lemma 3.2 the latter is "
    "1/(1 − 2Eᾱ_t/3) = 1.23 for uniform pixels, close to the 1.22 that the paper prints.",
    "(c) at CPU size is the validation loss at x_t + δ, δ ~ N(0, σ_δ²·I), of networks trained without extra noise; "
    "the gain is √(E‖Δε̂‖²/E‖δ‖²). 128 held-out images, the same δ for every network.",
)


def figure_3(studies: Sequence[Trained], size: str) -> Outcome:
    """Measure the ratios of datasets, and the effect of extra noise on the runs of the studies."""
    outcome = Outcome(data={"histograms": {}, "noise": []})
    rows = []
    for name in DATA[size]:
        try:
            draws = [_estimate(name, seed) for seed in range(REPEATS)]
        except (ScaleLongError, OSError) as error:
            outcome.notes.append(f"{name} is not available here: {error}")
            continue
        ratio, share, norm, lemma, means = (
            mean_interval([draw[key] for draw in draws]) for key in ("ratio", "share", "norm", "lemma", "means")
        )
        estimates = (plus_minus(norm), f"{lemma.mean:.3f}", plus_minus(ratio), plus_minus(means))
        rows.append((name, *estimates, f"{100 * share.mean:.1f} %"))
        outcome.data["histograms"][name] = draws[0]["histogram"]
        if name in JUDGED[size]:
            lemma_ratio = mean([draw["norm"] / draw["lemma"] for draw in draws])
            for text, quantity, region, estimate, paper in (
                ("E‖x_t‖² is Lemma 3.2's, within 10 %", LEMMA, Region(0.9, 1.1), lemma_ratio, "holds universally"),
                ("the mean of ‖ε‖²/‖x_t‖² is about 1.22, within 10 %", RATIO, Region(1.098, 1.342), ratio, "1.22"),
                ("more than 97 % of the ratios are below 5", "share below 5", above(0.97), share, "> 97 %"),
            ):
                outcome.claims.append(Claim(f"{name}: {text}", quantity, region, estimate, paper))
    title = f"{SAMPLES:,} draws of (image, t, ε), DDPM's linear schedule, {REPEATS} repetitions"
    columns = ("data", "E‖x_t‖²/m", "Lemma 3.2", RATIO, "E‖ε‖²/E‖x_t‖²", "below 5")
    outcome.tables.append(Table(title, columns, rows))
    for trained in studies:
        _add_noise(outcome, trained)
    outcome.notes += NOTES
    return outcome


def _estimate(name: str, seed: int) -> dict[str, Any]:
    from scalelong.data import load
    from scalelong.kappa import estimate_kappa

    estimate = estimate_kappa(load(name, split="train").images, num_skips=6, samples=SAMPLES, seed=seed)
    return {
        "ratio": estimate.mean_ratio, "share": estimate.share_below_5, "norm": estimate.mean_input_norm,
        "lemma": estimate.lemma_input_norm, "means": estimate.ratio_of_means,
        "histogram": estimate.to_dict()["histogram"],
    }  # fmt: skip


def _add_noise(outcome: Outcome, trained: Trained) -> None:
    """Add panel (c): claims, table and curves of a study's runs under extra noise."""
    runs = {v: {run.seed: sensitivity(Path(run.folder)) for run in trained.of(v)} for v in trained.variants}
    rises = {v: {s: r["loss"][VARIANCE] / r["loss"][0.0] for s, r in seeds.items()} for v, seeds in runs.items()}
    gains = {v: {s: r["gain"][VARIANCE] for s, r in seeds.items()} for v, seeds in runs.items()}
    for variant in filter(None, map(trained.named, ("cs", "ls"))):
        for what, values in (("loss's rise", rises), ("gain", gains)):
            text = f"{label(variant)} lowers the {what} under extra noise of σ_δ² = {VARIANCE:g}"
            ratio = paired_ratio(values[variant], values["none"])
            outcome.claim(trained, text, f"{what}, {label(variant)} / no scaling", LESS, ratio)
    rows = [(label(v), *(cell(each[v].values()) for each in (rises, gains))) for v in trained.variants]
    title = f"{trained.title}: extra noise of σ_δ² = {VARIANCE:g}"
    outcome.tables.append(Table(title, ("variant", "loss with / without", "gain"), rows))
    losses = {}
    for variant, seeds in runs.items():
        if seeds:
            by_variance = zip(*(r["loss"].items() for r in seeds.values()), strict=True)
            losses[variant] = [[points[0][0], round(fmean(loss for _, loss in points), 5)] for points in by_variance]
    outcome.data["noise"].append({"label": trained.title, "losses": losses})


def sensitivity(folder: Path) -> dict[str, dict[float, float]]:
    """Return loss and gain of a run's EMA network by the variance of the extra noise."""
    from scalelong.experiments.robustness import measure_run_robustness
    from scalelong.runs.run import load_run

    run = load_run(folder)
    rows = measure_run_robustness(run, variances=VARIANCES, images=128, draws=2, points=0, samples=0).sensitivity
    return {
        "loss": {row.variance: row.overall.loss for row in rows},
        "gain": {row.variance: row.overall.gain for row in rows},
    }


def draw_figure_3(data: dict[str, Any], figure: Figure) -> None:
    """Draw the ratios of every dataset, and the loss under extra noise of every study."""
    axes = figure.subplots(1, 1 + len(data["noise"]), squeeze=False)[0]
    for (name, histogram), line in zip(data["histograms"].items(), SERIES, strict=False):
        total = sum(histogram["counts"]) + histogram["below"] + histogram["above"]
        axes[0].stairs([count / total for count in histogram["counts"]], histogram["edges"], label=name, color=line)
    axes[0].axvline(5, color=GRAY, ls=":", lw=1)
    axes[0].set(title="(b) ‖ε‖²/‖x_t‖² of images, times and noise", xlabel="‖ε‖²/‖x_t‖²", ylabel="share", xlim=(0, 10))
    axes[0].set_yscale("log")
    if data["histograms"]:
        axes[0].legend(fontsize=8)
    for ax, panel in zip(axes[1:], data["noise"], strict=True):
        for variant, points in panel["losses"].items():
            variances, losses = zip(*points, strict=True)
            ax.plot(variances, losses, "o-", ms=4, color=color(variant), label=label(variant))
        ax.set(title=f"(c) {panel['label']}", xlabel="σ_δ² of the extra noise", ylabel="validation loss (EMA)")
        ax.set_xscale("symlog", linthresh=VARIANCES[0])
        ax.set_xticks([0, *VARIANCES], ["0", *(f"{variance:g}" for variance in VARIANCES)])
        log_scale(ax)
        ax.legend(fontsize=8)
