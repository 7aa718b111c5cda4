"""HTML from text that stays text: every string is escaped, only `Markup` made here is not."""

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
    opening = tag
    for key, value in attributes.items():
        if value is not None and value is not False:
            opening += " " + key.rstrip("_").replace("_", "-") + ("" if value is True else f'="{escape(value)}"')
    return Markup(f"<{opening}>" if tag in VOID else f"<{opening}>{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    """Concatenate children."""
    text = ""
    for child in children:
        if isinstance(child, (str, int, float)):
            text += child if isinstance(child, Markup) else escape(child)
        elif child is not None:
            text += join(child)
    return Markup(text)


def escape(value: Any) -> str:
    """Escape text, and replace characters that cannot be shown or that reverse its direction."""
    return html.escape(UNPRINTABLE.sub("\ufffd", str(value)), quote=True)


def raw_script(kind: str, body: str, **attributes: Any) -> Markup:
    """A script or style element with a body of our own."""
    if re.search(r"</(script|style)|<!--", body, re.IGNORECASE):
        raise AssertionError(f"the text of this {kind} would end its element")
    return element(kind, Markup(body), **attributes)


def json_script(identity: str, value: Any) -> Markup:
    """Data for the page's script. No character in it can end the element or open another."""
    body = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        body = body.replace(character, f"\\u{ord(character):04x}")
    return raw_script("script", body, type="application/json", id=identity)
