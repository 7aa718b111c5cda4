"""HTML from text that stays text: every string is escaped, only `Markup` made here is not."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from typing import Any

# Control characters, lone surrogates, and the characters that reverse the direction of text.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
VOID = frozenset({"br", "col", "hr", "img", "input", "meta"})


class Markup(str):
    """HTML that is already escaped."""

    __slots__ = ()


Child = str | int | float | None | Iterable[Any]


def element(tag: str, *children: Child, **attributes: Any) -> Markup:
    """`element("p", "a < b", class_="note")` → `<p class="note">a &lt; b</p>`.

    Strings are escaped, `Markup` is not, None is skipped, other iterables are flattened. An attribute that is None or
    False is left out, True has no value; `class_` becomes `class`, `aria_label` becomes `aria-label`.
    """
    words = [tag]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        name = key.rstrip("_").replace("_", "-")
        words.append(name if value is True else f'{name}="{escape(str(value))}"')
    opening = f"<{' '.join(words)}>"
    return Markup(opening if tag in VOID else f"{opening}{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    """Concatenate children."""
    parts = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(str(child))
        elif isinstance(child, (str, int, float)):
            parts.append(str(escape(str(child))))
        elif child is not None:
            parts.append(str(join(child)))
    return Markup("".join(parts))


def escape(text: str) -> Markup:
    """Escape text, and replace characters that cannot be shown or that reverse its direction."""
    return Markup(html.escape(UNPRINTABLE.sub("\ufffd", text), quote=True))


def raw_script(kind: str, body: str, **attributes: Any) -> Markup:
    """A script or style element with a body of our own."""
    if re.search(r"</(script|style)|<!--", body, re.IGNORECASE):
        raise AssertionError(f"the text of this {kind} would end its element")
    opening = str(element(kind, **attributes)).removesuffix(f"</{kind}>")
    return Markup(f"{opening}{body}</{kind}>")


def json_script(identity: str, value: Any) -> Markup:
    """Data for the page's script. No character in it can end the element or open another."""
    body = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        body = body.replace(character, f"\\u{ord(character):04x}")
    return raw_script("script", body, type="application/json", id=identity)
