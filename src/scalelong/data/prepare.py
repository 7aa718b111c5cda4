"""From a name or a path to prepared data: find the source, write it once into the cache, open it."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scalelong.data.archives import is_archive
from scalelong.data.cache import MANIFEST, build_once
from scalelong.data.catalog import CATALOG
from scalelong.data.dataset import ImageData, read_manifest
from scalelong.data.folder import listing_sha256, read_folder
from scalelong.data.hub import is_saved_dataset, read_hub
from scalelong.data.numpy_files import read_numpy
from scalelong.data.records import Options, Reading, shown
from scalelong.data.spec import DatasetSpec, unpacked
from scalelong.data.splits import canonical
from scalelong.data.writer import write_split
from scalelong.errors import ScaleLongError, suggestion
from scalelong.files import cache_dir

VERSION = 1  # of the preparation: to be raised when a source or its pinned version gives other arrays


@dataclass(frozen=True)
class Origin:
    """Where a dataset comes from: one of the named ones, a Hugging Face dataset, or a path."""

    name: str
    spec: DatasetSpec | None = None
    hub: str | None = None
    path: Path | None = None

    def folder(self, split: str, options: Options) -> Path:
        """Where the split is in the cache. A changed file, folder or option gives another place."""
        facts: dict[str, Any] = {"version": VERSION, **asdict(options)}
        if self.spec is not None:
            default = options == self.spec.with_defaults(Options())
            return _data_dir() / (f"{self.name}-v{VERSION}" if default else f"{self.name}-{_short(facts)}") / split
        if self.hub is not None:
            facts["hub"] = self.hub
        if self.path is not None:
            facts["path"] = str(self.path.resolve())
            facts["files"] = listing_sha256(self.path) if self.path.is_dir() else _stamp(self.path)
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.name).name).strip(".-")[:60] or "data"
        return _data_dir() / f"{slug}-{_short(facts)}" / _slug_of_split(split)

    def open(self, split: str, options: Options, local: Path | None, skip_bad: bool, stack: ExitStack) -> Reading:
        """The split's examples."""
        if self.spec is not None:
            return self.spec.open(split, options, local, stack)
        if self.hub is not None:
            return read_hub(self.hub, split, options, source=self.name)
        path = self.path
        assert path is not None
        if path.is_dir() and is_saved_dataset(path):
            return read_hub(str(path), split, options, source=shown(str(path)))
        if path.suffix.lower() in (".npy", ".npz"):
            return read_numpy(path, split, options, source=shown(str(path)))
        folder = path if path.is_dir() else unpacked(path, stack)
        return read_folder(folder, split, options, source=shown(str(path)), skip_bad=skip_bad)


def resolve(name: str | Path) -> Origin:
    """What a user's word for a dataset means; a name of ours goes before a path of the same spelling."""
    text = str(name)
    if not text.strip() or "\0" in text:
        raise ScaleLongError(f"the dataset's name is {text!r}; give one of {', '.join(CATALOG)}, a path, or hf:NAME")
    if isinstance(name, str) and name in CATALOG:
        return Origin(name, spec=CATALOG[name])
    if text.startswith("hf:"):
        target = text.removeprefix("hf:").strip()
        if not target:
            raise ScaleLongError("hf: is followed by the name of a Hugging Face dataset (owner/name) or a saved folder")
        path = Path(target).expanduser()
        return Origin(shown(text), path=path) if path.is_dir() else Origin(shown(text), hub=target)
    path = Path(text).expanduser()
    try:
        there, is_dir, is_file = path.exists(), path.is_dir(), path.is_file()
    except OSError as error:  # a name that no file could have
        raise ScaleLongError(f"{text[:80]!r} is no path ({error.strerror})") from None
    if is_dir or (is_file and (path.suffix.lower() in (".npy", ".npz") or is_archive(path))):
        return Origin(shown(text), path=path)
    if there:
        raise ScaleLongError(f"{text} is not data that is read here: a folder, .npy, .npz, .zip or .tar is")
    if "/" in text or "\\" in text or path.suffix:
        raise ScaleLongError(f"{text} does not exist")
    raise ScaleLongError(
        f"unknown dataset {text!r}{suggestion(text, CATALOG)} (known: {', '.join(CATALOG)}, any path, and hf:NAME)"
    )


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

    `name`: a named dataset, an image folder or archive, a NumPy file, or `hf:NAME`. `image_size`: crop and resize to
    this. `background`: the colour under transparent images. `holdout`: the share of `train` kept for `validation`.
    `skip_bad`: leave out what cannot be used (`data.manifest["skipped"]` lists it) where otherwise the first such
    file is an error. `source`: a local copy of a named dataset's published files. `force`: prepare again.
    """
    options = Options(image_size, channels, background, holdout, config, image_column, label_column, caption_column)
    origin = resolve(name)
    if origin.spec is not None:
        if holdout or config or image_column or label_column or caption_column:
            raise ScaleLongError(
                f"{origin.name} has its own splits and columns; holdout and columns are for other data"
            )
        split, options = origin.spec.split(split), origin.spec.with_defaults(options)
    elif source is not None:
        raise ScaleLongError(f"source is for the named datasets ({', '.join(CATALOG)}), not for {origin.name}")
    split = canonical(split)
    folder = origin.folder(split, options)
    local = None if source is None else Path(source).expanduser()

    def write(aside: Path) -> None:
        _write(origin, split, options, aside, local, skip_bad)

    build_once(folder, write, force=force)
    data = ImageData(folder)
    skipped = data.manifest["skipped"]
    if skipped and not skip_bad:
        raise ScaleLongError(
            f"{origin.name} was prepared without {len(skipped)} bad files, the first of which, {skipped[0][0]}, "
            f"{skipped[0][1]}; give skip_bad (--skip-bad) to use it as it is"
        )
    return data


def _write(origin: Origin, split: str, options: Options, folder: Path, local: Path | None, skip_bad: bool) -> None:
    with ExitStack() as stack:
        manifest = write_split(
            folder,
            origin.open(split, options, local, skip_bad, stack),
            options,
            skip_bad=skip_bad,
            description=f"preparing {origin.name} ({split})",
            name=origin.name,
            split=split,
        )
    if origin.spec is not None:
        _verify(origin.spec, manifest)


def _verify(spec: DatasetSpec, manifest: dict[str, Any]) -> None:
    """Compare a named dataset with what is known of it: its count, and its contents where these are pinned."""
    split, count, skipped = manifest["split"], manifest["shape"][0], len(manifest["skipped"])
    expected = spec.counts[split]
    if count + skipped not in expected:
        allowed = " or ".join(f"{number:,}" for number in expected)
        raise ScaleLongError(
            f"{manifest['source']} gave {count + skipped:,} images of {spec.name} ({split}), not {allowed}"
        )
    pinned = spec.contents.get(split)
    default = manifest["shape"][1:] == [spec.image_size, spec.image_size, spec.channels]
    if pinned is not None and default and not skipped and manifest["content_sha256"] != pinned:
        raise ScaleLongError(
            f"{manifest['source']} does not hold {spec.name} as it was published: the {split} split's content has "
            f"SHA-256 {manifest['content_sha256']}, not {pinned}"
        )


def prepared(root: Path | None = None) -> list[dict[str, Any]]:
    """The manifests of everything in the cache, each with its folder."""
    found = []
    for path in sorted((root or _data_dir()).glob(f"*/*/{MANIFEST}")):
        if path.parent.name.startswith(".") or path.parent.parent.name.startswith("."):
            continue
        try:
            found.append({**read_manifest(path.parent), "folder": str(path.parent)})
        except ScaleLongError:
            continue
    return found


def _data_dir() -> Path:
    return cache_dir() / "data"


def _short(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _slug_of_split(split: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", split):
        raise ScaleLongError(f"{split!r} is no name of a split; train, validation and test are")
    return split
