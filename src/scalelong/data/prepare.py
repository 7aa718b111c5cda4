"""Load a dataset by name or path: find its source, decode it, write it into the cache once, open it."""

import glob
import hashlib
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from scalelong.data.cache import MANIFEST, NpyWriter, build_once, write_array, write_manifest
from scalelong.data.catalog import CATALOG, DatasetSpec
from scalelong.data.dataset import FORMAT, ImageData, image_manifest
from scalelong.data.hub import is_saved_dataset, read_hub
from scalelong.data.images import pillow_warnings, read_image
from scalelong.data.local import listing_sha256, read_folder, read_numpy
from scalelong.data.records import BadExampleError, Example, Options, Pixels, Reading, canonical_split, clean_captions
from scalelong.data.registries import is_archive, unpacked
from scalelong.data.tars import read_tars, tar_shards
from scalelong.errors import DataError, UnknownNameError, invalid, printable, suggestion
from scalelong.files import cache_dir
from scalelong.progress import track

VERSION = 1  # of the preparation; increase it when a source or its pinned version changes the arrays
READER = 3  # of folders and archives, likewise
CHOSEN = "chosen"  # a file beside the manifest of data that `scalelong data prepare` wrote
ARRAYS = (".npy", ".npz")
Manifest = dict[str, Any]
Decoded = tuple[Pixels, int, tuple[str, ...]]  # image, label (-1 without classes), captions


@dataclass(frozen=True)
class Origin:
    """Where a dataset comes from: a named dataset, a Hugging Face dataset, or a path."""

    name: str
    spec: DatasetSpec | None = None
    hub: str | None = None
    path: Path | None = None

    def folder(self, split: str, options: Options) -> Path:
        """Return the split's folder in the cache, which depends on the files' listing and on the options."""
        if self.spec is not None and options == self.spec.with_defaults(Options()):
            return cache_dir() / "data" / f"{self.name}-v{VERSION + self.spec.revision}" / split
        version = VERSION + (0 if self.spec is None else self.spec.revision)
        facts: dict[str, Any] = {"version": version, **asdict(options)}
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", split):
            raise invalid("split", "a name such as train, validation or test", split)
        if self.hub is not None:
            facts["hub"], facts["reader"] = self.hub, READER
        if self.path is not None:
            size_and_time = [self.path.stat().st_size, self.path.stat().st_mtime_ns]
            facts["path"], facts["reader"] = str(self.path.resolve()), READER
            facts["files"] = listing_sha256(self.path) if self.path.is_dir() else size_and_time
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        return cache_dir() / "data" / f"{self.slug}-{key}" / split

    def made(self, manifest: Manifest) -> bool:
        """Whether prepared data comes from here, whatever the path was called and whatever it held then."""
        if self.path is None:
            return bool(manifest["name"] == self.name)
        return Path(manifest["source"]).resolve() == self.path.resolve()

    @property
    def slug(self) -> str:
        """The beginning of the name of the folder in the cache."""
        name = Path(self.name).name if self.path is None else self.path.resolve().name
        return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "data"

    def open(self, split: str, options: Options, skip_bad: bool, stack: ExitStack) -> Reading:
        """Open a split of data that has no name in the catalog. Temporary files last until `stack` closes."""
        title = printable(str(self.path or self.name))
        if self.path is None:
            return read_hub(self.hub or self.name, split, options, title)
        if self.path.is_dir() and is_saved_dataset(self.path):
            reading = read_hub(str(self.path), split, options, title)
        elif self.path.suffix.lower() in ARRAYS:
            reading = read_numpy(self.path, split, options, stack)
        elif tar_shards(self.path):
            reading = read_tars(self.path, split, options)
        else:
            folder = self.path if self.path.is_dir() else unpacked(self.path, stack)
            reading = read_folder(folder, split, options, skip_bad, title)
        return replace(reading, source=printable(str(self.path.absolute())))


def absolute_name(name: str) -> str:
    """Return an existing path as an absolute one, so that the commands of a run find it from any folder."""
    start = "hf:" if name.startswith("hf:") else ""
    path = Path(name.removeprefix(start)).expanduser()
    return name if name in CATALOG or not path.exists() else f"{start}{os.path.abspath(path)}"


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
    name: str | Path, split: str = "train", *,
    image_size: int | None = None, channels: int | None = None, background: str | None = None, holdout: float = 0.0,
    skip_bad: bool = False, source: str | Path | None = None, config: str | None = None,
    image_column: str | None = None, label_column: str | None = None, caption_column: str | None = None,
    force: bool = False,
) -> ImageData:  # fmt: skip
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
        config: configuration of a Hugging Face dataset.
        image_column: column of a Hugging Face dataset that holds the images.
        label_column: column of its labels.
        caption_column: column of its captions.
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
        with ExitStack() as stack:
            if origin.spec is not None:
                reading = origin.spec.open(split, options, source, stack)
            else:
                reading = origin.open(split, options, skip_bad, stack)
            manifest = _write_split(temporary, reading, options, skip_bad, origin.name, split)
        if origin.spec is not None:
            _verify(origin.spec, manifest)

    build_once(folder, write, force=force)
    data = ImageData(folder)
    skipped = data.manifest["skipped"]
    if skipped and not skip_bad and not (folder / CHOSEN).is_file():  # `data prepare --skip-bad` has said so
        first = " ".join(skipped[0])
        hint = "set skip_bad (--skip-bad) to use it anyway"
        raise DataError(f"{origin.name} was prepared without {len(skipped)} bad files ({first}); {hint}")
    return data


def _write_split(folder: Path, reading: Reading, options: Options, skip_bad: bool, name: str, split: str) -> Manifest:
    """Decode the examples of a reading, write arrays and a manifest to `folder`, and return the manifest."""
    description = f"preparing {name} ({split})"
    shape = reading.shape  # of every image; by default the first image's
    labels: list[int] = []
    text, offsets, starts = bytearray(), [0], [0]
    contents: list[bytes] = []
    skipped: list[BadExampleError] = []
    outcomes = _decoded(reading, options)
    with pillow_warnings(), closing(outcomes), NpyWriter(folder / "images.npy", np.uint8) as images:
        for example, result in track(outcomes, description, total=reading.total):
            try:
                image, label, captions = result()
                _check_shape(example, image.shape, shape)
            except BadExampleError as error:
                if not skip_bad:
                    hint = "" if "; " in error.reason else "; set skip_bad (--skip-bad) to leave out such files"
                    raise BadExampleError(error.name, error.reason + hint) from None
                skipped.append(error)
                continue
            if not images.count:
                shape = image.shape
                _check_space(folder, image.nbytes, reading.total)
            images.append(image.transpose(2, 0, 1)[None])  # channels first, as a gathered batch has them
            labels.append(label)
            for caption in captions:
                text += caption.encode()
                offsets.append(len(text))
            starts.append(len(offsets) - 1)
            contents.append(hashlib.sha256(image.tobytes() + label.to_bytes(8, "little", signed=True)).digest())
    if shape is None or not images.count:
        reason = f"all {len(skipped)} images are bad; the first: {skipped[0]}" if skipped else "there are no images"
        raise DataError(f"{description}: {reason}")
    arrays: dict[str, Any] = {}
    if reading.class_names is not None:
        arrays["labels"] = np.asarray(labels, np.int64)
    if reading.captioned:
        arrays["captions"] = np.frombuffer(text, np.uint8)
        arrays["caption_offsets"] = np.asarray(offsets, np.int64)
        arrays["caption_starts"] = np.asarray(starts, np.int64)
    hashes = {name: write_array(folder / f"{name}.npy", array) for name, array in arrays.items()}
    identity = {
        "shape": [images.count, *shape],  # (n, h, w, c)
        "class_names": None if reading.class_names is None else list(reading.class_names),
        "hashes": {"images": images.digest.hexdigest(), **hashes},
    }
    manifest = {
        "format": FORMAT, "name": name, "split": split, "source": reading.source, **identity,
        "fingerprint": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        # Independent of the order of the examples, to compare sources with each other.
        "content_sha256": hashlib.sha256(b"".join(sorted(contents))).hexdigest(),
        "options": {key: value for key, value in vars(options).items() if value},
        "skipped": [[error.name, error.reason] for error in skipped], **reading.extra,
        "versions": {package: metadata.version(package) for package in ("scalelong", "numpy", "pillow")},
    }  # fmt: skip
    write_manifest(folder, manifest)
    return manifest


def _decoded(reading: Reading, options: Options) -> Generator[tuple[str, Callable[[], Decoded]], None, None]:
    """Yield the name of each example and a call for its result. Threads decode image files, a bounded number ahead."""
    workers = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    pending: deque[tuple[str, Callable[[], Decoded]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for example in reading.examples:
                decode = partial(_decode, example, reading, options)
                if isinstance(example.image, np.ndarray):  # too little work for a thread
                    yield example.name, decode
                    continue
                pending.append((example.name, pool.submit(decode).result))
                if len(pending) == 8 * workers:
                    yield pending.popleft()
            while pending:
                yield pending.popleft()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _decode(example: Example, reading: Reading, options: Options) -> Decoded:
    name, label, classes = example.name, -1, reading.class_names
    if classes is not None:
        if example.label is None:
            raise BadExampleError(name, "has no label")
        if not 0 <= example.label < len(classes):
            raise BadExampleError(name, f"has label {example.label}, expected 0…{len(classes) - 1}")
        label = example.label
    captions = clean_captions(example.captions, name) if reading.captioned else ()
    image = (reading.decode or read_image)(example.image, name, options)
    return np.ascontiguousarray(image, np.uint8), label, captions


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    size = f"is {shape[1]}×{shape[0]}×{shape[2]}"
    if shape[0] != shape[1]:
        raise BadExampleError(name, f"{size}, not square; set image_size (--image-size N) to crop it")
    if expected is not None and shape != expected:
        others = f"the others are {expected[1]}×{expected[0]}×{expected[2]}"
        raise BadExampleError(name, f"{size}, but {others}; set image_size (--image-size N) to resize all")


def _check_space(folder: Path, size: int, total: int | None) -> None:
    needed, free = size * (total or 0), shutil.disk_usage(folder).free
    if needed > free:
        sizes = f"{needed / 2**30:.1f} GiB in {folder.parent}, which has {free / 2**30:.1f} GiB free"
        raise DataError(f"{total:,} images need {sizes}; set SCALELONG_CACHE to a larger disk")


def _verify(spec: DatasetSpec, manifest: Manifest) -> None:
    """Compare a named dataset with its known count, and with its known contents where these are pinned."""
    split, source, skipped = manifest["split"], manifest["source"], len(manifest["skipped"])
    count = manifest["shape"][0] + skipped
    if count not in spec.counts[split]:
        expected = " or ".join(f"{number:,}" for number in spec.counts[split])
        raise DataError(f"{spec.name} ({split}) must have {expected} images, got {count:,} from {source}")
    pinned, found = spec.contents.get(split), manifest["content_sha256"]
    default = manifest["shape"][1:] == [spec.image_size, spec.image_size, spec.channels]
    if pinned is not None and default and not skipped and found != pinned:
        command = f"scalelong data prepare {spec.name} --source …"
        reason = f"its contents must have SHA-256 {pinned}, got {found}; choose another source: {command}"
        raise DataError(f"{source} does not hold {spec.name} ({split}) as published: {reason}")


def prepared() -> list[Manifest]:
    """Return the manifests of all prepared datasets, each with its folder."""
    manifests = []
    for path in sorted((cache_dir() / "data").glob(f"[!.]*/[!.]*/{MANIFEST}")):
        with suppress(DataError):
            manifests.append({**image_manifest(path.parent), "folder": str(path.parent)})
    return manifests


@dataclass(frozen=True)
class Prepared:
    """Data in the cache and the options of `load` that open it."""

    options: dict[str, Any]
    manifest: Manifest


def load_prepared(name: str | Path, split: str = "train", **given: Any) -> ImageData:
    """Open a dataset as `scalelong data prepare` last prepared it; `given` are options of `load` that are not None."""
    chosen = {key: value for key, value in given.items() if value is not None}
    prepared = as_prepared(str(name), chosen, split)
    return load(name, split, **(chosen if prepared is None else prepared.options))


def as_prepared(name: str, given: dict[str, Any], split: str = "train") -> Prepared | None:
    """Return how `scalelong data prepare` last prepared this data, if it did since the data changed.

    `given` are options of `load` that must agree.
    """
    origin = resolve(name)
    if origin.spec is not None:
        return None
    marks = (cache_dir() / "data").glob(f"{glob.escape(origin.slug)}-*/{canonical_split(split)}/{CHOSEN}")
    for mark in sorted(marks, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        with suppress(DataError, TypeError):
            manifest = image_manifest(mark.parent)
            chosen = Options(**manifest["options"])
            options = {**asdict(chosen), "skip_bad": given.get("skip_bad", bool(manifest["skipped"]))}
            agrees = all(options[key] == value for key, value in given.items())
            if agrees and origin.folder(manifest["split"], chosen) == mark.parent:
                return Prepared(options, manifest)
    return None
