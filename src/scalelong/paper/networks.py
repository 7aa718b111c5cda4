"""Figures 7 and 11: measurements inside trained networks, the learned κ_i and the norms of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.experiments.statistics import paired_ratio
from scalelong.paper.drawing import GRAY, SERIES, color, log_scale
from scalelong.paper.judge import Outcome, Table, above, below, cell, mean
from scalelong.paper.study import Trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAUSSIAN_INPUTS = 30  # as in the paper
LOW, HIGH = 0.5, 0.95  # the paper's range of κ
IMAGES = 4  # held-out noisy images for the norms, whose maximum is taken
ITERATIONS = 30  # of power iteration


def figure_7(studies: Sequence[Trained], size: str) -> Outcome:
    """Compare the coefficients that LS learned with the range of CS."""
    outcome = Outcome()
    for trained in studies:
        kappas = {run.seed: learned_kappas(Path(run.folder)) for run in trained.of("ls")}
        slopes, shares = ([f(values) for values in kappas.values()] for f in (decay, share_inside))
        text, quantity = "the κ_i that LS learns fall with i", "slope of log κ_i over i"
        outcome.claim(trained, text, quantity, below(0.0), mean(slopes), "almost CS's exponential")
        text, quantity = "they lie in CS's range, 0.5^(i−1) to 0.95^(i−1)", "share of κ_2 … κ_N inside"
        outcome.claim(trained, text, quantity, above(0.99), mean(shares), "all")
        outcome.data["panels"].append({"label": trained.title, "kappas": kappas})
        outcome.tables.append(_kappa_table(trained, list(kappas.values())))
    outcome.notes += [
        f"κ_i is the mean over tokens and {GAUSSIAN_INPUTS} inputs of N(0, I) at the last timestep, from the EMA "
        "network. LS starts near 0.5 for every i (a sigmoid cannot reach κ_1 = 1, so the range is counted from i = 2).",
        "A constant 0.5 lies in the range too: untrained, LS would pass the second claim, which tests little.",
    ]
    if size == "cpu":
        outcome.notes.append(
            "With 17 tokens and a reduction of 16 the calibration network has one hidden unit: where its ReLU is off, "
            "κ is the same for every skip and every input."
        )
    return outcome


def learned_kappas(folder: Path) -> list[float]:
    """Return κ_1 … κ_N of a run's EMA network on Gaussian inputs."""
    import torch

    from scalelong.runs.generate import best_device
    from scalelong.runs.run import load_run
    from scalelong.skips import describe

    run, device = load_run(folder), best_device()
    n, shapes, process = GAUSSIAN_INPUTS, run.facts.shapes, run.process
    x = torch.randn(n, shapes.channels, shapes.size, shapes.size, generator=torch.Generator().manual_seed(0))
    t = process.network_time(torch.full((n,), float(process.t_max)))
    conditions: dict[str, torch.Tensor] = {}
    if shapes.label_rows:
        conditions["y"] = torch.arange(n) % shapes.label_rows
    if shapes.text_tokens:
        conditions["context"] = torch.zeros(n, shapes.text_tokens, shapes.text_width or 1)
    inputs = {name: value.to(device) for name, value in conditions.items()}
    rows = describe(run.net.to(device), x.to(device), t.to(device), **inputs).rows
    coefficients = [row.coefficient for row in rows]
    return [float("nan") if value is None else round(value, 5) for value in coefficients]


def decay(kappas: Sequence[float]) -> float:
    """Return the least-squares slope of log κ_i over i; CS has log κ."""
    from scalelong.theory.fits import fit_line

    return fit_line(range(1, len(kappas) + 1), [math.log(kappa) for kappa in kappas]).slope


def share_inside(kappas: Sequence[float]) -> float:
    """Return the share of κ_2 … κ_N in [0.5^(i−1), 0.95^(i−1)]."""
    inside = [LOW ** (i - 1) <= kappa <= HIGH ** (i - 1) for i, kappa in enumerate(kappas, start=1) if i > 1]
    return sum(inside) / len(inside)


def _kappa_table(trained: Trained, kappas: list[list[float]]) -> Table:
    n = max(map(len, kappas), default=0)
    low, high = ([f"{base**i:.3g}" for i in range(n)] for base in (LOW, HIGH))
    means = [cell(values[i] for values in kappas) for i in range(n)]
    rows = (("LS", *means), ("CS with κ = 0.5", *low), ("CS with κ = 0.95", *high))
    title = f"{trained.title}: {trained.study.steps:,} steps, {len(kappas)} seeds"
    return Table(title, ("", *(f"κ_{i}" for i in range(1, n + 1))), rows)


def draw_figure_7(data: dict[str, Any], figure: Figure) -> None:
    """Draw the learned κ_i over the range of CS."""
    axes = figure.subplots(1, len(data["panels"]), squeeze=False)[0]
    for ax, panel in zip(axes, data["panels"], strict=True):
        skips = range(1, max((len(kappas) for kappas in panel["kappas"].values()), default=0) + 1)
        low, high = ([base ** (i - 1) for i in skips] for base in (LOW, HIGH))
        ax.fill_between(skips, low, high, color="#E69F00", alpha=0.3, lw=0, label="CS, κ from 0.5 to 0.95")
        for k, kappas in enumerate(panel["kappas"].values()):
            ax.plot(skips, kappas, "o-", ms=4, color=color("ls"), label="LS, one line per seed" if k == 0 else None)
        ax.set(title=panel["label"], xlabel="long skip i", ylabel="κ_i", ylim=(0, 1.05))
        ax.set_xticks(list(skips))
        ax.legend(fontsize=8)


def figure_11(studies: Sequence[Trained], size: str) -> Outcome:
    """Measure ‖b_i∘a_i‖ of the unscaled network during training."""
    note = (
        f"Weights of the network itself, not of the EMA; the maximum over {IMAGES} held-out noisy images. b_i∘a_i is "
        "linearized at the network's own inputs, since a U-ViT joins by concatenation. Power iteration gives a lower "
        "bound."
    )
    outcome = Outcome(notes=[note])
    for trained in studies:
        norms = {run.seed: norms_in_training(Path(run.folder)) for run in trained.of("none")}
        steps = sorted(set.intersection(*map(set, norms.values()))) if norms else []
        largest = {step: {seed: max(by_step[step]) for seed, by_step in norms.items()} for step in steps}
        smallest = {step: {seed: min(by_step[step]) for seed, by_step in norms.items()} for step in steps}
        overall = [min(min(values) for values in by_step.values()) for by_step in norms.values()]
        last = largest[steps[-1]] if steps else {}
        growth = paired_ratio(last, largest[steps[0]]) if len(steps) > 1 else None
        text, quantity = "M_0 = max ‖b_i∘a_i‖ is above 1 at the end", "M_0 at the last step"
        outcome.claim(trained, text, quantity, above(1.0), mean(last.values()), "> 1")
        text, quantity = "every ‖b_i∘a_i‖ is above 1 at every measured step", "the smallest ‖b_i∘a_i‖ over i and steps"
        outcome.claim(trained, text, quantity, above(1.0), mean(overall), "> 1")
        text, quantity = "the norms grow with training", "M_0 at the last step / at initialization"
        outcome.claim(trained, text, quantity, above(1.0), growth, "monotonically increasing")
        rows = [
            (name, *(cell(values[step].values()) for step in steps))
            for name, values in (("M_0, the largest", largest), ("the smallest", smallest))
        ]
        title = f"{trained.title}: ‖b_i∘a_i‖ without scaling, {len(norms)} seeds"
        outcome.tables.append(Table(title, ("step", *(f"{step:,}" for step in steps)), rows))
        outcome.data["panels"].append({"label": trained.title, "norms": norms})
    return outcome


def norms_in_training(folder: Path) -> dict[int, list[float]]:
    """Return step → ‖b_1∘a_1‖ … ‖b_N∘a_N‖ at initialization and at every kept checkpoint."""
    from safetensors.torch import load_file

    from scalelong.robustness import block_norms
    from scalelong.runs.generate import best_device
    from scalelong.runs.run import Run, build_network
    from scalelong.training.examples import Examples

    run = Run(folder)
    config, device = run.config, best_device()
    net = build_network(config, run.facts.shapes).to(device).eval()
    objective = run.objective
    batch = Examples(config, config.data.validation).probe(IMAGES).to(device)
    x_t, t = objective.network_inputs(objective.process.add_noise(batch.x_0, batch.eps, batch.t), batch.t)
    conditions: dict[str, Any] = {k: v for k, v in {"y": batch.y, "context": batch.context}.items() if v is not None}
    norms: dict[int, list[float]] = {}
    for checkpoint in (None, *sorted(run.checkpoints_path.glob("step-*"))):
        if checkpoint is not None:
            net.load_state_dict(load_file(checkpoint / "model.safetensors"))
        step = 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))
        values = block_norms(net, x_t, t, iterations=ITERATIONS, **conditions).norms
        norms[step] = [round(value, 5) for value in values]
    return norms


def draw_figure_11(data: dict[str, Any], figure: Figure) -> None:
    """Draw the norm of every block pair over training."""
    axes = figure.subplots(1, len(data["panels"]), squeeze=False)[0]
    for ax, panel in zip(axes, data["panels"], strict=True):
        for k, norms in enumerate(panel["norms"].values()):
            for i, values in enumerate(zip(*norms.values(), strict=True)):
                name = f"i = {i + 1}" if k == 0 else None
                ax.plot(
                    [int(step) for step in norms], values, "o-", ms=3, lw=1, color=SERIES[i % len(SERIES)], label=name
                )
        ax.axhline(1, color=GRAY, ls=":", lw=1)
        ax.set(title=f"{panel['label']}, no scaling, every seed", xlabel="step", ylabel="‖b_i∘a_i‖")
        log_scale(ax)
        ax.legend(fontsize=8, ncols=2)
