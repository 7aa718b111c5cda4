"""Untrusted image files to uint8 arrays: bounded, never guessing what a strange file was meant to be."""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from scalelong.data.records import BadExampleError, Options, Pixels, colour

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 64_000_000  # a larger picture is taken for a decompression bomb
MAX_BYTES = 256 << 20
# Only formats that Pillow decodes itself: no EPS (runs Ghostscript), no container with external parts.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpg", ".jpeg", ".jpe", ".png", ".ppm", ".pgm", ".pbm", ".tif", ".tiff", ".webp")
)


def read_image(source: Path | bytes, name: str, options: Options) -> Pixels:
    """Decode one image to (h, w, c); centre-crop and resize it when `options.image_size` is given."""
    if isinstance(source, Path):
        source = _file_bytes(source, name)
    if not source:
        raise BadExampleError(name, "is empty (0 bytes)")
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(source), formats=FORMATS) as image:
            _check(image, name)
            image.load()
            upright = ImageOps.exif_transpose(image)
            pixels = np.asarray(fit(_opaque(upright, name, options), options.image_size))
            return pixels if pixels.ndim == 3 else pixels[:, :, None]
    except BadExampleError:
        raise
    except UnidentifiedImageError:
        raise BadExampleError(name, "is not an image in a format that is read here") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadExampleError(name, f"has more than {MAX_PIXELS:,} pixels") from None
    except Exception as error:  # Pillow's decoders raise anything at all on damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadExampleError(name, f"is a broken image ({reason})") from None


def read_size(path: Path) -> tuple[int, int] | None:
    """Width and height from the header alone; None for what `read_image` will refuse."""
    from PIL import Image

    try:
        with _open_regular(path, path.name) as file, Image.open(file, formats=FORMATS) as image:
            return image.size
    except Exception:
        return None


def fit(image: Image.Image, size: int | None) -> Image.Image:
    """The largest centred square, resized to `size` × `size` (Lanczos, antialiased)."""
    from PIL import Image

    if size is None or image.size == (size, size):
        return image
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.LANCZOS, box=box)


def fit_array(image: Pixels, options: Options) -> Pixels:
    """`fit` for an image that is decoded already, (h, w, c) → (size, size, channels)."""
    from PIL import Image

    channels = options.channels or image.shape[2]
    size = options.image_size or image.shape[0]
    if image.shape == (size, size, channels):
        return image
    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    picture = fit(picture.convert("L" if channels == 1 else "RGB"), options.image_size)
    return np.asarray(picture).reshape(picture.height, picture.width, channels)


@contextmanager
def pillow_warnings() -> Iterator[None]:
    """Pillow's remarks about odd files are silent; its bomb warning is an error. Set once, for all threads."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _file_bytes(path: Path, name: str) -> bytes:
    try:
        with _open_regular(path, name) as file:
            return file.read(MAX_BYTES)
    except OSError as error:
        raise BadExampleError(name, f"cannot be read ({error.strerror})") from None


def _open_regular(path: Path, name: str) -> BinaryIO:
    """Open a regular file. A pipe or a device is refused before it can block."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    file = os.fdopen(handle, "rb")
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise BadExampleError(name, "is not a regular file")
    if status.st_size > MAX_BYTES:
        file.close()
        raise BadExampleError(name, f"is larger than {MAX_BYTES >> 20} MiB")
    return file


def _check(image: Image.Image, name: str) -> None:
    """Refuse what has no one meaning as an 8-bit still picture, before any pixel is decoded."""
    if image.width * image.height > MAX_PIXELS:
        raise BadExampleError(name, f"is {image.width}×{image.height}: more than {MAX_PIXELS:,} pixels")
    # A phone's multi-picture JPEG ("MPO") opens at its main picture.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise BadExampleError(name, f"is animated or has several pages ({getattr(image, 'n_frames', 2)} frames)")
    rawmodes = [str(part) for tile in getattr(image, "tile", ()) for part in _flat(tile[3])]
    if image.mode.startswith(("I", "F")) or any(";16" in mode for mode in rawmodes):
        raise BadExampleError(name, "has more than 8 bits a channel; convert it to 8 bits first")
    if image.mode not in ("1", "L", "P", "RGB", "RGBA", "LA", "PA"):
        raise BadExampleError(name, f"is in {image.mode} colours; convert it to RGB first")


def _flat(argument: object) -> list[object]:
    return list(argument) if isinstance(argument, tuple) else [argument]


def _opaque(image: Image.Image, name: str, options: Options) -> Image.Image:
    """The image without transparency, grey or RGB as asked."""
    from PIL import Image

    mode = "L" if options.channels == 1 else "RGB"
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert(mode)
    image = image.convert("RGBA")
    if image.getchannel("A").getextrema() == (255, 255):
        return image.convert(mode)
    if options.background is None:
        raise BadExampleError(name, "has transparent pixels; give the colour to lay it on, as in --background white")
    under = Image.new("RGBA", image.size, (*colour(options.background), 255))
    return Image.alpha_composite(under, image).convert(mode)
