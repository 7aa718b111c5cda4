"""A run on the Hugging Face hub: its network, logs, samples and a model card generated from them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelong.errors import RunError
from scalelong.models.hub import check_repo_id, upload
from scalelong.runs.logs import Series
from scalelong.version import __version__

if TYPE_CHECKING:
    from scalelong.runs.run import Run

# Not checkpoints: they hold the optimizer's state and are several times larger than the network.
PARTS = (
    "config.json", "metrics.jsonl", "stability.jsonl", "resources.json", "evaluation.json", "distance.json",
    "robustness.json", "model",
)  # fmt: skip
CURVES, SAMPLES, REAL = "curves.svg", "samples/samples.png", "samples/real.png"


def push_run(
    run: Run, repo_id: str, *, private: bool | None = None, token: str | None = None, message: str | None = None,
    create_pr: bool = False, licence: str = "apache-2.0",
) -> str:  # fmt: skip
    """Upload a run with a model card and return the address of the commit.

    Args:
        run: A trained run.
        repo_id: owner/name; created if it does not exist.
        private: Whether a new repository is private. Default: the account's.
        token: An access token with the right to write. Default: that of `hf auth login` or $HF_TOKEN.
        message: The commit message.
        create_pr: Open a pull request instead of committing.
        licence: The licence of the network, as the hub spells it. It is yours to choose, within that of the data.
    """
    check_repo_id(repo_id)
    with tempfile.TemporaryDirectory() as folder:
        write_hub_folder(run, Path(folder), repo_id, licence)
        title = message or f"Upload {run.name}, step {run.step}"
        return upload(folder, repo_id, private=private, token=token, message=title, create_pr=create_pr)


def write_hub_folder(run: Run, folder: Path, repo_id: str, licence: str = "apache-2.0") -> None:
    """Write what `push_run` uploads: the run without its checkpoints, its last samples, and README.md."""
    if not run.model_path.is_dir():
        raise RunError(f"{run.folder} has no trained network (model/); train it to its first checkpoint")
    for name in PARTS:
        source = run.folder / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.is_file():
            shutil.copy(source, folder / name)
    grids = sorted(run.samples_path.glob("step-*.png"))
    for picture, name in (*((grid, SAMPLES) for grid in grids[-1:]), (run.folder / REAL, REAL)):
        if picture.is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(picture, folder / name)
    curves = {name: run.column(name).finite() for name in ("loss", "val_loss_ema")}
    curves = {name: series for name, series in curves.items() if len(series) > 1 and (series.values > 0).all()}
    if curves:  # a loss of your own may be negative, which a logarithmic axis cannot show
        (folder / CURVES).write_text(draw_curves(curves), encoding="utf-8")
    (folder / "README.md").write_text(model_card(run, folder, repo_id, licence), encoding="utf-8")


def model_card(run: Run, folder: Path, repo_id: str, licence: str) -> str:
    """The card of a run: data, scaling, training, curves, metrics with their cards, usage, limits."""
    return "\n".join([*_header(run, licence), *_facts(run), *_results(run, folder), *_usage(run, repo_id), ""])


def _header(run: Run, licence: str) -> Iterator[str]:
    task = "text-to-image" if run.config.data.text else "unconditional-image-generation"
    yield from ("---", f"license: {licence}", "library_name: scalelong", f"pipeline_tag: {task}")
    yield from ("tags:", "- diffusion", "- scalelong", "---")
    yield from ("", f"# {run.name}", "")
    task = "class-conditional " * bool(run.facts.class_names) + "text-to-image " * bool(run.config.data.text)
    yield f"A {task}diffusion model trained with [scalelong](https://arxiv.org/abs/2310.13545) {__version__}."
    yield ""


def _facts(run: Run) -> Iterator[str]:
    from scalelong.data.catalog import CATALOG
    from scalelong.skips import describe

    config, record, shapes = run.config, run.record, run.facts.shapes
    data, spec = record.get("data", {}), CATALOG.get(config.data.name)
    name = config.data.name if spec is not None else Path(config.data.name).name  # no path of somebody's machine
    size = f"{shapes.size}×{shapes.size}×{shapes.channels}{' latents' if config.data.vae else ''}"
    kappas = [row.coefficient for row in describe(run.net).rows]
    scaling = config.scaling.label
    if kappas and all(kappa is not None for kappa in kappas):
        scaling += f": κ_i = {', '.join(f'{kappa:.3g}' for kappa in kappas)}"
    train = config.train
    rows = {
        "data": f"{name}, split {config.data.split}, {data.get('n', '?')} images, {size}",
        "licence of the data": (spec.licence if spec is not None else "") or "not recorded",
        "network": f"{type(run.net).__name__}, {record.get('parameters', 0):,} parameters, {len(kappas)} long skips",
        "scaling": scaling,
        "objective": f"{config.diffusion.objective}, process {config.diffusion.process}",
        "training": f"{run.step:,} steps of {train.batch_size} images, lr {train.lr:g}, seed {config.seed}",
        "EMA": f"decay {config.ema.decay:g}; model/ holds the averaged weights",
        "versions": ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items()),
    }
    yield from ("| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), "")
    if run.failure:
        yield from (f"Training ended with an error: {run.failure}", "")


def _results(run: Run, folder: Path) -> Iterator[str]:
    from scalelong.evaluation.evaluate import stored_metrics

    for title, name in (("Samples", SAMPLES), ("Data", REAL), ("Loss", CURVES)):
        if (folder / name).is_file():
            yield from (f"## {title}", "", f"![{title}]({name})", "")
    yield from ("## Evaluation", "")
    if not run.evaluations:
        yield from ("Not evaluated.", "")
    for data in run.evaluations.values():
        card: dict[str, Any] = data["card"]
        parts = (card.get("reference"), card.get("generation"))
        reference, made = (part if isinstance(part, dict) else {} for part in parts)
        yield from ("| metric | value | 95 % interval |", "|---|---|---|")
        for metric in stored_metrics(data):
            interval = "" if metric.low is None or metric.high is None else f"{metric.low:.4g} … {metric.high:.4g}"
            value = "not a number" if metric.value is None else f"{metric.value:.4g}"
            yield f"| {metric.label} | {value} | {interval} |"
        known = {
            "samples": card.get("n"), "step": made.get("step"), "reference": reference.get("name"),
            "split": reference.get("split"), "reference images": reference.get("n"), "extractor": card.get("extractor"),
            "weights": card.get("weights"), "resize": card.get("resize"), "sampler": made.get("sampler"),
            "evaluations": made.get("evaluations"), "guidance": made.get("guidance"), "EMA": made.get("ema"),
            "seed": made.get("sample_seed"),
        }  # fmt: skip
        yield from ("", "; ".join(f"{key} {value}" for key, value in known.items() if value is not None) + ".", "")


def _usage(run: Run, repo_id: str) -> Iterator[str]:
    names, text = run.facts.class_names, run.config.data.text
    call = 'prompt="…"' if text else f"class_labels=[{names[0]!r}]" if names else "batch_size=16"
    yield from (
        "## Use", "", "```python", "from scalelong import ScaleLongPipeline", "from scalelong.runs import Run", "",
        f'pipe = ScaleLongPipeline.from_pretrained("{repo_id}")', f"images = pipe({call}).images",
        f'run = Run.from_pretrained("{repo_id}")  # the network, config and logs', "```", "",
        f"`scalelong sample hf:{repo_id}` and the other commands that take a run accept it too.", "",
        "Trained for research on the stability of diffusion models; outputs were not filtered.",
    )  # fmt: skip


def draw_curves(curves: dict[str, Series], width: int = 640, height: int = 240) -> str:
    """An SVG of positive series over steps, the vertical axis logarithmic."""
    steps = max(float(series.steps[-1]) for series in curves.values())
    logs = {name: np.log10(series.values) for name, series in curves.items()}
    low, high = min(v.min() for v in logs.values()), max(v.max() for v in logs.values())
    x0, y0, w, h = 56, 12, width - 72, height - 44

    def place(step: float, value: float) -> str:
        return f"{x0 + w * step / steps:.1f},{y0 + h * (high - value) / max(high - low, 1e-9):.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{x0} {y0}v{h}h{w}" fill="none" stroke="#888"/>',
    ]
    for k, (name, series) in enumerate(curves.items()):
        picked = np.unique(np.linspace(0, len(series) - 1, 400).astype(int))
        points = " ".join(place(series.steps[i], logs[name][i]) for i in picked)
        color = ("#9bb8d3", "#b5442e")[k % 2]
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        lines.append(f'<text x="{x0 + w - 90}" y="{y0 + 14 + 15 * k}" fill="{color}">{name}</text>')
    for value, y in ((high, y0 + 4), (low, y0 + h)):
        lines.append(f'<text x="{x0 - 6}" y="{y}" text-anchor="end">{10**value:.3g}</text>')
    lines.append(f'<text x="{x0 + w}" y="{height - 12}" text-anchor="end">step {steps:,.0f}</text></svg>')
    return "\n".join(lines) + "\n"
