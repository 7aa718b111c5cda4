"""Captions encoded once: memory-mapped tokens by image, and those of the empty prompt for guidance."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scalelong.data.cache import MANIFEST, build_once
from scalelong.data.captions import Captions, clean_captions
from scalelong.data.dataset import ImageData, Indices, as_indices, damaged, open_array
from scalelong.data.text_encoder import TextEncoder, load_text_encoder
from scalelong.data.writer import NpyAppender
from scalelong.errors import ScaleLongError
from scalelong.files import cache_dir
from scalelong.progress import track

FORMAT = 1
BATCH = 64


class TokenData:
    """Encoded captions. Each different caption is kept once; an image may have several."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        try:
            self.manifest = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            rows, length, width = self.manifest["shape"]
            images, captions = self.manifest["images"], self.manifest["captions"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(self.folder, f"its manifest cannot be read ({error})") from None
        tokens = open_array(self.folder, "tokens", np.float16, (rows, length, width))
        self._tokens = torch.from_numpy(tokens).flatten(1)  # (rows, T·D); row 0 is the empty prompt
        self._row_of = torch.from_numpy(open_array(self.folder, "row_of_caption", np.int64, (captions,)))
        self._starts = torch.from_numpy(open_array(self.folder, "caption_starts", np.int64, (images + 1,)))
        self.length, self.width = int(length), int(width)
        starts, row_of = self._starts, self._row_of
        if starts[0] != 0 or starts[-1] != captions or bool((starts.diff() < 1).any()):
            raise damaged(self.folder, "its captions' positions are not in order")
        if int(row_of.min()) < 0 or int(row_of.max()) >= rows:
            raise damaged(self.folder, f"a caption's row is outside of 0…{rows - 1}")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __repr__(self) -> str:
        return f"TokenData({len(self):,} images, {self.length}×{self.width} tokens by {self.encoder})"

    def __reduce__(self) -> tuple[type[TokenData], tuple[Path]]:
        return TokenData, (self.folder,)

    @property
    def encoder(self) -> str:
        """The text encoder's name."""
        return str(self.manifest["encoder"])

    @property
    def fingerprint(self) -> str:
        """A hash of captions and encoder."""
        return str(self.manifest["fingerprint"])

    @property
    def empty(self) -> Tensor:
        """The tokens of the empty prompt, float32 (T, D)."""
        return self._tokens[0].view(self.length, self.width).float()

    def batch(self, indices: Indices, pick: Tensor | None = None) -> Tensor:
        """Tokens of the images' captions as float32 (B, T, D).

        Of an image's k captions number `pick` mod k is taken; the first without `pick`, whole numbers (B,).
        """
        images = as_indices(indices)
        first = self._starts.index_select(0, images)
        if pick is not None:
            count = self._starts.index_select(0, images + 1) - first
            first = first + pick.to("cpu", torch.int64).remainder(count)
        rows = self._row_of.index_select(0, first)
        return self._tokens.index_select(0, rows).view(-1, self.length, self.width).float()


def encode_text(
    data: ImageData | Captions | Sequence[str],
    encoder: str | Path | TextEncoder = "minilm",
    max_length: int | None = None,
) -> TokenData:
    """Encode every caption of a dataset (or of a list, one an image) into the cache, or open what is there."""
    if isinstance(data, ImageData) and data.captions is None:
        raise ScaleLongError(f"{data.name} has no captions to encode")
    given = data.captions if isinstance(data, ImageData) else data
    assert given is not None
    if isinstance(given, str) or not len(given):
        raise ScaleLongError("there are no captions to encode; give a list of them")
    if isinstance(given, Captions):
        captions = [given.caption(number) for number in range(given.total)]
        starts = np.asarray(given.starts)
    else:
        captions = [clean_captions([text], f"caption {number}")[0] for number, text in enumerate(given)]
        starts = np.arange(len(captions) + 1)
    loaded = load_text_encoder(encoder, max_length)
    digest = hashlib.sha256(f"{FORMAT} {loaded.fingerprint} {loaded.max_length}\n".encode())
    digest.update(starts.astype(np.int64).tobytes())
    for caption in captions:
        digest.update(caption.encode() + b"\n")
    fingerprint = digest.hexdigest()
    folder = cache_dir() / "text" / fingerprint[:24]

    def write(aside: Path) -> None:
        _write(aside, captions, starts, loaded, fingerprint)

    build_once(folder, write)
    return TokenData(folder)


def _write(folder: Path, captions: list[str], starts: np.ndarray, encoder: TextEncoder, fingerprint: str) -> None:
    texts = list(dict.fromkeys(["", *captions]))
    row = {text: index for index, text in enumerate(texts)}
    truncated = encoder.count_truncated(texts)
    if truncated:
        print(
            f"{truncated} of {len(texts) - 1} captions are longer than {encoder.max_length} tokens and are cut",
            file=sys.stderr,
        )
    with NpyAppender(folder / "tokens.npy", np.float16, (encoder.max_length, encoder.width)) as tokens:
        for start in track(range(0, len(texts), BATCH), "encoding captions"):
            tokens.append(encoder.encode(texts[start : start + BATCH]).numpy())
    for name, values in (("row_of_caption", [row[caption] for caption in captions]), ("caption_starts", starts)):
        with NpyAppender(folder / f"{name}.npy", np.int64) as file:
            file.append(np.asarray(values))
    manifest = {
        "format": FORMAT,
        "encoder": encoder.name,
        "encoder_sha256": encoder.fingerprint,
        "max_length": encoder.max_length,
        "shape": [len(texts), encoder.max_length, encoder.width],
        "images": len(starts) - 1,
        "captions": len(captions),
        "truncated": truncated,
        "fingerprint": fingerprint,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
