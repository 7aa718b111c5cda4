"""Reading one image file: accepted files give Pillow's pixels, others an error with the file's name."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import picture
from PIL import Image

from scalelong.data.images import MAX_PIXELS, fit, pillow_warnings, read_image
from scalelong.data.records import BadExampleError, Options
from scalelong.errors import InvalidValueError

PLAIN = Options()


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """A PNG whose header states a size that its few bytes of data do not have."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_a_lossless_file_gives_its_pixels(kind: str):
    image = picture(0)
    pixels = read_image(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})), "a", PLAIN)
    assert np.array_equal(pixels, np.asarray(image))


def test_a_jpeg_gives_what_pillow_decodes():
    data = encoded(picture(0, (16, 16)), "JPEG", quality=80)
    assert np.array_equal(read_image(data, "a", PLAIN), np.asarray(Image.open(io.BytesIO(data))))


def test_grey_becomes_three_equal_channels_or_one():
    image = picture(0, mode="L")
    assert np.array_equal(read_image(encoded(image), "a", PLAIN), np.asarray(image)[..., None].repeat(3, 2))
    assert np.array_equal(read_image(encoded(image), "a", Options(channels=1)), np.asarray(image)[..., None])


def test_exif_rotation_is_applied():
    image = picture(0)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90° clockwise to see it upright
    data = encoded(image, "PNG", exif=exif)
    assert np.array_equal(read_image(data, "a", PLAIN), np.rot90(np.asarray(image), -1))


def test_opaque_alpha_is_dropped_and_transparency_needs_a_background():
    solid = picture(0).convert("RGBA")
    assert np.array_equal(read_image(encoded(solid), "a", PLAIN), np.asarray(picture(0)))
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    with pytest.raises(BadExampleError, match=r"^a\.png .*--background white"):
        read_image(encoded(clear), "a.png", PLAIN)
    assert (read_image(encoded(clear), "a", Options(background="white")) == 255).all()
    assert (read_image(encoded(clear), "a", Options(background="#000")) == 0).all()


def test_a_transparent_palette_is_transparency():
    image = picture(0).convert("P")
    with pytest.raises(BadExampleError, match="transparent"):
        read_image(encoded(image, "GIF", transparency=image.getpixel((0, 0))), "a.gif", PLAIN)


BAD = {
    "empty.png": (b"", "0 bytes"),
    "text.png": (b"not an image at all", "PNG"),
    "cut.png": (encoded(picture(0, (32, 32)))[:200], "broken"),
    "cut.jpg": (encoded(picture(0, (32, 32)), "JPEG")[:300], "broken"),
    "huge.png": (png_claiming(100_000, 100_000), f"{MAX_PIXELS:,} pixels"),
    "large.png": (png_claiming(9_000, 9_000), f"9000×9000.*{MAX_PIXELS:,} pixels"),
    "short.png": (png_claiming(64, 64), "broken"),
    "moving.gif": (encoded(picture(0), "GIF", save_all=True, append_images=[picture(1)]), "2 frames"),
    "moving.png": (encoded(picture(0), "PNG", save_all=True, append_images=[picture(1)]), "2 frames"),
    "moving.webp": (encoded(picture(0), "WEBP", save_all=True, append_images=[picture(1)]), "2 frames"),
    "pages.tif": (encoded(picture(0), "TIFF", save_all=True, append_images=[picture(1)]), "2 frames"),
    "deep.tif": (encoded(Image.fromarray(np.zeros((8, 8), np.uint16)), "TIFF"), "8 bits"),
    "lab.tif": (encoded(picture(0).convert("LAB"), "TIFF"), "LAB.*RGB"),
    "float.tif": (encoded(Image.fromarray(np.zeros((8, 8), np.float32)), "TIFF"), "8 bits"),
    "vector.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "PNG"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_a_one_line_error_with_its_name(name: str):
    data, reason = BAD[name]
    with pillow_warnings(), pytest.raises(BadExampleError, match=reason) as caught:
        read_image(data, name, PLAIN)
    message = str(caught.value)
    assert message.startswith(name)
    assert "\n" not in message


def test_a_cmyk_jpeg_is_converted_to_rgb():
    data = encoded(picture(0, (16, 16), "CMYK"), "JPEG")
    assert np.array_equal(read_image(data, "a", PLAIN), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_16_bit_grey_keeps_its_high_byte_instead_of_being_clipped():
    levels = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    pixels = read_image(encoded(Image.fromarray(levels)), "a", Options(channels=1))
    assert np.array_equal(pixels[..., 0], levels >> 8)


def test_16_bit_rgb_keeps_its_high_byte():
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    body = zlib.compress(b"\0" + bytes([0, 255, 16, 0, 255, 255, 1, 2, 3, 4, 5, 6]))

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    assert read_image(data, "deep.png", PLAIN).tolist() == [[[0, 16, 255], [1, 3, 5]]]


def test_a_pipe_or_folder_named_like_an_image_is_rejected_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for name in ("pipe.png", "folder.png", "absent.png"):
        with pytest.raises(BadExampleError, match=rf"^{name} "):
            read_image(tmp_path / name, name, PLAIN)


def test_control_characters_in_names_are_escaped():
    with pytest.raises(BadExampleError) as caught:
        read_image(b"", "a\x1b[31m\n.png", PLAIN)
    assert str(caught.value).isprintable()


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=300))
def test_random_bytes_are_never_more_than_a_bad_file(data: bytes):
    with pillow_warnings(), pytest.raises(BadExampleError):
        read_image(data, "fuzz", PLAIN)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"]),
    position=st.floats(0, 1),
    change=st.integers(1, 255),
    cut=st.booleans(),
)
def test_a_damaged_file_is_an_image_or_a_bad_file(kind: str, position: float, change: int, cut: bool):
    data = bytearray(encoded(picture(0, (12, 12)), kind))
    place = min(int(position * len(data)), len(data) - 1)
    data[place] ^= change
    data = data[: max(place, 1)] if cut else data
    with pillow_warnings():
        try:
            pixels = read_image(bytes(data), "fuzz", PLAIN)
        except BadExampleError:
            return
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3


@pytest.mark.parametrize("size", [(20, 10), (10, 20), (11, 10), (10, 10)])
def test_fit_crops_the_centre_square(size: tuple[int, int]):
    side = min(size)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    image = picture(3, size)
    fitted = fit(image, side)
    if (size[0] - side) % 2 == 0:
        assert np.array_equal(np.asarray(fitted), np.asarray(image)[top : top + side, left : left + side])
    assert fitted.size == (side, side)
    assert fit(image, None) is image


def test_resizing_is_pillows_lanczos():
    image = picture(4, (16, 16))
    expected = np.asarray(image.resize((6, 6), Image.Resampling.LANCZOS))
    assert np.array_equal(read_image(np.asarray(image), "a", Options(image_size=6)), expected)
    assert np.array_equal(read_image(encoded(image), "a", Options(image_size=6)), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 0}, "image_size.*got 0"),
        ({"image_size": 1.5}, "image_size.*got 1.5"),
        ({"channels": 4}, "channels.*got 4"),
        ({"holdout": 1.0}, "holdout.*got 1.0"),
        ({"background": "whitish"}, "background.*got 'whitish'"),
    ],
)
def test_invalid_options_are_errors_with_the_value(options: dict[str, object], message: str):
    with pytest.raises(InvalidValueError, match=message):
        Options(**options)
