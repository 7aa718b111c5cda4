"""The pictures of losses and distances: curves over training, and dots at its end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from scalelong.paper.claims import label
from scalelong.paper.drawing import colour, log_scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curves(data: dict[str, Any], figure: Figure) -> None:
    """Left, every curve; right, each relative to the first variant's of the same seed."""
    panels = data["panels"]
    axes = figure.subplots(len(panels), 2, squeeze=False)
    for (left, right), panel in zip(axes, panels, strict=True):
        variants = list(dict.fromkeys(line["variant"] for line in panel["lines"]))
        for variant in variants:
            for k, line in enumerate(x for x in panel["lines"] if x["variant"] == variant):
                name = label(variant) if k == 0 else None
                left.plot(line["steps"], line["values"], lw=1, color=colour(variant), label=name)
        left.set(title=panel["label"], xlabel="step", ylabel=panel["title"])
        log_scale(left)
        for variant in variants[1:]:
            steps, changes = against(panel["lines"], variant, variants[0])
            right.plot(steps, changes, "o-", ms=3, color=colour(variant), label=label(variant))
        if variants:
            right.axhline(0, color=colour(variants[0]), lw=1)
            right.set(title=f"against {label(variants[0])}, mean over seeds", xlabel="step", ylabel="difference, %")
            left.legend(fontsize=8)
            right.legend(fontsize=8)


def against(lines: list[dict[str, Any]], variant: str, baseline: str) -> tuple[list[int], list[float]]:
    """Steps, and the geometric mean over seeds of the variant's value over the baseline's there, as % of change."""
    points: dict[str, dict[tuple[int, int], float]] = {variant: {}, baseline: {}}
    for line in lines:
        if line["variant"] in points:
            for step, value in zip(line["steps"], line["values"], strict=True):
                points[line["variant"]][step, line["seed"]] = value
    logs: dict[int, list[float]] = {}
    for (step, seed), value in points[variant].items():
        if (other := points[baseline].get((step, seed))) is not None and value > 0 and other > 0:
            logs.setdefault(step, []).append(math.log(value / other))
    steps = sorted(logs)
    return steps, [100 * math.expm1(sum(logs[step]) / len(logs[step])) for step in steps]


def draw_bars(data: dict[str, Any], figure: Figure) -> None:
    """A dot a seed and a bar at the mean, variants across; thin lines join the runs of one seed."""
    panels = data["panels"]
    columns = max(len(panel["measures"]) for panel in panels)
    stacked = columns > 1
    shape = (len(panels), columns) if stacked else (1, len(panels))
    axes = figure.subplots(*shape, squeeze=False)
    for k, panel in enumerate(panels):
        for j, measure in enumerate(panel["measures"]):
            ax = axes[k, j] if stacked else axes[0, k]
            for x, (variant, values) in enumerate(measure["values"].items()):
                found = list(values.values())
                if found:
                    ax.plot([x] * len(found), found, "o", ms=5, alpha=0.7, color=colour(variant))
                    mean = sum(found) / len(found)
                    ax.plot([x - 0.3, x + 0.3], [mean, mean], "-", color=colour(variant))
            variants = list(measure["values"])
            for seed in dict.fromkeys(seed for values in measure["values"].values() for seed in values):
                line = [measure["values"][variant].get(seed, math.nan) for variant in variants]
                ax.plot(range(len(variants)), line, "-", lw=0.8, color="#999999", zorder=0)
            names = [label(variant) for variant in variants]
            ax.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
            ax.set(title=panel["label"], ylabel=measure["title"].split(",")[0])
