"""Emoji, a small text-to-image dataset: drawings of five sets, names as captions, categories as classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scalelong.data.images import read_image
from scalelong.data.records import BadExampleError, Example, Options, Reading, SourceUnavailableError
from scalelong.data.registries import npm_package
from scalelong.data.sources import find
from scalelong.data.splits import Part
from scalelong.errors import ScaleLongError, require

# set, version, SHA-256 of the npm package @iconify-json/SET
PACKAGES = (
    ("noto", "1.2.9", "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad"),
    ("noto-v1", "1.2.5", "2bf62c26c2c2884aa99e90aec942cdaee17a5921f05690694f4978ad4b017c37"),
    ("fluent-emoji", "1.2.7", "8044210dbf11e016d4de85f15d01a243423bd832457e7e2491df1b751c0e272b"),
    ("fluent-emoji-flat", "1.2.6", "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175"),
    ("fxemoji", "1.2.2", "f3e72b3c59d05e1db03b7e308d55c0d05bd7ba3f625a90da1b79313c12858eef"),
)
CATEGORIES = (
    "Activities", "Animals & Nature", "Flags", "Food & Drink", "Objects",
    "People & Body", "Smileys & Emotion", "Symbols", "Travel & Places",
)  # fmt: skip
RUN_TOGETHER = "fxemoji"  # writes "alarmclock": only names that another set spells out are taken from it
HELD_OUT = 0.05  # of the names; all drawings of one name are on the same side
MAX_DRAWING = 4 << 20  # bytes


@dataclass(frozen=True)
class Drawing:
    """One emoji of one set."""

    title: str
    caption: str
    label: int
    svg: str


def fetch_emoji() -> list[Path]:
    """The five packages' folders."""
    return [npm_package(f"@iconify-json/{name}", version, digest) for name, version, digest in PACKAGES]


def read_emoji(folders: list[Path], split: str, options: Options, source: str) -> Reading:
    """One split of every set found in `folders`, drawn at the size that is asked for."""
    require("resvg_py", "emoji", "drawing the emoji")
    paths = [path for folder in folders for path in find(folder, "icons.json")]
    if not paths:
        raise SourceUnavailableError(f"{folders[0]} holds no icons.json")
    part = Part("train", split == "validation")
    drawings = [drawing for drawing in _drawings(paths) if part.takes(drawing.caption, HELD_OUT)]
    jobs = (partial(_draw, drawing, options) for drawing in drawings)
    return Reading(jobs, source, len(drawings), CATEGORIES, captioned=True, decodes=True)


def _drawings(paths: list[Path]) -> Iterator[Drawing]:
    """Every drawing with a known category, in the order of the sets and names."""
    sets = {str(icons.get("prefix")): (icons, path) for path in paths for icons in [_json(path)]}
    order = [name for name, _, _ in PACKAGES if name in sets]
    category: dict[str, int] = {}
    for name in order:
        if name == RUN_TOGETHER:
            continue
        for title, members in _json(sets[name][1].with_name("metadata.json"), {}).get("categories", {}).items():
            if title in CATEGORIES:
                for member in members:
                    category.setdefault(member, CATEGORIES.index(title))
    spelling = {member.replace("-", ""): member for member in category}
    for name in order:
        icons, _ = sets[name]
        for title, icon in sorted(icons["icons"].items()):
            known = spelling.get(title) if name == RUN_TOGETHER else title
            if known not in category or icon.get("hidden") or _all_white(icon["body"]):
                continue  # no category; an old name kept for compatibility; white symbols made to be laid on others
            label = category[known]
            yield Drawing(f"{name}:{title}", _caption(known, name, label), label, _svg(icons, icon))


def _caption(name: str, drawn_by: str, label: int) -> str:
    """The name in words. The Fluent sets say `-dark` where the others say `-dark-skin-tone`."""
    if drawn_by.startswith("fluent") and CATEGORIES[label] == "People & Body":
        name = re.sub(r"-(light|medium-light|medium|medium-dark|dark)$", r"-\1-skin-tone", name)
    return name.replace("-", " ")


def _all_white(body: str) -> bool:
    return set(re.findall(r"#[0-9a-fA-F]{3,8}|url|currentColor", body)) == {"#fff"}


def _svg(icons: dict[str, Any], icon: dict[str, Any]) -> str:
    """A complete drawing on a square canvas around the icon's box."""

    def measure(key: str, default: float) -> float:
        return float(icon.get(key, icons.get(key, default)))

    width, height = measure("width", 16), measure("height", 16)
    side = max(width, height)
    left, top = measure("left", 0) - (side - width) / 2, measure("top", 0) - (side - height) / 2
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{side:g}" height="{side:g}" viewBox="{left:g} {top:g} {side:g} {side:g}">{icon["body"]}</svg>'
    )


def _draw(drawing: Drawing, options: Options) -> Example:
    import resvg_py

    if len(drawing.svg) > MAX_DRAWING or "<image" in drawing.svg:
        raise BadExampleError(drawing.title, "is a drawing that is too large or refers to other files")
    size = options.image_size
    try:
        png = resvg_py.svg_to_bytes(
            svg_string=drawing.svg,
            width=size,
            height=size,
            background=options.background or "white",
            skip_system_fonts=True,  # no drawing has text; loading fonts would take longer than drawing
        )
    except ValueError as error:
        raise BadExampleError(drawing.title, f"cannot be drawn ({error})") from None
    return Example(drawing.title, read_image(bytes(png), drawing.title, options), drawing.label, (drawing.caption,))


def _json(path: Path, default: Any = None) -> Any:
    if default is not None and not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ScaleLongError(f"{path} cannot be read ({error})") from None
