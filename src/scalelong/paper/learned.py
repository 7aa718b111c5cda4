"""Figure 7: the coefficients that LS has learned, beside the range that CS is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelong.experiments.statistics import mean_interval
from scalelong.experiments.table import plus_minus
from scalelong.paper.claims import where
from scalelong.paper.drawing import colour
from scalelong.paper.item import Outcome, Table
from scalelong.paper.trained import Trained
from scalelong.paper.verdict import Claim, above, below

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INPUTS = 30  # Gaussian inputs, as the paper's
LOW, HIGH = 0.5, 0.95  # the paper's range of κ


def figure_7(studies: Sequence[Trained], size: str) -> Outcome:
    claims, tables, panels = [], [], []
    for trained in studies:
        kappas = {run.seed: learned_kappas(Path(run.folder)) for run in trained.of("ls")}
        slopes = [decay(values) for values in kappas.values()]
        shares = [share_inside(values) for values in kappas.values()]
        claims += [
            Claim(
                f"{where(trained)}the κ_i that LS learns fall with i",
                "slope of log κ_i over i",
                below(0.0),
                mean_interval(slopes) if slopes else None,
                "almost CS's exponential",
            ),
            Claim(
                f"{where(trained)}they lie in CS's range, 0.5^(i−1) to 0.95^(i−1)",
                "share of κ_2 … κ_N inside",
                above(0.99),
                mean_interval(shares) if shares else None,
                "all",
            ),
        ]
        panels.append({"label": trained.title, "kappas": {str(seed): k for seed, k in kappas.items()}})
        tables.append(_table(trained, kappas))
    notes: tuple[str, ...] = (
        f"κ_i: the mean over tokens and {INPUTS} inputs of N(0, I) at the last timestep, from the EMA network. LS "
        "starts near 0.5 for every i (κ_1 = 1 cannot be reached by a sigmoid, so the band is counted from i = 2).",
        "A constant 0.5 lies in the band too: untrained, LS would pass the second claim, which tests little.",
    )
    if size == "cpu":
        notes += (
            "With 17 tokens and a reduction of 16 the calibration network has one hidden unit: where its ReLU is off, "
            "κ is the same for every skip and every input.",
        )
    return Outcome(tuple(claims), tuple(tables), {"panels": panels}, notes)


def learned_kappas(folder: Path) -> list[float]:
    """κ_1 … κ_N of a run's EMA network on Gaussian inputs."""
    import torch

    from scalelong.process import get_process
    from scalelong.runs.run import load_run
    from scalelong.skips import describe

    trained = load_run(folder)
    shapes, process = trained.facts.shapes, get_process(trained.config.diffusion.process)
    x = torch.randn(INPUTS, shapes.channels, shapes.size, shapes.size, generator=torch.Generator().manual_seed(0))
    t = process.network_time(torch.full((INPUTS,), float(process.t_max)))
    conditions: dict[str, Any] = {}
    if shapes.label_rows:
        conditions["y"] = torch.arange(INPUTS) % shapes.label_rows
    if shapes.text_tokens:
        conditions["context"] = torch.zeros(INPUTS, shapes.text_tokens, shapes.text_width or 1)
    found = [row.coefficient for row in describe(trained.net, x, t, **conditions).rows]
    return [float("nan") if value is None else round(value, 5) for value in found]


def decay(kappas: Sequence[float]) -> float:
    """The slope of log κ_i over i by least squares; CS has log κ."""
    return float(np.polyfit(np.arange(1, len(kappas) + 1), np.log(kappas), 1)[0])


def share_inside(kappas: Sequence[float]) -> float:
    """Of κ_2 … κ_N, the share in [0.5^(i−1), 0.95^(i−1)]."""
    inside = [LOW ** (i - 1) <= kappa <= HIGH ** (i - 1) for i, kappa in enumerate(kappas, start=1) if i > 1]
    return sum(inside) / len(inside)


def _table(trained: Trained, kappas: dict[int, list[float]]) -> Table:
    n = max((len(values) for values in kappas.values()), default=0)
    means = [plus_minus(mean_interval([values[i] for values in kappas.values()])) for i in range(n)]
    low, high = ([f"{base**i:.3g}" for i in range(n)] for base in (LOW, HIGH))
    rows = (("LS", *means), ("CS with κ = 0.5", *low), ("CS with κ = 0.95", *high))
    columns = ("", *(f"κ_{i}" for i in range(1, n + 1)))
    title = f"{trained.title}: {trained.steps:,} steps, {len(kappas)} seeds"
    return Table(title, columns, rows)


def draw_figure_7(data: dict[str, Any], figure: Figure) -> None:
    axes = figure.subplots(1, len(data["panels"]), squeeze=False)[0]
    for ax, panel in zip(axes, data["panels"], strict=True):
        n = max((len(kappas) for kappas in panel["kappas"].values()), default=0)
        skips = range(1, n + 1)
        ax.fill_between(
            skips, [LOW ** (i - 1) for i in skips], [HIGH ** (i - 1) for i in skips], color="#E69F00", alpha=0.3, lw=0,
            label="CS, κ from 0.5 to 0.95",
        )  # fmt: skip
        for k, kappas in enumerate(panel["kappas"].values()):
            ax.plot(skips, kappas, "o-", ms=4, color=colour("ls"), label="LS, a line a seed" if k == 0 else None)
        ax.set(title=panel["label"], xlabel="long skip i", ylabel="κ_i", ylim=(0, 1.05))
        ax.set_xticks(list(skips))
        ax.legend(fontsize=8)
