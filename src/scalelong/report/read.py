"""The runs of a report, with a name and a label for each. A file that is absent or damaged leaves its part out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scalelong.files import read_json
from scalelong.runs.config import Config, flatten
from scalelong.runs.run import COMPARISON, Run, find_runs
from scalelong.scaling import parse_scaling

SEPARATOR = " · "


@dataclass(frozen=True)
class RunView:
    """A run on the page. `name` is unique; runs with the same `label` differ in their seed alone."""

    index: int
    run: Run
    name: str
    label: str
    seed: int | None
    is_baseline: bool = False

    @property
    def finished(self) -> bool:
        steps = self.run.settings.get("train.steps")
        return not isinstance(steps, int) or self.run.logged_step >= steps


def read_runs(paths: Sequence[Path | str]) -> list[RunView]:
    """Open runs in the given order. The folder of a comparison stands for its runs."""
    runs = find_runs(paths)
    seeds = [seed if type(seed := run.settings.get("seed")) is int else None for run in runs]
    labels = _labels(runs, seeds)
    stored = read_json(Path(paths[0]) / COMPARISON) if len(paths) == 1 else None
    scalings = [label.partition(SEPARATOR)[0] for label in labels]
    baseline = (stored or {}).get("baseline")
    baseline = baseline if baseline in scalings else "none"
    columns = zip(runs, _names(runs), labels, seeds, (scaling == baseline for scaling in scalings), strict=True)
    return [RunView(index, *column) for index, column in enumerate(columns)]


def labels(views: Sequence[RunView]) -> list[str]:
    """All labels, each once. The baseline comes first: that of a comparison, otherwise the unscaled network."""
    first = {view.label for view in views if view.is_baseline}
    return sorted(dict.fromkeys(view.label for view in views), key=lambda label: label not in first)


def differing_keys(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The keys whose values differ between the runs. A run of an older version has the default of a newer setting.

    Scalings of different kinds have different settings; such a setting is compared between the runs that have it.
    """
    keys = dict.fromkeys(key for own in settings for key in own)
    differing = []
    for key in keys:
        default = () if is_scaling_key(key) or key not in _defaults() else (_defaults()[key],)
        present = [own[key] for own in settings if key in own]
        values = [*present, *default * (len(present) < len(settings))]
        if any(value != values[0] for value in values):
            differing.append(key)
    return differing


@cache
def _defaults() -> dict[str, Any]:
    return flatten(Config().to_dict())


def is_scaling_key(key: str) -> bool:
    """Whether a dotted setting belongs to the scaling."""
    return key == "kappa" or key.startswith("scaling.")


def _labels(runs: list[Run], seeds: list[int | None]) -> list[str]:
    """The scaling's label, followed by the other settings that distinguish the runs: two, or more where needed."""
    settings = [run.settings for run in runs if run.settings]
    differing = [key for key in differing_keys(settings) if key not in ("seed", "preset") and not is_scaling_key(key)]
    whole = [_label(run, differing) for run in runs]
    for shown in range(2, max(2, len(differing)) + 1):
        labels = [_label(run, differing[:shown]) for run in runs]
        if len(set(zip(labels, whole, strict=True))) == len(set(labels)):  # equal labels hide no difference
            break
    distinct = set(zip(labels, seeds, strict=True))
    return labels if len(distinct) == len(runs) else _names(runs)


def _label(run: Run, keys: Sequence[str]) -> str:
    others = [f"{key.rpartition('.')[2]} {run.settings.get(key, _defaults().get(key))}" for key in keys]
    return SEPARATOR.join([scaling_of(run), *others]) if run.settings else run.name


def scaling_of(run: Run) -> str:
    """The label of the run's scaling."""
    stored: Any = run.record["config"].get("scaling")
    try:
        return parse_scaling(stored).label
    except (ValueError, TypeError, KeyError):
        return str(stored.get("kind", "?") if isinstance(stored, dict) else "?")[:40]


def _names(runs: list[Run]) -> list[str]:
    """Folder names, with as much of the path as makes them unique."""
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(names):
            break
    return names
