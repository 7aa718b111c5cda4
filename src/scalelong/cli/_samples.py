"""Where `scalelong sample` writes: one grid, or a folder of images that never mixes the samples of two settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import InvalidValueError, invalid
from scalelong.files import atomic_file, check_target, read_json, write_text

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SETTINGS = "samples.json"  # in a folder of samples: what they were made with
IMAGE = re.compile(r"\d{6,}\.png")


@dataclass(frozen=True)
class Target:
    """A .png file for one grid, or a folder for one file per image."""

    path: Path
    folder: bool

    @staticmethod
    def parse(text: str) -> Target:
        """Check the form of --out. `x/`, an existing folder, `x` and `cs-0.7` are folders; `x.jpg` is an error."""
        path = Path(text).expanduser()
        is_file = not text.endswith(("/", "\\")) and not path.is_dir() and path.suffix[1:].isalpha()
        if is_file and path.suffix.lower() != ".png":
            raise invalid("--out", "a .png file for one grid, or a folder (end its name with /)", text)
        check_target(path, folder=not is_file)
        return Target(path, folder=not is_file)

    def check_empty(self, first: int, n: int, settings: dict[str, Any], overwrite: bool) -> list[Path]:
        """Return old samples to remove. Raise if the folder has images and these would not simply add to them.

        More images of the same settings may be added: `--first 1000` after the first 1000.
        """
        images = sorted(p for p in self.path.glob("*.png") if p.is_file()) if self.path.is_dir() else []
        own = [path for path in images if IMAGE.fullmatch(path.name)]
        if len(own) < len(images):
            other = next(path for path in images if path not in own)
            raise InvalidValueError(f"{self.path} has images that are not samples ({other.name}); use another --out")
        new = {f"{k:06d}.png" for k in range(first, first + n)}
        same = read_json(self.path / SETTINGS) == settings
        if not own or overwrite or (same and not any(path.name in new for path in own)):
            return own if overwrite else []
        why = "some of these" if same else "made with other settings"
        raise InvalidValueError(
            f"{self.path} already has {len(own)} samples, {why}; pass --overwrite to replace them, or use another --out"
        )

    def write(self, images: Iterable[npt.NDArray[np.uint8]], first: int, settings: dict[str, Any]) -> None:
        """Write images (h, w, c) as 000000.png, 000001.png, …, and what they were made with."""
        from PIL import Image

        write_text(self.path / SETTINGS, json.dumps(settings, indent=1) + "\n")
        for k, image in enumerate(images, start=first):
            picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
            with atomic_file(self.path / f"{k:06d}.png") as temporary:
                picture.save(temporary, format="PNG")
