"""Items end to end on a study that a test can train: figures' numbers are those of the runs, files are written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from paper_runs import TINY, train_tiny

from scalelong.errors import RunError, ScaleLongError, UnknownNameError
from scalelong.paper import inputs, networks, quality
from scalelong.paper.items import ITEMS
from scalelong.paper.judge import NO_VERDICT, VERDICTS
from scalelong.paper.networks import decay, learned_kappas, norms_in_training, share_inside
from scalelong.paper.quality import relative_change
from scalelong.paper.run import Options, read_result, result_name, run_item, to_json
from scalelong.paper.studies import CS
from scalelong.paper.study import read_trained
from scalelong.scaling import ConstantScaling

CAMPAIGN_FED = (
    "figure-1",
    "figure-3",
    "figure-5",
    "figure-6",
    "figure-7",
    "figure-11",
    "figure-12",
    "table-1",
    "table-4",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("paper")
    train_tiny(TINY, out)
    return out


def small(name):
    """The item with its own arms, of the tiny study, whose CS has κ = 0.7."""
    item = ITEMS[name]
    scalings = tuple(CS if spec == ConstantScaling(0.5) else spec for spec in item.cpu[0].scalings)
    return replace(item, cpu=(replace(TINY, scalings=scalings),))


def ran(name, runs, tmp_path, **changes):
    return run_item(small(name), Options(runs=runs, results=tmp_path, train=False, quiet=True, **changes))


@pytest.mark.parametrize("name", CAMPAIGN_FED)
def test_every_item_reads_judges_draws_and_writes(name, runs, tmp_path, monkeypatch):
    monkeypatch.setitem(inputs.DATA, "cpu", ("digits",))
    monkeypatch.setattr(inputs, "SAMPLES", 200)
    result = ran(name, runs, tmp_path)
    assert result["complete"]
    assert result["claims"]
    assert sum(result["verdicts"].values()) == len(result["claims"])
    assert set(result["verdicts"]) == set(VERDICTS)
    assert read_result(tmp_path / f"{name}.json") == json.loads(json.dumps(result))
    picture = (tmp_path / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5000
    for table in result["tables"]:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])


def lines(runs, name, key):
    text = (runs / "tiny" / name / "metrics.jsonl").read_text()
    return {row["step"]: row[key] for row in map(json.loads, text.splitlines()) if key in row}


def test_ratios_and_curves_equal_those_of_the_logs(runs, tmp_path):
    result = ran("figure-5", runs, tmp_path)
    key = read_trained(small("figure-5").cpu[0], runs).loss
    logs = [math.log(lines(runs, f"cs-0.7-seed{s}", key)[12] / lines(runs, f"none-seed{s}", key)[12]) for s in (0, 1)]
    claim = next(c for c in result["claims"] if c["quantity"].endswith("CS 0.7 / no scaling"))
    assert claim["measured"]["mean"] == pytest.approx(math.exp(sum(logs) / 2))
    half = 12.706204736 * abs(logs[0] - logs[1]) / 2  # t_{0.975} of one degree of freedom
    assert math.log(claim["measured"]["high"]) == pytest.approx(sum(logs) / 2 + half, rel=1e-6)
    drawn = {(x["variant"], x["seed"]): x for x in result["data"]["panels"][0]["lines"]}
    assert drawn["ls", 1]["steps"] == [4, 8, 12]
    assert drawn["ls", 1]["values"] == pytest.approx(list(lines(runs, "ls-seed1", key).values()), abs=1e-5)


def test_the_right_panel_is_the_geometric_mean_of_the_ratios():
    rows = [
        {"variant": v, "seed": s, "steps": [1, 2], "values": values}
        for v, s, values in (
            ("none", 0, [2.0, 1.0]),
            ("none", 1, [4.0, 1.0]),
            ("cs", 0, [1.0, 1.0]),
            ("cs", 1, [8.0, 4.0]),
        )
    ]
    steps, changes = relative_change(rows, "cs", "none")
    assert steps == [1, 2]
    assert changes == pytest.approx([0.0, 100.0])


def test_norms_are_those_of_training_batches_join_by_join(runs, tmp_path):
    result = ran("figure-1", runs, tmp_path)
    panel = result["data"]["panels"][0]
    drawn = {(x["variant"], x["seed"], x["join"]): x for x in panel["lines"]}
    text = (runs / "tiny" / "none-seed0" / "stability.jsonl").read_text()
    train = {x["step"]: x["train"]["backbone"] for x in map(json.loads, text.splitlines()) if "train" in x}
    for join in (1, 2):
        line = drawn["none", 0, join]
        assert line["steps"] == sorted(train)
        window = [train[step][join - 1] for step in line["steps"][3:8]]  # the running mean over five snapshots
        assert line["norm"][5] == pytest.approx(sum(window) / 5, rel=1e-4)
    finals = {v: [_last(runs, f"{v}-seed{s}", 0) for s in (0, 1)] for v in ("none", "cs-0.7")}
    ratio = math.sqrt(math.prod(finals["cs-0.7"]) / math.prod(finals["none"]))
    assert panel["by_join"]["cs-0.7"][0] == pytest.approx(ratio, rel=1e-3)
    claims = [claim["claim"] for claim in result["claims"]]
    assert any("norm of features at the outer joins" in claim for claim in claims)
    assert any("absolute oscillation of features at the inner joins" in claim for claim in claims)
    assert any("our measure" in claim for claim in claims)


def _last(runs, name, column):
    text = (runs / "tiny" / name / "stability.jsonl").read_text()
    rows = [x for x in map(json.loads, text.splitlines()) if "train" in x]
    late = [x["train"]["backbone"][column] for x in rows if x["step"] >= 0.9 * rows[-1]["step"]]
    return sum(late) / len(late)


def test_learned_coefficients_are_what_the_network_multiplies_by(runs):
    assert learned_kappas(runs / "tiny" / "cs-0.7-seed0") == pytest.approx([1.0, 0.7])
    assert learned_kappas(runs / "tiny" / "cs-reverse-0.7-seed0") == pytest.approx([0.49, 0.7])
    assert all(0.3 < kappa < 0.7 for kappa in learned_kappas(runs / "tiny" / "ls-seed0"))  # a sigmoid near 0.5


def test_the_decay_of_cs_is_the_logarithm_of_its_kappa():
    cs = [0.7**i for i in range(6)]
    assert decay(cs) == pytest.approx(math.log(0.7))
    assert share_inside(cs) == 1.0
    assert share_inside([1.0, 0.99, 0.8, 0.01]) == pytest.approx(1 / 3)


def test_norms_are_measured_at_initialization_and_at_every_checkpoint(runs):
    from scalelong.robustness import block_norms
    from scalelong.runs.run import Run, build_network
    from scalelong.training.examples import Examples

    found = norms_in_training(runs / "tiny" / "none-seed1")
    assert sorted(found) == [0, 4, 8, 12]
    config = Run(runs / "tiny" / "none-seed1").config
    examples = Examples(config, "validation")
    batch = examples.probe(4)
    net = build_network(config, examples.shapes).eval()
    x_t = examples.process.add_noise(batch.x_0, batch.eps, batch.t)
    start = block_norms(net, x_t, examples.process.network_time(batch.t), iterations=30)
    assert found[0] == pytest.approx(start.norms, abs=1e-4)
    assert found[12] != found[0]


def test_analyses_of_finished_runs_use_the_device(runs, monkeypatch):
    """Figures 3c, 7 and 11. `meta` stands for a GPU: nothing may stay on the CPU, and the first result read fails."""
    from scalelong.runs import generate

    monkeypatch.setattr(generate, "best_device", lambda name=None: torch.device("meta"))
    monkeypatch.setattr("scalelong.experiments.robustness.best_device", generate.best_device)
    folder = runs / "tiny" / "ls-seed0"
    for analyse in (inputs.sensitivity, networks.norms_in_training):
        with pytest.raises((RuntimeError, NotImplementedError), match="copy out of meta|called on meta tensors"):
            analyse(folder)
    seen = []

    def describe(net, *inputs, **conditions):
        seen.extend(tensor.device.type for tensor in (*net.parameters(), *inputs, *conditions.values()))
        return SimpleNamespace(rows=())

    monkeypatch.setattr("scalelong.skips.describe", describe)
    networks.learned_kappas(folder)
    assert set(seen) == {"meta"}


def test_extra_noise_does_not_depend_on_the_global_seed(runs):
    one = inputs.sensitivity(runs / "tiny" / "none-seed0")
    torch.manual_seed(123)  # the δ are their own
    again = inputs.sensitivity(runs / "tiny" / "none-seed0")
    assert one["loss"] == again["loss"]
    assert list(one["loss"]) == [0.0, *inputs.VARIANCES]
    assert one["gain"][0.1] > 0


def test_one_seed_gives_no_verdict(runs, tmp_path):
    result = ran("table-4", runs, tmp_path, seeds=(1,))
    assert {claim["verdict"] for claim in result["claims"]} == {NO_VERDICT}
    assert (tmp_path / "table-4-seeds-1.json").exists()
    assert not (tmp_path / "table-4.json").exists()


def test_missing_runs_are_named_and_the_rest_is_judged(runs, tmp_path):
    result = ran("table-4", runs, tmp_path, seeds=(0, 1, 2))
    assert not result["complete"]
    assert result["missing"] == ["tiny/cs-reverse-0.7-seed2", "tiny/cs-0.7-seed2"]
    assert result["claims"][0]["measured"]["n"] == 2


def test_distances_of_samples_that_are_not_images_are_shown_and_not_judged(runs, tmp_path, monkeypatch):
    result = ran("table-4", runs, tmp_path)  # twelve steps: noise
    distance = next(c for c in result["claims"] if "not FID" in c["claim"])
    assert distance["verdict"] == NO_VERDICT
    assert any("not images yet" in note for note in result["notes"])
    assert any("not FID" in column for table in result["tables"] for column in table["columns"])
    monkeypatch.setattr(quality, "mean_image_distance", lambda trained: math.inf)
    judged = next(c for c in ran("table-4", runs, tmp_path)["claims"] if "not FID" in c["claim"])
    assert judged["measured"]["n"] == 2
    assert judged["verdict"] != NO_VERDICT


def test_the_distance_of_the_mean_image_is_the_datas_variance(runs):
    from scalelong.data import load

    trained = read_trained(small("table-4").cpu[0], runs)
    images = torch.from_numpy(load("digits", split="train").images[:].copy())
    pixels = images.double().flatten(1) / 127.5 - 1  # 8×8 already: nothing is averaged
    assert quality.mean_image_distance(trained) == pytest.approx(float(pixels.var(0).sum()), rel=1e-5)


def test_an_item_without_runs_says_how_to_train_them(tmp_path):
    with pytest.raises(RunError, match=r"4 runs.*scalelong paper table-4"):
        ran("table-4", tmp_path / "nothing", tmp_path)


def test_runs_with_other_settings_are_rejected(runs, tmp_path):
    item = small("table-4")
    other = replace(item, cpu=(replace(item.cpu[0], settings=(*item.cpu[0].settings, "train.lr=0.5")),))
    with pytest.raises(ScaleLongError, match=r"train\.lr"):
        run_item(other, Options(runs=runs, results=tmp_path, train=False))


def test_finished_runs_are_not_trained_again(runs, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in runs.glob("tiny/*/metrics.jsonl")}
    run_item(small("table-4"), Options(runs=runs, results=tmp_path, quiet=True))
    assert {path: path.stat().st_mtime_ns for path in runs.glob("tiny/*/metrics.jsonl")} == before


def test_a_lost_run_alone_is_trained_again_and_the_result_is_the_same(runs, tmp_path):
    import shutil

    copy = tmp_path / "runs"
    shutil.copytree(runs, copy)
    whole = ran("table-4", copy, tmp_path)
    shutil.rmtree(copy / "tiny" / "cs-0.7-seed1")
    kept = (copy / "tiny" / "cs-0.7-seed0" / "metrics.jsonl").stat().st_mtime_ns
    again = run_item(small("table-4"), Options(runs=copy, results=tmp_path, jobs=1, quiet=True))
    assert again["claims"] == whole["claims"]
    assert (copy / "tiny" / "cs-0.7-seed0" / "metrics.jsonl").stat().st_mtime_ns == kept


def test_results_of_other_sizes_and_steps_have_other_names():
    item = ITEMS["figure-1"]
    assert result_name(item, Options()) == "figure-1"
    assert result_name(item, Options(size="paper")) == "figure-1-paper"
    assert result_name(item, Options(steps=9)) == "figure-1-9-steps"
    with pytest.raises(UnknownNameError, match="papr.*paper"):
        Options(size="papr")


def test_json_files_are_whole_and_readable(tmp_path):
    result = {"format": 1, "item": "figure-1", "data": {"numbers": [1, 2, 3]}}
    text = to_json(result)
    assert json.loads(text) == result
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(RunError, match="format 1"):
        read_result(tmp_path / "bad.json")
    assert read_result(tmp_path / "none.json") is None
