"""The README: short, and its headline, badges and paths are true."""

import importlib.util
import json
import re
from pathlib import Path

from scalelong.experiments.campaign import read_plan
from scalelong.experiments.campaign_results import Results

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_starts_with_the_two_commands():
    assert README.count("\n") < 100
    assert README.index("make demo") < README.index("make test") < README.index("## ")


def test_the_headline_and_the_table_have_the_recorded_ratios():
    rows = json.loads((ROOT / "results" / "frontier-eq3.json").read_text(encoding="utf-8"))["frontier"]
    ratios = {row["skips"]: row["ratio"] for row in rows if row["label"] == "cs-0.5"}
    texts = {n: f"{ratio['mean']:.1f} [{ratio['low']:.1f}, {ratio['high']:.1f}]" for n, ratio in ratios.items()}
    head = " ".join(README.partition("```")[0].split())
    assert f"× {texts[6]} with 6 long skips, × {texts[12]} with 12" in head
    for n, text in texts.items():
        assert f"N = {n}: × {text}" in README
    norms = Results(read_plan(ROOT / "results" / "campaign" / "sizes")).effects("norm_outer")["all", "settings"][
        "cs:0.5"
    ]
    text = f"{norms.mean:.2f} [{norms.low:.2f}, {norms.high:.2f}]"
    assert f"**smaller**: × {text} in U-ViTs on digits" in head
    assert f"× {text}, no trend seen with size" in README


def test_every_measured_result_has_a_command_and_a_commit():
    table = README.partition("| what | result | command | commit |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) >= 6
    for _, result, command, commit in rows:
        assert re.search(r"\d", result)
        assert re.match(r"`(scalelong|make|python) .+`", command)
        assert re.fullmatch(r"[0-9a-f]{7}", commit.strip())


def test_the_badges_say_what_pyproject_says():
    spec = importlib.util.spec_from_file_location("badges", ROOT / "docs" / "badges.py")
    badges = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(badges)
    for name, svg in badges.badges().items():
        assert f"docs/images/{name}" in README
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == svg, "run python docs/badges.py"
        assert re.search('aria-label="(.*?)"', svg)[1].replace(": ", " ") in README
