"""Figures of a campaign: norms, distances and losses against steps, and the effects of a designed experiment."""

from __future__ import annotations

import math
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

from scalelong.experiments.campaign_results import CURVES, DRAWN, EFFECTS, measures_of
from scalelong.report.figures import colors, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scalelong.experiments.campaign_results import Results
    from scalelong.experiments.statistics import Estimate


def draw_campaign(results: Results) -> dict[str, Figure]:
    """Return the figures of the finished runs by file name, those of `campaign_results.FIGURES` that have data."""
    records = [results.records[name] for name in results.finished]
    if results.designed:
        found = any(any(cells.values()) for cells in results.effects("val_loss_ema").values())
        return {"effects.png": _effects(results)} if found else {}
    figures = {}
    if any(record["norms"].get("backbone") for record in records):
        figures["norms.png"] = _norms(results)
    if any(key in record["curves"] for record in records for key in CURVES):
        figures["curves.png"] = _curves(results)
    return figures


def _norms(results: Results) -> Figure:
    """Fig. 1 for the finished runs of a campaign: norm against step, mean over seeds, with the absolute oscillation."""
    families = [arms for arms in results.families().values() if any(_norms_of(results, arm) for arm in arms)]
    figure = new_figure(13.5, 3.9 * len(families))
    for axes, arms in zip(figure.subplots(len(families), 3, squeeze=False), families, strict=True):
        n = max(len(norms["norm"]) for arm in arms for norms in _norms_of(results, arm))
        shown = list(dict.fromkeys((1, max(1, n // 2), n)))
        for ax in axes[len(shown) :]:
            ax.remove()
        for ax, i in zip(axes, shown, strict=False):
            for arm, color in zip(arms, cycle(colors()), strict=False):
                runs = [norms for norms in _norms_of(results, arm) if len(norms["norm"]) >= i]
                if not runs:
                    continue
                steps, count = runs[0]["steps"], min(len(norms["steps"]) for norms in runs)
                curves = [
                    [row[i - 1] if row[i - 1] is not None else math.nan for row in r["smooth"][:count]] for r in runs
                ]
                mean = [sum(column) / len(column) for column in zip(*curves, strict=True)]
                band = sum(norms["absolute_oscillation"][i - 1] or math.nan for norms in runs) / len(runs)
                ax.plot(steps[:count], mean, color=color, lw=1.5, label=_label(arm, len(runs)))
                ax.fill_between(
                    steps[:count], [v - band for v in mean], [v + band for v in mean], color=color, alpha=0.15, lw=0
                )
            place = ", outermost join" if i == 1 else ", the middle block's output" if i == n else ""
            ax.set(title=f"‖h_{i}‖{place}", xlabel="step")
            ax.set_ylim(bottom=0)
            ax.locator_params(axis="x", nbins=5)
        axes[0].set_ylabel("norm on training batches")
        axes[0].legend(fontsize=8)
    figure.suptitle(f"{results.plan.title}: norm against step (band: absolute oscillation over the second half)")
    return figure


def _norms_of(results: Results, arm: str) -> list[dict[str, Any]]:
    found = (record["norms"].get("backbone") for record in results.by_arm(arm).values())
    return [norms for norms in found if norms]


def _curves(results: Results) -> Figure:
    """Fig. 5: sample distance and validation loss against step; thick: mean over seeds, thin: seeds."""
    families = [arms for arms in results.families().values() if any(map(results.by_arm, arms))]
    keys = [key for key in CURVES if any(key in results.records[name]["curves"] for name in results.finished)]
    figure = new_figure(6 * len(keys), 3.9 * len(families))
    for (row, arms), (column, key) in product(enumerate(families), enumerate(keys)):
        ax = figure.add_subplot(len(families), len(keys), row * len(keys) + column + 1)
        for arm, color in zip(arms, cycle(colors()), strict=False):
            found = [measures_of(record).curves.get(key) for record in results.by_arm(arm).values()]
            curves = [curve for curve in found if curve is not None and len(curve)]
            for curve in curves:
                ax.plot(curve.steps, curve.values, color=color, lw=0.6, alpha=0.5)
            if curves and len({len(curve) for curve in curves}) == 1:
                mean = sum(curve.values for curve in curves) / len(curves)
                ax.plot(curves[0].steps, mean, color=color, lw=1.8, label=_label(arm, len(curves)))
        ax.set(xlabel="step", title=CURVES[key])
        ax.legend(fontsize=8)
    figure.suptitle(f"{results.plan.title} (thick: mean over seeds)")
    return figure


def _effects(results: Results) -> Figure:
    """Variant over no scaling at every level, one panel per measure, with 95 % intervals over settings."""
    tables = {EFFECTS[key]: results.effects(key) for key in DRAWN}
    tables = {title: table for title, table in tables.items() if any(any(cells.values()) for cells in table.values())}
    corners = list(next(iter(tables.values())))
    breaks = [k for k in range(1, len(corners)) if corners[k][0] != corners[k - 1][0]]
    figure = new_figure(2.6 * len(tables) + 1.4, (0.14 * len(results.scalings) + 0.16) * len(corners) + 1.2)
    grid = figure.subplots(1, len(tables), squeeze=False, sharey=True)[0]
    for ax, (title, table) in zip(grid, tables.items(), strict=True):
        for k, (scaling, color) in enumerate(zip(results.scalings, cycle(colors()[1:]), strict=False)):
            points = [(y, e) for y, corner in enumerate(corners) if (e := table[corner][scaling]) is not None]
            if points:
                ys = [y + 0.7 * ((k + 0.5) / len(results.scalings) - 0.5) for y, _ in points]
                low, high = ([getattr(e, end) or e.mean for _, e in points] for end in ("low", "high"))
                ax.hlines(ys, low, high, color=color, lw=1.2)
                ax.plot([e.mean for _, e in points], ys, "o", ms=4, color=color, label=scaling)
        ax.axvline(1, color="k", lw=0.8)
        for y in breaks:
            ax.axhline(y - 0.5, color="0.85", lw=0.8)
        ax.set_yticks(range(len(corners)), [" ".join(corner) for corner in corners])
        ax.set_ylim(len(corners) - 0.5, -0.5)
        if _spread(table) > 5:  # then 1, 2 and 5 give two ticks at least
            ax.set_xscale("log")
            ax.locator_params(axis="x", subs=(1, 2, 5), numticks=6)
            ax.minorticks_off()
            ax.xaxis.set_major_formatter("{x:g}")
        else:
            ax.locator_params(axis="x", nbins=4)
        ax.set_title(title, fontsize=10)
    figure.legend(
        *grid[0].get_legend_handles_labels(), fontsize=9, ncols=len(results.scalings), loc="outside lower center"
    )
    figure.suptitle(f"{results.plan.title}: variant over no scaling")
    return figure


def _spread(table: dict[tuple[str, str], dict[str, Estimate | None]]) -> float:
    """The largest end of an interval over the smallest."""
    found = [e for cells in table.values() for e in cells.values() if e is not None]
    ends = [end for e in found for end in (e.low, e.mean, e.high) if end is not None]
    return max(ends) / min(ends)


def _label(arm: str, seeds: int) -> str:
    return f"{arm} ({seeds} {'seed' if seeds == 1 else 'seeds'})"
