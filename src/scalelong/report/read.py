"""What a report is made from: run folders, read as they are. A file that is absent or broken leaves its part out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalelong.errors import ScaleLongError
from scalelong.experiments.comparison import FILE as COMPARISON
from scalelong.experiments.distance import read_card, read_distance, read_on_the_way
from scalelong.experiments.worker import read_resources
from scalelong.runs.config import flatten
from scalelong.runs.logs import EMPTY, Series, read_columns
from scalelong.runs.watch_log import WatchLog, read_watch_log


@dataclass(frozen=True)
class RunView:
    """One run. `label` is what it is called beside the others; runs of one label differ by their seed alone."""

    index: int
    folder: Path
    name: str
    label: str
    seed: int | None
    record: dict[str, Any]
    settings: dict[str, Any]  # the config by dotted keys
    columns: dict[str, Series] = field(repr=False)
    watch: WatchLog | None = field(repr=False)
    cards: tuple[dict[str, Any], ...] = field(repr=False)
    robustness: dict[str, Any] | None = field(repr=False)
    resources: dict[str, Any] = field(repr=False)

    def column(self, name: str) -> Series:
        return self.columns.get(name, EMPTY)

    @property
    def step(self) -> int:
        """The last step that was logged."""
        last = [series.steps[-1] for series in self.columns.values() if len(series)]
        return int(max(last)) if last else 0


def labels(runs: Sequence[RunView]) -> list[str]:
    """What the runs are called, each once: what is not scaled first, for it is the baseline, then as they came."""
    return sorted(dict.fromkeys(run.label for run in runs), key=lambda label: label != "none")


def read_runs(paths: Sequence[Path | str]) -> list[RunView]:
    """Runs in the given order; the folder of a comparison stands for its runs."""
    folders = _folders(paths)
    records = [_object(folder / "config.json") or {} for folder in folders]
    settings = [flatten(_config(record)) for record in records]
    called, names = _labels(settings, folders), _names(folders)
    return [
        RunView(
            index=index,
            folder=folder,
            name=names[index],
            label=called[index],
            seed=_seed(settings[index]),
            record=records[index],
            settings=settings[index],
            columns=read_columns(folder / "metrics.jsonl"),
            watch=read_watch_log(folder / "stability.jsonl"),
            cards=tuple(card for card in _cards(folder) if card is not None),
            robustness=_object(folder / "robustness.json"),
            resources=read_resources(folder),
        )
        for index, folder in enumerate(folders)
    ]


def _folders(paths: Sequence[Path | str]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        comparison = _object(path / COMPARISON)
        if comparison is not None:
            listed = [path / Path(str(run.get("folder", ""))).name for run in _list(comparison.get("runs"))]
            found += sorted((folder for folder in listed if folder.is_dir()), key=_order(comparison))
        elif (path / "config.json").is_file() or (path / "metrics.jsonl").is_file():
            found.append(path)
        else:
            what = "is not there" if not path.exists() else "is neither a run folder (config.json) nor a comparison"
            raise ScaleLongError(f"{path} {what}; scalelong train and scalelong compare make them")
    unique = list({folder.resolve(): folder for folder in found}.values())
    if not unique:
        raise ScaleLongError("there is no run to report on")
    return unique


def _cards(folder: Path) -> list[dict[str, Any] | None]:
    """`scalelong evaluate`'s, a comparison's, and the newest of training."""
    return [read_card(folder / "evaluation.json"), read_distance(folder), read_on_the_way(folder)]


def _order(comparison: dict[str, Any]) -> Any:
    """Variants as they were asked for, each with its seeds."""
    place = {str(row.get("variant")): k for k, row in enumerate(_list(comparison.get("rows")))}
    runs = {
        Path(str(run.get("folder", ""))).name: (place.get(str(run.get("variant")), 0), str(run.get("seed")))
        for run in _list(comparison.get("runs"))
    }
    return lambda folder: runs.get(folder.name, (0, ""))


def _labels(settings: list[dict[str, Any]], folders: list[Path]) -> list[str]:
    """The scaling's short name, and what else differs between the runs beside it."""
    other = [
        key
        for key in dict.fromkeys(key for own in settings for key in own)
        if key not in ("seed", "kappa", "preset") and not key.startswith("scaling.")
        and len({repr(own.get(key)) for own in settings if own}) > 1
    ]  # fmt: skip
    labels = []
    for own, folder in zip(settings, folders, strict=True):
        if not own:
            labels.append(folder.resolve().name)
            continue
        more = [f"{key.rpartition('.')[2]} {own.get(key)}" for key in other[:2]]
        labels.append(" · ".join([_scaling(own), *more]))
    if len({(label, _seed(own)) for label, own in zip(labels, settings, strict=True)}) < len(labels):
        return [folder.resolve().name for folder in folders]  # labels cannot tell them apart: their names can
    return labels


def _scaling(settings: dict[str, Any]) -> str:
    from scalelong.scaling import parse_scaling

    spec = {key.removeprefix("scaling."): value for key, value in settings.items() if key.startswith("scaling.")}
    try:
        return parse_scaling({key: list(v) if isinstance(v, tuple) else v for key, v in spec.items()}).label
    except (ValueError, TypeError, KeyError):
        return str(spec.get("kind", "?"))[:40]


def _names(folders: list[Path]) -> list[str]:
    """Folder names, with as much of the path before them as tells them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(own) for own in parts]


def _config(record: dict[str, Any]) -> dict[str, Any]:
    config = record.get("config")
    return config if isinstance(config, dict) else {}


def _seed(settings: dict[str, Any]) -> int | None:
    seed = settings.get("seed")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def _object(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _list(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
