"""Load a dataset by name or path: find its source, write it into the cache once, open it."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scalelong.data.cache import MANIFEST, build_once
from scalelong.data.catalog import CATALOG, DatasetSpec
from scalelong.data.dataset import ImageData, image_manifest
from scalelong.data.folder import listing_sha256, read_folder
from scalelong.data.hub import is_saved_dataset, read_hub
from scalelong.data.numpy_files import read_numpy
from scalelong.data.records import Options, Reading, canonical_split, printable
from scalelong.data.registries import is_archive, unpacked
from scalelong.data.writer import write_split
from scalelong.errors import DataError, UnknownNameError, invalid, suggestion
from scalelong.files import cache_dir

VERSION = 1  # of the preparation; increase it when a source or its pinned version changes the arrays
ARRAYS = (".npy", ".npz")


@dataclass(frozen=True)
class Origin:
    """Where a dataset comes from: a named dataset, a Hugging Face dataset, or a path."""

    name: str
    spec: DatasetSpec | None = None
    hub: str | None = None
    path: Path | None = None

    def folder(self, split: str, options: Options) -> Path:
        """Return the split's folder in the cache, which depends on the files' listing and on the options."""
        facts: dict[str, Any] = {"version": VERSION, **asdict(options)}
        if self.spec is not None:
            default = options == self.spec.with_defaults(Options())
            return _data_dir() / (f"{self.name}-v{VERSION}" if default else f"{self.name}-{_short(facts)}") / split
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", split):
            raise invalid("split", "a name such as train, validation or test", split)
        if self.hub is not None:
            facts["hub"] = self.hub
        if self.path is not None:
            status = self.path.stat()
            facts["path"] = str(self.path.resolve())
            folder = self.path.is_dir()
            facts["files"] = listing_sha256(self.path) if folder else [status.st_size, status.st_mtime_ns]
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.name).name).strip(".-")[:60] or "data"
        return _data_dir() / f"{slug}-{_short(facts)}" / split

    def open(
        self, split: str, options: Options, source: str | Path | None, skip_bad: bool, stack: ExitStack
    ) -> Reading:
        """Open the split's examples. Temporary files last until `stack` closes."""
        if self.spec is not None:
            return self.spec.open(split, options, source, stack)
        title = printable(str(self.path or self.name))
        if self.path is None or (self.path.is_dir() and is_saved_dataset(self.path)):
            return read_hub(self.hub or str(self.path), split, options, title)
        if self.path.suffix.lower() in ARRAYS:
            reading = read_numpy(self.path, split, options, stack)
        else:
            folder = self.path if self.path.is_dir() else unpacked(self.path, stack)
            reading = read_folder(folder, split, options, skip_bad)
        return replace(reading, source=title)


def resolve(name: str | Path) -> Origin:
    """Return what `name` refers to. A named dataset takes precedence over a path of the same spelling."""
    text = str(name)
    if not text.strip() or "\0" in text:
        raise invalid("dataset", f"one of {', '.join(CATALOG)}, a path, or hf:NAME", text)
    if isinstance(name, str) and name in CATALOG:
        return Origin(name, spec=CATALOG[name])
    if text.startswith("hf:"):
        target = text.removeprefix("hf:").strip()
        if not target:
            raise invalid("dataset", "hf: followed by owner/name or a saved folder", text)
        path = Path(target).expanduser()
        return Origin(printable(text), path=path) if path.is_dir() else Origin(printable(text), hub=target)
    path = Path(text).expanduser()
    try:
        exists, supported = path.exists(), path.is_dir() or path.suffix.lower() in ARRAYS or is_archive(path)
    except OSError as error:  # not a possible file name
        raise DataError(f"{text[:80]!r} is not a path ({error.strerror})") from None
    if exists and not (supported and (path.is_dir() or path.is_file())):
        raise DataError(f"{text} is not supported: expected a folder, .npy, .npz, .zip or .tar file")
    if exists:
        return Origin(printable(text), path=path)
    if "/" in text or "\\" in text or path.suffix:
        raise DataError(f"{text} does not exist")
    known = f"known: {', '.join(CATALOG)}, any path, and hf:NAME"
    raise UnknownNameError(f"unknown dataset {text!r}{suggestion(text, CATALOG)} ({known})")


def load(
    name: str | Path,
    split: str = "train",
    *,
    image_size: int | None = None,
    channels: int | None = None,
    background: str | None = None,
    holdout: float = 0.0,
    skip_bad: bool = False,
    source: str | Path | None = None,
    config: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    caption_column: str | None = None,
    force: bool = False,
) -> ImageData:
    """Open a dataset, after preparing it if it is not in the cache yet.

    Args:
        name: a named dataset, an image folder or archive, a NumPy file, or `hf:NAME`.
        split: `train`, `validation` or `test`.
        image_size: crop to the centre square and resize to this many pixels per side.
        channels: 1 for grey, 3 for RGB. Default: the dataset's own, or 3.
        background: the colour behind transparent pixels.
        holdout: the share of `train` reserved for `validation`, where the data has no such split.
        skip_bad: skip unusable files and list them in `data.manifest["skipped"]` instead of raising an error.
        source: for a named dataset, the path of a local copy of the published files, or "hub" or "registries".
        config, image_column, label_column, caption_column: of a Hugging Face dataset.
        force: prepare it again.
    """
    options = Options(image_size, channels, background, holdout, config, image_column, label_column, caption_column)
    origin = resolve(name)
    if origin.spec is not None:
        if holdout or config or image_column or label_column or caption_column:
            raise DataError(f"{origin.name} has its own splits and columns; holdout and columns are for other data")
        split, options = origin.spec.split(split), origin.spec.with_defaults(options)
    elif source is not None:
        raise DataError(f"source is for named datasets ({', '.join(CATALOG)}), got source={source} for {origin.name}")
    split = canonical_split(split)
    folder = origin.folder(split, options)

    def write(temporary: Path) -> None:
        description = f"preparing {origin.name} ({split})"
        with ExitStack() as stack:
            reading = origin.open(split, options, source, skip_bad, stack)
            facts = {"name": origin.name, "split": split}
            manifest = write_split(temporary, reading, options, skip_bad=skip_bad, description=description, **facts)
        if origin.spec is not None:
            _verify(origin.spec, manifest)

    build_once(folder, write, force=force)
    data = ImageData(folder)
    skipped = data.manifest["skipped"]
    if skipped and not skip_bad:
        raise DataError(
            f"{origin.name} was prepared without {len(skipped)} bad files ({skipped[0][0]} {skipped[0][1]}); "
            "set skip_bad (--skip-bad) to use it anyway"
        )
    return data


def _verify(spec: DatasetSpec, manifest: dict[str, Any]) -> None:
    """Compare a named dataset with its known count, and with its known contents where these are pinned."""
    split, count, skipped = manifest["split"], manifest["shape"][0], len(manifest["skipped"])
    if count + skipped not in spec.counts[split]:
        expected = " or ".join(f"{number:,}" for number in spec.counts[split])
        raise DataError(
            f"{spec.name} ({split}) must have {expected} images, got {count + skipped:,} from {manifest['source']}"
        )
    pinned, found = spec.contents.get(split), manifest["content_sha256"]
    default = manifest["shape"][1:] == [spec.image_size, spec.image_size, spec.channels]
    if pinned is not None and default and not skipped and found != pinned:
        raise DataError(
            f"{manifest['source']} does not hold {spec.name} ({split}) as published: expected contents with SHA-256 "
            f"{pinned}, got {found}; choose another source with --source (hub, registries or a path)"
        )


def prepared() -> list[dict[str, Any]]:
    """Return the manifests of all prepared datasets, each with its folder."""
    manifests = []
    for path in sorted(_data_dir().glob(f"[!.]*/[!.]*/{MANIFEST}")):
        try:
            manifests.append({**image_manifest(path.parent), "folder": str(path.parent)})
        except DataError:
            continue
    return manifests


def _data_dir() -> Path:
    return cache_dir() / "data"


def _short(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
