"""Prepared images: memory-mapped, gathered, flipped and normalised as whole batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scalelong.data.cache import array_sha256, damaged, open_array, read_manifest
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
        stored = open_array(self.folder, "images", np.uint8, (count, channels, height, width))
        self._pixels = torch.from_numpy(stored).flatten(1)  # (n, c·h·w)
        self.images: npt.NDArray[np.uint8] = stored.transpose(0, 2, 3, 1)  # (n, h, w, c)
        self.image_size: int = height
        self.channels: int = channels
        names = self.manifest["class_names"]
        self.class_names: tuple[str, ...] | None = None if names is None else tuple(names)
        self.num_classes = None if names is None else len(names)
        self.labels: npt.NDArray[np.int64] | None = self._open_labels()
        self.captions: Captions | None = self._open_captions()

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
        for name, expected in self.manifest["hashes"].items():
            if array_sha256(self.folder, name) != expected:
                raise damaged(self.folder, f"{name}.npy does not match its hash in the manifest")

    def _open_labels(self) -> npt.NDArray[np.int64] | None:
        if self.class_names is None:
            return None
        labels = open_array(self.folder, "labels", np.int64, (len(self),))
        if labels.min() < 0 or labels.max() >= len(self.class_names):
            raise damaged(self.folder, f"labels must be in 0…{len(self.class_names) - 1}")
        return labels

    def _open_captions(self) -> Captions | None:
        if "captions" not in self.manifest["hashes"]:
            return None
        starts = open_array(self.folder, "caption_starts", np.int64, (len(self) + 1,))
        offsets = open_array(self.folder, "caption_offsets", np.int64, (int(starts[-1]) + 1,))
        text = open_array(self.folder, "captions", np.uint8, (int(offsets[-1]),))
        if starts[0] != 0 or offsets[0] != 0 or np.any(np.diff(starts) < 1) or np.any(np.diff(offsets) < 1):
            raise damaged(self.folder, "caption offsets are not increasing")
        return Captions(text, offsets, starts)


class Captions:
    """Memory-mapped captions. `captions[i]` is the first one of image i, `captions.of(i)` lists all of them."""

    def __init__(self, text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]):
        self._text = text  # the UTF-8 bytes of all captions
        self._offsets = offsets  # (m + 1,): caption j is bytes offsets[j]:offsets[j + 1]
        self.starts = starts  # (n + 1,): image i has captions starts[i]:starts[i + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> str:
        return self.caption(int(self.starts[range(len(self))[index]]))

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    @property
    def total(self) -> int:
        """The number of captions of all images."""
        return len(self._offsets) - 1

    def caption(self, number: int) -> str:
        """Return caption `number` of `total`."""
        return bytes(self._text[self._offsets[number] : self._offsets[number + 1]]).decode("utf-8", "replace")

    def of(self, index: int) -> list[str]:
        """Return all captions of image `index`."""
        return [self.caption(number) for number in range(self.starts[index], self.starts[index + 1])]


def as_indices(indices: Indices) -> Tensor:
    """Convert indices to an int64 tensor on the CPU."""
    if isinstance(indices, Tensor):
        return indices.to("cpu", torch.int64)
    return torch.from_numpy(np.asarray(indices, dtype=np.int64))


def image_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of prepared images and check the types of what its readers need."""
    manifest = read_manifest(folder)
    if manifest.get("format") != FORMAT:
        found = manifest.get("format")
        raise DataError(f"{folder} has format {found!r}, expected {FORMAT}; prepare it again (--force)")
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
