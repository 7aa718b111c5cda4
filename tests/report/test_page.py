"""The text of the page: well formed, self-contained, escaped, small, and complete for any content of the folders."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
from made_runs import make_run, noisy_picture

from scalelong.errors import RunError, ScaleLongError
from scalelong.report import write_report
from scalelong.report.findings import findings
from scalelong.report.page import compare_views
from scalelong.report.read import labels, read_runs

VOID = {"meta", "img", "input", "br", "hr", "col"}
HOSTILE = '<img src=x onerror="document.title=1">'


class Page(HTMLParser):
    """Parses a page and checks that elements are closed in order and ids are unique."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.scripts, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append((tag, values))
        if "id" in values:
            self.ids.append(values["id"])
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append([values, ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1][1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data

    @property
    def data(self):
        return json.loads(next(body for attributes, body in self.scripts if attributes.get("id") == "data"))

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(paths, tmp_path):
    return Page(write_report(paths, tmp_path / "page.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """Three variants with three seeds each."""
    root = tmp_path_factory.mktemp("runs")
    chosen = {"none": (1.0, 1.0), "cs": (0.9, 0.3), "ls": (0.99, 0.6)}
    return [
        make_run(root / f"{name}-{seed}", name, seed, level=level * (1 + seed / 500), calm=calm)
        for name, (level, calm) in chosen.items()
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def page(variants, tmp_path_factory):
    return page_of(variants, tmp_path_factory.mktemp("page"))


def test_the_page_has_every_section_and_chart(page):
    assert {
        "results", "curves", "oscillations", "skips", "samples", "robustness", "evaluation", "configs", "data", "log",
        "smooth", "all",
    } <= set(page.ids)  # fmt: skip
    drawn = {attributes["data-chart"] for attributes in page.all("div") if "data-chart" in attributes}
    assert drawn == set(page.data["charts"]) == {
        "forest", "loss", "validation", "validation_ema", "relative", "gradient", "norms", "norm_by_skip",
        "growth", "absolute_oscillation", "oscillation",
        "oscillation_train", "oscillation_gradient", "kappa", "ratio", "ratios", "robust_change", "robust_loss",
        "robust_distance", "lipschitz",
    }  # fmt: skip


def test_the_headline_states_the_result(page):
    text = page.text.replace("\u00a0", " ")
    assert "CS (κ = 0.7) ends 10 % below no scaling in validation loss" in text
    assert "digits · 9 runs with 3 seeds · 400 steps" in text
    assert text.count("paired by seed") == 1


def test_the_page_loads_nothing(page):
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "srcset", "data", "poster"):
            if name in attributes:
                assert re.match("data:image/(png|webp);base64,", attributes[name]), (tag, name)
    assert not [attributes for tag, attributes in page.tags if tag in ("link", "iframe", "object", "embed", "base")]
    policy = next(attributes["content"] for attributes in page.all("meta") if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'; img-src data:;")
    script = next(body for attributes, body in page.scripts if not attributes)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "fetch(" not in script
    assert "innerHTML" not in script
    assert re.findall(r"https?://[^\s\"']+", script) == ["http://www.w3.org/2000/svg"]  # a namespace, not an address


def test_no_attribute_runs_a_script(page):
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]


def test_every_part_of_a_run_can_be_hidden(page):
    runs = {str(run) for run in range(9)}
    members = [attributes["data-member"].split() for _, attributes in page.tags if "data-member" in attributes]
    assert runs == {run for own in members for run in own}
    toggles = [attributes["data-toggle"].split() for attributes in page.all("button") if "data-toggle" in attributes]
    assert ["0", "1", "2"] in toggles
    assert ["4"] in toggles


def test_controls_have_names_for_assistive_technology(page):
    for attributes in page.all("button"):
        assert attributes["type"] == "button"
    assert all("alt" in attributes for attributes in page.all("img"))
    assert all(attributes["aria-label"] for attributes in page.all("div") if "data-chart" in attributes)
    assert page.all("html")[0]["lang"] == "en"


def test_the_seeds_of_a_variant_look_alike_and_no_two_variants_do(page):
    looks = [(run["label"], run["color"], run["dash"]) for run in page.data["runs"]]
    assert len(set(looks)) == 3
    assert len({colour for _, colour, _ in looks}) == 3
    assert len({dash for _, _, dash in looks}) == 3


def test_kappa_is_drawn_with_the_range_of_cs(page):
    chart = page.data["charts"]["kappa"]
    assert chart["band"]["low"] == pytest.approx([0.5**k for k in range(6)], rel=1e-4)
    assert chart["band"]["high"] == pytest.approx([0.95**k for k in range(6)], rel=1e-4)
    cs = next(s for s in chart["series"] if page.data["runs"][s["run"]]["label"] == "cs-0.7")
    assert cs["y"] == pytest.approx([0.7**k for k in range(6)], rel=1e-4)
    ls = next(s for s in chart["series"] if page.data["runs"][s["run"]]["label"] == "ls")
    assert ls["whiskers"]


def test_oscillation_is_the_spread_of_the_jumps(page, variants):
    import numpy as np

    snapshots = [json.loads(line) for line in (variants[4] / "stability.jsonl").read_text().splitlines()[1:]]
    jumps = [look["jump"]["probe"]["backbone"] for look in snapshots if look["step"] >= 200]
    drawn = next(s for s in page.data["charts"]["oscillation"]["series"] if s["run"] == 4)
    assert drawn["y"] == pytest.approx(np.std(jumps, axis=0), rel=1e-4)


def test_the_validation_loss_is_compared_with_the_same_seed(page, variants):
    """cs has 0.9 times none's curve in every seed, so −10 % at every step."""
    chart = page.data["charts"]["relative"]
    assert {page.data["runs"][s["run"]]["label"] for s in chart["series"]} == {"cs-0.7", "ls"}
    cs = next(s for s in chart["series"] if page.data["runs"][s["run"]]["label"] == "cs-0.7")
    assert cs["x"] == list(range(50, 401, 50))
    assert cs["y"] == pytest.approx([-10] * 8, rel=1e-3)


def test_settings_that_differ_are_listed(tmp_path):
    one = make_run(tmp_path / "one", settings=["train.lr=0.001"])
    two = make_run(tmp_path / "two", settings=["train.lr=0.003"])
    shown = page_of([one, two], tmp_path)
    assert "train.lr" in shown.text
    assert [run["label"] for run in shown.data["runs"]] == ["none · lr 0.001", "none · lr 0.003"]


def test_runs_share_a_label_only_if_they_differ_in_their_seed_alone(tmp_path):
    near, far = ["train.batch_size=16", "train.lr=0.001"], ["train.batch_size=32", "train.lr=0.002"]
    settings = [[*near, "train.warmup=10"], [*near, "train.warmup=90"], far, far]
    runs = [make_run(tmp_path / str(k), seed=k % 2, settings=own) for k, own in enumerate(settings)]
    found = [run["label"] for run in page_of(runs, tmp_path).data["runs"]]
    assert found[0] != found[1]
    assert found[2] == found[3]


def test_the_unscaled_network_is_the_baseline_also_where_other_settings_differ(tmp_path):
    views = read_runs([make_run(tmp_path / "cs", "cs", steps=200), make_run(tmp_path / "none", steps=100)])
    assert labels(views) == ["none · steps 100", "cs-0.7 · steps 200"]


@pytest.mark.parametrize("where", ["name", "metrics", "record", "card", "alarm"])
def test_hostile_text_stays_text(tmp_path, where):
    name = HOSTILE.replace("/", "") if where == "name" else "run"
    folder = make_run(tmp_path / name)
    if where == "metrics":
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 401, HOSTILE: 1.0, "loss": HOSTILE}) + "\n")
    if where == "record":
        record = json.loads((folder / "config.json").read_text())
        record["config"]["preset"] = record["device"] = record["config"]["data"]["name"] = HOSTILE
        record["config"]["scaling"] = {"kind": HOSTILE, HOSTILE: HOSTILE}
        (folder / "config.json").write_text(json.dumps(record))
    if where == "card":
        card = json.loads((folder / "distance.json").read_text())
        card["card"]["metric"] = card["card"]["notes"][0] = card["card"]["reference"]["name"] = HOSTILE
        (folder / "distance.json").write_text(json.dumps(card))
    if where == "alarm":
        with open(folder / "stability.jsonl", "a") as file:
            file.write(json.dumps({"step": 410, "alarms": [{"text": HOSTILE}]}) + "\n")
    shown = page_of([folder], tmp_path)
    assert not [img for img in shown.all("img") if img.get("src") == "x"]
    assert not [attributes for _, attributes in shown.tags if "onerror" in attributes]
    if where != "metrics":
        assert HOSTILE in shown.text


@pytest.mark.parametrize(
    "broken",
    [
        "config.json",
        "metrics.jsonl",
        "stability.jsonl",
        "distance.json",
        "resources.json",
        "robustness.json",
        "samples",
    ],
)
@pytest.mark.parametrize("content", [None, b"", b"{", b"[1, 2]", b'{"format": 99}', b"\xff\xfe\x00"])
def test_a_page_is_complete_without_any_of_its_files(tmp_path, broken, content):
    folder = make_run(tmp_path / "run", samples=1)
    path = folder / broken
    if path.is_dir():
        path = path / "step-00000400.png"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    if broken == "config.json" and content is None:
        path.with_name("metrics.jsonl").touch()
    shown = page_of([folder, make_run(tmp_path / "other", "cs")], tmp_path)
    assert shown.text.strip()


def test_an_unfinished_run_is_shown_but_not_compared(tmp_path):
    whole, begun = make_run(tmp_path / "whole"), make_run(tmp_path / "begun", "cs", logged=100, samples=0)
    shown = page_of([whole, begun], tmp_path)
    assert "begun is not finished: step 100 of 400" in shown.text
    assert "ends" not in shown.text.splitlines()[0]


def test_runs_on_different_data_are_not_compared(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", "cs")
    record = json.loads((two / "config.json").read_text())
    record["config"]["data"]["name"] = "emoji"
    (two / "config.json").write_text(json.dumps(record))
    shown = page_of([one, two], tmp_path)
    assert "results" not in shown.ids
    assert "2 runs on several datasets" in shown.text


def test_a_run_that_failed_is_shown_with_its_error(tmp_path):
    whole, failed = make_run(tmp_path / "none-seed0"), make_run(tmp_path / "cs-0.7-seed0", "cs", logged=120)
    (failed / "resources.json").write_text(json.dumps({"format": 2, "failure": "the loss of step 123 is nan"}))
    record = {
        "rows": [{"variant": "none"}, {"variant": "cs-0.7"}], "unfinished": ["cs-0.7-seed0", "never-seed0"],
        "runs": [{"variant": "none", "seed": 0, "folder": whole.name}],
    }  # fmt: skip
    (tmp_path / "comparison.json").write_text(json.dumps(record))
    shown = page_of([tmp_path], tmp_path)
    assert [run["label"] for run in shown.data["runs"]] == ["none", "cs-0.7"]
    assert "cs-0.7-seed0 is not finished: step 120 of 400: the loss of step 123 is nan" in shown.text
    assert {s["run"] for s in shown.data["charts"]["loss"]["series"]} == {0, 1}


def test_a_comparison_of_folders_knows_which_runs_became_nonfinite(tmp_path):
    folders = [make_run(tmp_path / f"{name}-seed{s}", name, s) for name in ("none", "cs:0.7") for s in (0, 1)]
    (folders[3] / "resources.json").write_text('{"format": 2, "failure": "the loss is not finite", "nonfinite": true}')
    lines = (folders[3] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folders[3] / "metrics.jsonl").write_text("".join(lines[: len(lines) // 2]))
    comparison = compare_views(read_runs(folders))
    assert comparison.failed == [("cs-0.7", 1)]
    assert comparison.row("cs-0.7").sooner["val_loss"].failed == 1
    assert "CS (κ = 0.7) with seed 1" in findings(comparison, ["none", "cs-0.7"], 400, "digits").caveat


def test_runs_that_all_failed_have_a_page(tmp_path):
    runs = [make_run(tmp_path / name, name, logged=0, samples=0, card=False) for name in ("none", "cs")]
    shown = page_of(runs, tmp_path)
    assert "results" not in shown.ids
    assert shown.text.count("is not finished: step 0 of 400") == 2


def test_caveats_appear_once(tmp_path):
    one = page_of([make_run(tmp_path / name, name) for name in ("none", "cs")], tmp_path).text
    assert one.count("One seed") == 1
    assert one.count("may be chance") == 1
    assert one.count("shared the machine") == 1
    assert "time, s" not in one.replace("CPU time, s", "")


def test_every_axis_has_a_name(page):
    for name, chart in page.data["charts"].items():
        assert name == "forest" or (chart["x"] and chart["y"]), name


def test_the_clearest_difference_comes_first(page):
    """cs has 0.3 times none's jumps and 0.9 times its loss."""
    assert "oscillation" in page.data["charts"]["forest"]["panels"][0]["title"]
    shown = [attributes["data-chart"] for attributes in page.all("div") if "data-chart" in attributes]
    assert shown.index("relative") < shown.index("validation") < shown.index("loss")


def test_equal_settings_are_not_listed_as_different(tmp_path):
    one = make_run(tmp_path / "one", settings=["train.lr=0.001"])
    two = make_run(tmp_path / "two", "cs", settings=["train.lr=0.003"])
    record = json.loads((one / "config.json").read_text())
    record["config"]["train"]["clip"] = 1  # 1.0 in the other
    del record["config"]["monitor"]["samples"]  # of an older version: the default, as in the other
    (one / "config.json").write_text(json.dumps(record))
    text = page_of([one, two], tmp_path).text
    table = text[text.index("What differs between the runs") : text.index("The same in all runs")]
    assert "train.lr" in table
    assert "scaling" in table
    for equal in ("clip", "samples", "device", "torch", "steps done", "reverse"):
        assert equal not in table


def test_an_extractor_without_weights_has_no_hash(tmp_path):
    run = make_run(tmp_path / "run")
    card = json.loads((run / "distance.json").read_text())
    card["card"]["weights"] = hashlib.sha256().hexdigest()
    (run / "distance.json").write_text(json.dumps(card))
    assert "e3b0c442" not in page_of([run], tmp_path).text


def test_a_registered_metric_is_shown_without_a_change_here(tmp_path):
    """As a curve, in the results and on the cards, also in a process that does not know it."""
    runs = [make_run(tmp_path / name, name) for name in ("none", "cs")]
    for run in runs:
        stored = json.loads((run / "distance.json").read_text())
        gap = {"value": 0.123, "interval": {"low": 0.1, "high": 0.2}, "details": {}, "label": "mean gap (8×8 pixels)"}
        stored["metrics"] = {"frechet": {"value": 20.0, "label": "Fréchet distance"}, "mean-gap": gap}
        (run / "distance.json").write_text(json.dumps(stored))
        (run / "evaluations").mkdir()
        (run / "evaluations" / "step-00000400.json").write_text(json.dumps(stored))
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 400, "mean-gap": 0.123}) + "\n")
    shown = page_of(runs, tmp_path)
    assert shown.data["charts"]["metric mean-gap"]["y"] == "mean gap (8×8 pixels)"
    assert "mean gap (8×8 pixels)" in [panel["title"] for panel in shown.data["charts"]["forest"]["panels"]]
    assert "0.123 [0.1, 0.2]" in shown.text


def test_prompts_stand_with_their_samples(tmp_path):
    run = make_run(tmp_path / "run", captions=[f"a picture of {k}" for k in range(16)])
    shown = page_of([run], tmp_path)
    assert shown.text.count("a picture of 5") == 2  # of the real image and of the sample
    assert shown.text.count("Real images") == 1


def test_only_the_first_seed_of_a_variant_is_shown_at_once(page):
    at = next(k for k, (tag, attributes) in enumerate(page.tags) if tag == "dialog")
    details = [k for k, (tag, _) in enumerate(page.tags) if tag == "details" and k < at]
    figures = [k for k, (tag, values) in enumerate(page.tags) if tag == "figure" and values.get("class") == "samples"]
    assert len([k for k in figures if k < details[0]]) == 1 + 3  # real images, and one grid per variant
    assert len([k for k in figures if k > details[0]]) == 6


def test_a_dozen_runs_with_large_grids_are_under_five_megabytes(tmp_path):
    runs = [make_run(tmp_path / f"run{k}", "cs" if k % 2 else "none", k, steps=5000, skips=16) for k in range(12)]
    for run in runs:
        for step in (2500, 5000):
            noisy_picture(run / "samples" / f"step-{step:08d}.png", 530)
    path = write_report(runs, tmp_path / "page.html")
    assert path.stat().st_size < 5_000_000


@pytest.mark.slow
def test_a_million_metric_lines_open_in_seconds(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, 1_000_001):
            file.write(f'{{"step": {step}, "loss": 0.5, "lr": 0.001, "grad_norm": 1.25, "images": {64 * step}}}\n')
    before = time.process_time()
    path = write_report([run], tmp_path / "page.html")
    assert time.process_time() - before < 20  # CPU time; about 6 s measured
    assert path.stat().st_size < 500_000


def test_equal_runs_in_folders_of_one_name_are_two_runs(tmp_path):
    runs = [make_run(tmp_path / part / "none-seed0") for part in ("a", "b")]
    assert labels(read_runs(runs)) == ["a/none-seed0", "b/none-seed0"]


def test_the_page_of_a_comparison_has_its_baseline(tmp_path):
    for name in ("cs:0.7", "none"):
        make_run(tmp_path / f"{name.replace(':', '-')}-seed0", name)
    comparison = {"format": 1, "baseline": "cs-0.7", "runs": [{"folder": "cs-0.7-seed0"}, {"folder": "none-seed0"}]}
    (tmp_path / "comparison.json").write_text(json.dumps(comparison))
    assert labels(read_runs([tmp_path])) == ["cs-0.7", "none"]
    (tmp_path / "comparison.json").write_text(json.dumps(comparison | {"baseline": ["damaged"]}))
    assert labels(read_runs([tmp_path])) == ["none", "cs-0.7"]


def test_runs_with_the_same_folder_name_get_distinct_names(tmp_path):
    runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")]
    shown = page_of([*runs, runs[0]], tmp_path)
    assert "a/run" in shown.text
    assert len(shown.data["runs"]) == 2  # a run given twice is shown once


def test_a_path_that_is_not_a_run_raises_an_error_that_names_it(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RunError, match=path.name):
            write_report([path], tmp_path / "page.html")
    with pytest.raises(ScaleLongError, match=tmp_path.name):
        write_report([make_run(tmp_path / "run")], tmp_path)


def test_the_command_writes_beside_the_run(tmp_path):
    folder = make_run(tmp_path / "run")
    words = [sys.executable, "-m", "scalelong", "report", str(folder)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"page: {folder / 'report.html'}\n"
    failed = subprocess.run([*words[:4], str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")
