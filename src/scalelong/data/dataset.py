"""Prepared images: memory-mapped, gathered, flipped and normalised as whole batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scalelong.data.cache import damaged, open_array, read_manifest
from scalelong.errors import DataError

FORMAT = 1  # of the prepared folder
Indices = Tensor | npt.NDArray[np.int64] | Sequence[int]


class ImageData:
    """One prepared split. Only the rows a batch needs are read from disk."""

    def __init__(self, folder: Path | str) -> None:
        """Open a prepared folder and check sizes against its manifest; `verify` also checks hashes."""
        self.folder = Path(folder)
        self.manifest = image_manifest(self.folder)
        self.name: str = self.manifest["name"]
        self.split: str = self.manifest["split"]
        self.fingerprint: str = self.manifest["fingerprint"]  # a hash of images, labels and captions
        count, height, width, channels = self.manifest["shape"]
        self._arrays: dict[str, npt.NDArray[Any]] = {}  # by file name
        stored = self._open("images", np.uint8, (count, channels, height, width))
        self._pixels = torch.from_numpy(stored).flatten(1)  # (n, c·h·w)
        self.images: npt.NDArray[np.uint8] = stored.transpose(0, 2, 3, 1)  # (n, h, w, c)
        self.image_size: int = height
        self.channels: int = channels
        names = self.manifest["class_names"]
        self.class_names: tuple[str, ...] | None = None if names is None else tuple(names)
        self.num_classes = None if names is None else len(names)
        self.labels: npt.NDArray[np.int64] | None = None
        if names is not None:
            self.labels = self._open("labels", np.int64, (count,))
            if self.labels.min() < 0 or self.labels.max() >= len(names):
                raise damaged(self.folder, f"labels must be in 0…{len(names) - 1}")
        self.captions: Captions | None = self._open_captions() if "captions" in self.manifest["hashes"] else None

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        size = f"{self.image_size}×{self.image_size}×{self.channels}"
        classes = f", {self.num_classes} classes" if self.num_classes else ""
        captions = ", captions" if self.captions is not None else ""
        return f"ImageData({self.name!r}, {self.split}: {len(self):,} images, {size}{classes}{captions})"

    def __reduce__(self) -> tuple[type[ImageData], tuple[Path]]:
        return ImageData, (self.folder,)  # another process opens the files itself

    def batch(self, indices: Indices, flip: Tensor | None = None) -> Tensor:
        """Return images as float32 (B, C, H, W) in [-1, 1], mirrored left to right where `flip` (B,) is true."""
        rows = self._pixels.index_select(0, as_indices(indices))
        rows = rows.view(-1, self.channels, self.image_size, self.image_size)
        if flip is not None:
            # NumPy reverses rows of bytes several times faster than torch does; both share the memory.
            pixels, mirrored = rows.numpy(), np.asarray(flip, dtype=bool)
            pixels[mirrored] = pixels[mirrored][..., ::-1]
        return rows.float().sub_(127.5).mul_(1 / 127.5)

    def label_batch(self, indices: Indices) -> Tensor:
        """Return labels as int64 (B,)."""
        if self.labels is None:
            raise DataError(f"{self.name} has no classes")
        return torch.from_numpy(np.asarray(self.labels)).index_select(0, as_indices(indices))

    def verify(self) -> None:
        """Compare every array with its hash in the manifest."""
        for name, array in self._arrays.items():
            if hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() != self.manifest["hashes"].get(name):
                raise damaged(self.folder, f"{name}.npy does not match its hash in the manifest")

    def _open(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        self._arrays[name] = open_array(self.folder, name, dtype, shape)
        return self._arrays[name]

    def _open_captions(self) -> Captions:
        starts = self._open("caption_starts", np.int64, (len(self) + 1,))
        offsets = self._open("caption_offsets", np.int64, (int(starts[-1]) + 1,))
        text = self._open("captions", np.uint8, (int(offsets[-1]),))
        if starts[0] != 0 or offsets[0] != 0 or np.any(np.diff(starts) < 1) or np.any(np.diff(offsets) < 1):
            raise damaged(self.folder, "caption offsets are not increasing")
        return Captions(text, offsets, starts)


class Captions:
    """Memory-mapped captions. `captions[i]` is the first one of image i, `captions.of(i)` lists all of them."""

    def __init__(self, text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]):
        self._text = text  # the UTF-8 bytes of all captions
        self._offsets = offsets  # (m + 1,): caption j is bytes offsets[j]:offsets[j + 1]
        self._starts = starts  # (n + 1,): image i has captions starts[i]:starts[i + 1]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> str:
        return self.of(range(len(self))[index])[0]

    def of(self, index: int) -> list[str]:
        """Return all captions of image `index`."""
        bounds = self._offsets[self._starts[index] : self._starts[index + 1] + 1].tolist()
        return [bytes(self._text[start:end]).decode("utf-8", "replace") for start, end in pairwise(bounds)]


def as_indices(indices: Indices) -> Tensor:
    """Convert indices to an int64 tensor on the CPU."""
    return torch.as_tensor(indices, dtype=torch.int64, device="cpu")


def image_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of prepared images and check the types of what its readers need."""
    manifest = read_manifest(folder)
    if (found := manifest.get("format")) != FORMAT:
        raise DataError(f"{folder} has format {found!r}, expected {FORMAT}; delete the folder to prepare it again")
    shape, names = manifest.get("shape"), manifest.get("class_names", 0)
    valid = [
        all(isinstance(manifest.get(key), str) for key in ("name", "split", "fingerprint")),
        isinstance(manifest.get("hashes"), dict) and isinstance(manifest.get("skipped"), list),
        names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)),
        isinstance(shape, list) and len(shape) == 4 and all(isinstance(side, int) and side > 0 for side in shape),
    ]
    if not all(valid):
        raise damaged(folder, "the manifest is incomplete or has wrong types")
    return manifest
