"""Image files to uint8 arrays. Files are untrusted: sizes are bounded and ambiguous content is an error."""

from __future__ import annotations

import io
import json
import math
import stat
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scalelong.data.records import BadExampleError, Options, Pixels
from scalelong.errors import one_line
from scalelong.files import atomic_file

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 64_000_000  # anything larger is treated as a decompression bomb
MAX_BYTES = 256 << 20
GREY = ("1", "L", "LA", "I;16")  # Pillow's modes without colour
# Only formats that Pillow decodes itself: no EPS (runs Ghostscript), no containers with external parts.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
GRID_WIDTH = 1024  # pixels; grids of tiny images are enlarged towards it
MIN_TILE = 64  # pixels of an image in a grid, if MAX_GRID leaves room
MAX_GRID = 4096  # pixels of a grid on a side
MAX_GRID_BYTES = 8 << 20
GRID_KEY = "scalelong"  # of the text chunk of a grid
SUFFIXES = {".bmp", ".gif", ".jpg", ".jpeg", ".jpe", ".png", ".ppm", ".pgm", ".pbm", ".tif", ".tiff", ".webp"}


def read_image(source: Path | bytes | Pixels | None, name: str, options: Options) -> Pixels:
    """Return an image, decoded if it is a file, as (h, w, c), cropped and resized to `options.image_size` if set."""
    if source is None:
        raise BadExampleError(name, "has no image")
    from PIL import Image, ImageOps, UnidentifiedImageError

    if isinstance(source, np.ndarray):
        channels, size = options.channels or source.shape[2], options.image_size or source.shape[0]
        if source.shape == (size, size, channels):
            return source
        decoded = Image.fromarray(source[:, :, 0] if source.shape[2] == 1 else source)
        fitted = fit(decoded.convert("L" if channels == 1 else "RGB"), options.image_size)
        return np.asarray(fitted).reshape(fitted.height, fitted.width, channels)
    if isinstance(source, Path):
        source = _file_bytes(source, name)
    if not source:
        raise BadExampleError(name, "is empty (0 bytes)")
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
        raise BadExampleError(name, f"is not an image in a supported format ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadExampleError(name, f"has more than {MAX_PIXELS:,} pixels") from None
    except Exception as error:  # Pillow's decoders raise all kinds of errors on damaged files
        raise BadExampleError(name, f"is a broken image ({one_line(error) or type(error).__name__})") from None


@dataclass(frozen=True)
class Header:
    """What an image file says about itself before a pixel is decoded."""

    width: int
    height: int
    grey: bool
    transparent: bool  # has an alpha channel or a transparent colour


def read_header(source: Path | bytes) -> Header | None:
    """Return the header of an image file, or None if it is not one."""
    from PIL import Image

    with suppress(Exception):
        file = io.BytesIO(source) if isinstance(source, bytes) else source if source.is_file() else ""
        with Image.open(file, formats=FORMATS) as image:
            transparent = "A" in image.getbands() or "transparency" in image.info
            return Header(image.width, image.height, image.mode in GREY, transparent)
    return None


def common_size(paths: Iterable[Path]) -> tuple[int, int] | None:
    """Return the most common width and height according to the headers of those files that are images."""
    sizes = Counter((header.width, header.height) for path in paths if (header := read_header(path)) is not None)
    return sizes.most_common(1)[0][0] if sizes else None


def fit(image: Image.Image, size: int | None) -> Image.Image:
    """Crop the largest centred square and resize it to `size` × `size` (Lanczos, antialiased)."""
    from PIL import Image

    if size is None or image.size == (size, size):
        return image
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.LANCZOS, box=box)


def save_grid(
    images: npt.NDArray[np.uint8],
    path: Path | str,
    columns: int | None = None,
    captions: Sequence[str] | None = None,
) -> float:
    """Write images (n, h, w, c) as one PNG grid and return the number of its pixels per pixel of an image.

    Small images are enlarged by an integer factor, without blur. A grid that would exceed MAX_GRID pixels on a side or
    MAX_GRID_BYTES is scaled down. `captions`, one per image, the columns and the size of an image are stored in the
    file's text chunk GRID_KEY as JSON.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    count, height, width, channels = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    grid = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), 128, np.uint8)
    for index in range(count):
        top, left = (index // columns) * (height + 1) + 1, (index % columns) * (width + 1) + 1
        grid[top : top + height, left : left + width] = images[index]
    natural = Image.fromarray(grid[:, :, 0] if channels == 1 else grid)
    side = max(natural.size)
    enlarged = max(1, GRID_WIDTH // side, min(-(-MIN_TILE // max(height, width)), MAX_GRID // side))
    scale = enlarged if side <= MAX_GRID else MAX_GRID / side
    text = PngInfo()
    facts = {"image": [height, width], "columns": columns, "captions": list(captions or ())[:count]}
    text.add_text(GRID_KEY, json.dumps(facts))
    while True:
        size = (max(1, int(natural.width * scale)), max(1, int(natural.height * scale)))
        picture = natural.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS)
        memory = io.BytesIO()
        picture.save(memory, format="PNG", pnginfo=text)
        if memory.tell() <= MAX_GRID_BYTES:
            break
        shrunk = scale * math.sqrt(MAX_GRID_BYTES / memory.tell()) * 0.95
        scale = max(1, int(shrunk)) if scale > 1 else shrunk
    with atomic_file(path) as temporary:
        temporary.write_bytes(memory.getvalue())
    return scale


@contextmanager
def pillow_warnings() -> Iterator[None]:
    """Silence Pillow's warnings about odd files and make its bomb warning an error. Enter once, for all threads."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _file_bytes(path: Path, name: str) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would block
            raise BadExampleError(name, "is not a regular file")
        if status.st_size > MAX_BYTES:
            raise BadExampleError(name, f"is larger than {MAX_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise BadExampleError(name, f"cannot be read ({error.strerror})") from None


def _check(image: Image.Image, name: str) -> None:
    """Reject anything that has no one meaning as an 8-bit still image, before any pixel is decoded."""
    if image.width * image.height > MAX_PIXELS:
        raise BadExampleError(name, f"is {image.width}×{image.height}: more than {MAX_PIXELS:,} pixels")
    # A phone's multi-picture JPEG ("MPO") opens at its main image.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise BadExampleError(name, f"is animated or has several pages ({getattr(image, 'n_frames', 2)} frames)")
    # 16 bits per channel are reduced to 8 only where the format defines white as 65535, which is PNG.
    deep = image.mode.startswith("I;16") or any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))
    if image.format != "PNG" if deep else image.mode.startswith(("I", "F")):
        raise BadExampleError(name, f"has more than 8 bits per channel ({image.format}); convert it to 8 bits first")
    if image.mode not in ("1", "L", "P", "RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr") and not deep:
        raise BadExampleError(name, f"has colour mode {image.mode}; convert it to RGB first")


def _opaque(image: Image.Image, name: str, options: Options) -> Image.Image:
    """Return the image without transparency, grey or RGB as `options.channels` says."""
    from PIL import Image

    mode = "L" if options.channels == 1 else "RGB"
    if image.mode.startswith("I;16"):  # Pillow would clip instead of scaling; it scales 16-bit RGB itself
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert(mode)
    image = image.convert("RGBA")
    if image.getchannel("A").getextrema() == (255, 255):
        return image.convert(mode)
    if options.background is None:
        raise BadExampleError(name, "has transparent pixels; set background (--background white)")
    under = Image.new("RGB", image.size, options.background).convert("RGBA")  # opaque, whatever colour it is
    return Image.alpha_composite(under, image).convert(mode)
