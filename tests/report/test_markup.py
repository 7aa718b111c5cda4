"""Text stays text, whatever it contains."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong.report.markup import Markup, element, join, json_script, raw_script

HOSTILE = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</script><script>alert(1)</script>", "&lt;b&gt;",
    "' onmouseover='alert(1)", "<!-- ", "]]>", "\u2028\u2029", "\x00\x1b[31m", "{{7*7}}", "javascript:alert(1)",
]  # fmt: skip


class Reader(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.tags, self.text, self.attributes = [], "", []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes.append(dict(attributes))

    def handle_data(self, data):
        self.text += data


def read(markup):
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader


PRINTABLE = st.text(st.characters(categories=("L", "N", "P", "S", "Zs")))


@given(PRINTABLE)
def test_text_survives_a_round_trip(value):
    found = read(element("p", value, title=value))
    assert found.tags == ["p"]
    assert found.text == value
    assert found.attributes[0]["title"] == value


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_text_opens_no_element(hostile):
    found = read(element("td", hostile, data_name=hostile))
    assert found.tags == ["td"]
    assert set(found.attributes[0]) == {"data-name"}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_data_stays_data(hostile):
    found = json_script("data", {"name": hostile})
    assert str(found).count("<") == 2  # of the element itself
    body = str(found).removeprefix('<script type="application/json" id="data">').removesuffix("</script>")
    assert json.loads(body) == {"name": hostile}


def test_unprintable_characters_are_replaced():
    assert element("p", "a\x00b\x1b[31m\u202ec\ud800") == "<p>a\ufffdb\ufffd[31m\ufffdc\ufffd</p>"
    assert element("p", "1\u00a0%\n👩‍🎨") == "<p>1\u00a0%\n👩‍🎨</p>"


def test_only_markup_is_not_escaped():
    assert join([Markup("<b>"), "<b>", None, 3, ["<i>"]]) == "<b>&lt;b&gt;3&lt;i&gt;"
    assert element("input", hidden=True, disabled=False, value=None) == "<input hidden>"
    assert element("label", class_="a", aria_label="b") == '<label class="a" aria-label="b"></label>'


def test_a_script_that_would_end_its_element_fails():
    with pytest.raises(AssertionError):
        raw_script("script", "'</script>'")
