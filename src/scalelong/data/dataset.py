"""Prepared images: memory-mapped, gathered, flipped and normalised as whole batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scalelong.data.cache import MANIFEST
from scalelong.data.captions import Captions
from scalelong.data.writer import FORMAT
from scalelong.errors import ScaleLongError

Indices = Tensor | npt.NDArray[np.int64] | Sequence[int]


class ImageData:
    """One prepared split. Nothing of it is in memory but what a batch asks for."""

    def __init__(self, folder: Path | str) -> None:
        """Open a prepared folder. Contents are compared with the manifest's sizes; `verify` compares hashes."""
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        stored = open_array(self.folder, "images", np.uint8, self._stored_shape())  # (n, c, h, w)
        self._pixels = torch.from_numpy(stored).flatten(1)  # (n, c·h·w)
        self.images: npt.NDArray[np.uint8] = stored.transpose(0, 2, 3, 1)  # (n, h, w, c)
        self.class_names: tuple[str, ...] | None = self._class_names()
        self.labels: npt.NDArray[np.int64] | None = self._open_labels()
        self.captions: Captions | None = self._open_captions()

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        about = (
            f"{self.name!r}, {self.split}: {len(self):,} images, {self.image_size}×{self.image_size}×{self.channels}"
        )
        classes = f", {self.num_classes} classes" if self.num_classes else ""
        return f"ImageData({about}{classes}{', captions' if self.captions is not None else ''})"

    def __reduce__(self) -> tuple[type[ImageData], tuple[Path]]:
        return ImageData, (self.folder,)  # another process opens the files itself

    name = property(lambda self: str(self.manifest["name"]))
    split = property(lambda self: str(self.manifest["split"]))
    fingerprint = property(lambda self: str(self.manifest["fingerprint"]), doc="A hash of everything in it.")

    @property
    def image_size(self) -> int:
        return self.images.shape[1]

    @property
    def channels(self) -> int:
        return self.images.shape[3]

    @property
    def num_classes(self) -> int | None:
        return None if self.class_names is None else len(self.class_names)

    def batch(self, indices: Indices, flip: Tensor | None = None) -> Tensor:
        """Images as float32 (B, C, H, W) in [-1, 1]; those where `flip` (B,) is true are mirrored left to right."""
        taken = self._pixels.index_select(0, as_indices(indices))
        taken = taken.view(-1, self.channels, self.image_size, self.image_size)
        if flip is not None:
            # NumPy reverses rows of bytes several times faster than torch does; both see the same memory.
            pixels, mirrored = taken.numpy(), np.asarray(flip, dtype=bool)
            pixels[mirrored] = pixels[mirrored][..., ::-1]
        return taken.float().sub_(127.5).mul_(1 / 127.5)

    def label_batch(self, indices: Indices) -> Tensor:
        """Labels as int64 (B,)."""
        if self.labels is None:
            raise ScaleLongError(f"{self.name} has no classes")
        return torch.from_numpy(np.asarray(self.labels)).index_select(0, as_indices(indices))

    def verify(self) -> None:
        """Compare every file with the hash in the manifest."""
        for name, expected in self.manifest["hashes"].items():
            if array_sha256(_load(self.folder, name, "r")) != expected:
                raise damaged(self.folder, f"{name}.npy does not have the hash in the manifest")

    def _stored_shape(self) -> tuple[int, ...]:
        shape = self.manifest["shape"]
        if not (
            isinstance(shape, list) and len(shape) == 4 and all(isinstance(side, int) and side > 0 for side in shape)
        ):
            raise damaged(self.folder, f"its shape is {shape!r}")
        count, height, width, channels = shape
        if height != width:
            raise damaged(self.folder, f"its images are {width}×{height}, not square")
        return count, channels, height, width

    def _class_names(self) -> tuple[str, ...] | None:
        names = self.manifest["class_names"]
        if names is None:
            return None
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise damaged(self.folder, "its class names are not a list of names")
        return tuple(names)

    def _open_labels(self) -> npt.NDArray[np.int64] | None:
        if self.class_names is None:
            return None
        labels = open_array(self.folder, "labels", np.int64, (len(self),))
        if labels.min() < 0 or labels.max() >= len(self.class_names):
            raise damaged(self.folder, f"a label is outside of 0…{len(self.class_names) - 1}")
        return labels

    def _open_captions(self) -> Captions | None:
        if "captions" not in self.manifest["hashes"]:
            return None
        starts = open_array(self.folder, "caption_starts", np.int64, (len(self) + 1,))
        offsets = open_array(self.folder, "caption_offsets", np.int64, (int(starts[-1]) + 1,))
        text = open_array(self.folder, "captions", np.uint8, (int(offsets[-1]),))
        if starts[0] != 0 or offsets[0] != 0 or np.any(np.diff(starts) < 1) or np.any(np.diff(offsets) < 1):
            raise damaged(self.folder, "its captions' positions are not in order")
        return Captions(text, offsets, starts)


def as_indices(indices: Indices) -> Tensor:
    """Indices as an int64 tensor on the CPU."""
    if isinstance(indices, Tensor):
        return indices.to("cpu", torch.int64)
    return torch.from_numpy(np.asarray(indices, dtype=np.int64))


def read_manifest(folder: Path) -> dict[str, Any]:
    """A prepared folder's manifest, checked for what every reader needs."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise ScaleLongError(f"{folder} is not prepared data: {MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise damaged(folder, f"{MANIFEST} is not JSON") from None
    needed = ("name", "split", "shape", "class_names", "hashes", "fingerprint", "skipped")
    if not isinstance(manifest, dict) or any(key not in manifest for key in needed):
        raise damaged(folder, f"{MANIFEST} does not have the keys {', '.join(needed)}")
    if not isinstance(manifest["hashes"], dict) or not isinstance(manifest["skipped"], list):
        raise damaged(folder, f"{MANIFEST} has other types than it should")
    if manifest.get("format") != FORMAT:
        raise ScaleLongError(
            f"{folder} is in format {manifest.get('format')!r}; this version reads {FORMAT}: prepare it again"
        )
    return manifest


def open_array(folder: Path, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Memory-map folder/name.npy, which must have this type and shape and its full length."""
    # Copy-on-write, for torch wants memory that can be written; nothing is.
    array = _load(folder, name, "c" if 0 not in shape else None)
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise damaged(folder, f"{name}.npy is {array.dtype} {array.shape}, not {np.dtype(dtype)} {shape}")
    return array


def _load(folder: Path, name: str, mode: Literal["r", "c"] | None) -> npt.NDArray[Any]:
    path = folder / f"{name}.npy"
    try:
        with open(path, "rb") as file:  # NumPy goes by the first bytes: it would take a zip file for many arrays
            first = file.read(6)
        if first != b"\x93NUMPY":
            raise ValueError("it is not an array")
        array: npt.NDArray[Any] = np.load(path, mmap_mode=mode, allow_pickle=False)
        return array
    except Exception as error:  # NumPy's reading of a damaged header raises many kinds
        raise damaged(folder, f"{name}.npy cannot be opened ({' '.join(str(error).split())})") from None


def array_sha256(array: npt.NDArray[Any]) -> str:
    """The SHA-256 of an array's bytes, without holding them all in memory."""
    digest = hashlib.sha256()
    flat = array.reshape(-1)
    for start in range(0, len(flat), 1 << 22):
        digest.update(np.ascontiguousarray(flat[start : start + (1 << 22)]).data)
    return digest.hexdigest()


def damaged(folder: Path, how: str) -> ScaleLongError:
    """The error for a prepared folder that is not what was written."""
    return ScaleLongError(
        f"the prepared data in {folder} is damaged: {how}; delete the folder, and it is prepared again"
    )
