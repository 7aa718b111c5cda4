"""Figure 11: ‖b_i∘a_i‖ during training, by power iteration on Jacobian–vector products."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.experiments.statistics import Estimate, mean_interval, paired_ratio
from scalelong.experiments.table import plus_minus
from scalelong.paper.claims import where
from scalelong.paper.drawing import EXTRA, log_scale
from scalelong.paper.item import Outcome, Table
from scalelong.paper.trained import Trained
from scalelong.paper.verdict import Claim, above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INPUTS = 4  # held-out noisy images; the norm is the largest over them
ITERATIONS = 30


def figure_11(studies: Sequence[Trained], size: str) -> Outcome:
    claims, tables, panels = [], [], []
    for trained in studies:
        runs = {run.seed: norms_in_training(Path(run.folder)) for run in trained.of("none")}
        steps = sorted(set.intersection(*(set(one) for one in runs.values()))) if runs else []
        largest = {step: [max(one[step]) for one in runs.values()] for step in steps}
        smallest = {step: [min(one[step]) for one in runs.values()] for step in steps}
        claims += [
            Claim(
                f"{where(trained)}M_0 = max ‖b_i∘a_i‖ is above 1 at the end", "M_0 at the last step", above(1.0),
                _mean(largest, steps, -1), "> 1",
            ),
            Claim(
                f"{where(trained)}every ‖b_i∘a_i‖ is above 1 at every step looked at",
                "the smallest ‖b_i∘a_i‖ over i and steps", above(1.0),
                mean_interval([min(min(v) for v in one.values()) for one in runs.values()]) if runs else None, "> 1",
            ),
            Claim(
                f"{where(trained)}the norms grow with training", "M_0 at the last step / at initialisation", above(1.0),
                _growth(largest, steps), "monotonically increasing",
            ),
        ]  # fmt: skip
        rows = [
            ("M_0, the largest", *(plus_minus(mean_interval(largest[step])) for step in steps)),
            ("the smallest", *(plus_minus(mean_interval(smallest[step])) for step in steps)),
        ]
        title = f"{trained.title}: ‖b_i∘a_i‖ of no scaling, {len(runs)} seeds"
        tables.append(Table(title, ("step", *(f"{step:,}" for step in steps)), tuple(rows)))
        panels.append(
            {
                "label": trained.title,
                "norms": {str(seed): {str(k): v for k, v in one.items()} for seed, one in runs.items()},
            }
        )
    note = (
        f"The network's own weights, not the EMA's; the largest over {INPUTS} held-out noisy images. b_i∘a_i is "
        "linearised where the network runs, as a U-ViT joins by concatenation. Power iteration comes from below."
    )
    return Outcome(tuple(claims), tuple(tables), {"panels": panels}, (note,))


def norms_in_training(folder: Path) -> dict[int, list[float]]:
    """step → ‖b_1∘a_1‖ … ‖b_N∘a_N‖ at the start and at every checkpoint that is kept."""
    from safetensors.torch import load_file

    from scalelong.process import get_process
    from scalelong.robustness.block_norms import block_norms
    from scalelong.runs.run import Run, build_network
    from scalelong.training.examples import Examples

    run = Run(folder)
    config = run.config
    net = build_network(config, run.facts.shapes).eval()
    process = get_process(config.diffusion.process)
    batch = Examples(config, config.data.validation).probe(INPUTS)
    x_t, t = process.add_noise(batch.x_0, batch.eps, batch.t), process.network_time(batch.t)
    given: dict[str, Any] = {k: v for k, v in {"y": batch.y, "context": batch.context}.items() if v is not None}
    found: dict[int, list[float]] = {}
    for checkpoint in (None, *sorted(run.checkpoints_path.glob("step-*"))):
        if checkpoint is not None:
            net.load_state_dict(load_file(checkpoint / "model.safetensors"))
        step = 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))
        norms = block_norms(net, x_t, t, iterations=ITERATIONS, **given).norms
        found[step] = [round(value, 5) for value in norms]
    return found


def _mean(values: dict[int, list[float]], steps: list[int], place: int) -> Estimate | None:
    return mean_interval(values[steps[place]]) if steps else None


def _growth(values: dict[int, list[float]], steps: list[int]) -> Estimate | None:
    if len(steps) < 2:
        return None
    last, first = (dict(enumerate(values[step])) for step in (steps[-1], steps[0]))
    return paired_ratio(last, first)


def draw_figure_11(data: dict[str, Any], figure: Figure) -> None:
    axes = figure.subplots(1, len(data["panels"]), squeeze=False)[0]
    for ax, panel in zip(axes, data["panels"], strict=True):
        for k, norms in enumerate(panel["norms"].values()):
            steps = sorted(norms, key=int)
            for i in range(len(norms[steps[0]])):
                shade = ("#000000", *EXTRA)[i % 7]
                name = f"i = {i + 1}" if k == 0 else None
                ax.plot(
                    [int(s) for s in steps], [norms[s][i] for s in steps], "o-", ms=3, lw=1, color=shade, label=name
                )
        ax.axhline(1, color="#999999", ls=":", lw=1)
        ax.set(title=f"{panel['label']}, no scaling, every seed", xlabel="step", ylabel="‖b_i∘a_i‖")
        log_scale(ax)
        ax.legend(fontsize=8, ncols=2)
