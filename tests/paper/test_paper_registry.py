"""Every item exists at both sizes, and its dry run prints commands that parse."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from scalelong.errors import UnknownNameError
from scalelong.paper.cost import NETWORK, NVLINK, cost_of, describe_cost, minutes_on_two_cores, step_time, table
from scalelong.paper.items import ITEMS, find_item
from scalelong.paper.run import Options
from scalelong.paper.study import name_of
from scalelong.scaling import LearnableScaling
from scalelong.training.presets import PRESETS, choose

NAMES = [f"figure-{n}" for n in (1, 3, 5, 6, 7, 11, 12, 13)] + [f"table-{n}" for n in (1, 2, 3, 4)]
EACH = [(name, size) for name in NAMES for size in ("cpu", "paper")]


@pytest.mark.parametrize("name", NAMES)
def test_distances_at_the_papers_size_follow_the_presets_protocol(name):
    """The final number has the resize, labels and captions that `scalelong evaluate` takes from the preset."""
    for study in ITEMS[name].paper:
        if study.distance is not None:
            curves = bool(study.config(study.scalings[0]).evaluate.every)
            assert study.distance.extractor is None
            assert study.distance.n == (10_000 if curves else 30_000 if "coco" in study.preset else 50_000)


def test_all_items_of_the_paper_are_registered():
    assert list(ITEMS) == NAMES


@pytest.fixture(scope="module")
def commands():
    from scalelong.cli.app import app

    return typer.main.get_command(app).commands


def parsed(commands, line):
    program, name, *words = shlex.split(line)
    assert program == "scalelong"
    return name, commands[name].make_context(name, words).params


@pytest.mark.parametrize(("name", "size"), EACH)
def test_the_commands_of_a_dry_run_parse_and_give_the_configs_that_the_item_trains(name, size, commands):
    item = ITEMS[name]
    for study in item.studies(size):
        lines = [line for line in replace(study, seeds=(5,)).commands(Path("runs")) if " train " in line]
        assert len(lines) == len(study.scalings)
        for line, spec in zip(lines, study.scalings, strict=True):
            command, given = parsed(commands, line)
            assert command == "train"
            typed = choose(
                given["preset"], scaling=given["scaling"], kappa=given["kappa"], steps=given["steps"],
                seed=given["seed"], settings=given["settings"],
            )  # fmt: skip
            assert typed.seed == 5
            assert typed.scaling == study.config(spec).scaling
            assert typed.train == study.config(spec).train
            assert typed.model == study.config(spec).model
    for line in item.commands:
        parsed(commands, line)


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_size_has_its_presets_and_the_cpus_has_none_of_them(name):
    item = ITEMS[name]
    assert item.paper
    assert {PRESETS[study.preset].size for study in item.paper} == {"paper"}
    assert {PRESETS[study.preset].size for study in item.cpu} == {"cpu"}
    assert all(len(study.seeds) >= 3 for study in (*item.cpu, *item.paper))  # fewer have no interval worth the name
    assert item.differs, "a CPU-sized experiment says how it is not the paper's"


def test_other_seeds_than_those_of_a_campaign_are_trained_in_folders():
    study = ITEMS["figure-1"].cpu[0]
    assert study.records is not None
    assert study.changed((0,), None).records == study.records
    assert study.changed((0, 1, 2, 3), None).records is None


def test_variants_of_a_study_share_everything_but_their_scaling():
    for item in ITEMS.values():
        for study in (*item.cpu, *item.paper):
            configs = {str(replace(v.config, scaling=None, kappa=0.7)) for v in study.variants()}
            assert len(configs) == 1, study.name


def test_gpu_hours_follow_from_flop_steps_and_runs():
    study = ITEMS["table-4"].paper[0]
    cost = cost_of(study.changed((0,), None), "paper")
    # U-ViT-S/2: about 44M weights on 257 tokens, two FLOP a weight and token, thrice for forward and backward;
    # attention adds 4·L²·D in each of 13 blocks.
    dense = 3 * 2 * 44e6 * 257 * 64
    attention = 3 * 13 * 4 * 257**2 * 512 * 64
    assert cost.flop == pytest.approx(dense + attention, rel=0.05)
    assert cost.runs == 2
    assert cost.training == pytest.approx(2 * 45_000 * cost.flop / (312e12 * 0.35) / 3600)
    assert cost_of(study.changed((0, 1), 90_000), "paper").training == pytest.approx(4 * cost.training)
    # 10,000 samples at the end and every 5,000 steps, of 50 evaluations, each a third of a training image's FLOP
    samples = 10 * 10_000
    assert cost.evaluation == pytest.approx(
        2 * samples * (50 * cost.flop / 3 / 64 + 11.4e9) / (312e12 * 0.35) / 3600, rel=0.01
    )
    # two checkpoints of 16 bytes per weight; model/ and the best network; 60,000 images
    assert cost.disk == pytest.approx(2 * cost.parameters * (2 * 16 + 4 + 4))
    assert cost.data == 60_000 * 3 * 32 * 32


def test_a_study_with_captions_counts_latents_tokens_and_encoders():
    cost = cost_of(ITEMS["table-1"].paper[6].changed((0,), None), "paper")
    images = 118_287 + 40_504
    tokens, latents = 5 * 77 * 768 * 2, 2 * 4 * 32 * 32 * 4
    assert cost.data == images * (3 * 256**2 + latents + tokens)
    assert cost.encoding == pytest.approx(images * (273e9 + 5 * 13.3e9) / (312e12 * 0.35) / 3600)


def test_more_gpus_divide_the_work_until_gradients_take_longer_than_backward():
    flop, parameters = 216e12, 131e6  # U-ViT-M with batch 1,024
    one, eight, many = (step_time(flop, parameters, gpus) for gpus in (1, 8, 64))
    assert one.exposed == one.exchange == 0
    assert eight.compute == pytest.approx(one.compute / 8)
    assert eight.exchange == pytest.approx(2 * 4 * parameters * 7 / 8 / NVLINK)  # a ring sends 2(n − 1)/n of the bytes
    assert eight.exposed < 0.01 * eight.compute  # all but the last bucket is hidden
    assert many.exposed == pytest.approx(2 * 4 * parameters * 63 / 64 / NETWORK - 2 / 3 * many.compute)
    assert one.seconds / 64 < many.seconds < eight.seconds


def test_the_page_about_scale_has_the_table_of_the_model():
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    assert table() in page  # else: python -m scalelong.paper.cost


def test_commands_use_the_gpus_and_fit_them():
    item = ITEMS["table-1"]
    one, eight = (Options(size="paper", gpus=g, memory=m).studies(item) for g, m in ((1, 24), (8, 40)))
    lines = [line for study in one for line in study.commands(Path("runs"))]
    assert all(line.startswith(("scalelong train ", "scalelong evaluate ")) for line in lines)
    parts = {study.preset: [s for s in study.settings if s.startswith("train.")] for study in one}
    assert parts["imagenet64-uvit-m"] == parts["imagenet64-unet"] == ["train.accumulate=8"]
    assert parts["imagenet64-uvit-l"] == ["train.accumulate=16"]
    assert parts["cifar10-uvit-s"] == []
    assert not any(s.startswith("train.") for study in eight for s in study.settings)
    launch = "accelerate launch --multi_gpu --num_processes 8 -m scalelong "
    lines = [line for study in eight for line in study.commands(Path("runs"), 8)]
    assert all(line.startswith((launch + "train ", launch + "evaluate ")) for line in lines)


def test_costs_state_their_assumptions():
    full = describe_cost(ITEMS["figure-11"], ITEMS["figure-11"].paper, "paper")
    text = "\n".join(full)
    for word in ("training", "evaluation", "preparation of celeba64", "disk", "on 8, 16, 32, 64 GPUs", "docs/scale.md"):
        assert word in text
    assert "GPU-hours" in full[-1]
    assert "A100" in full[-1]
    assert "35%" in full[-1]
    small = describe_cost(ITEMS["figure-7"], ITEMS["figure-7"].cpu, "cpu")
    assert "GB" in small[-1]
    assert "min on 2 cores" in small[-1]
    assert all(0 < minutes_on_two_cores(item) < 60 for item in ITEMS.values())


def test_a_name_is_found_in_several_spellings_and_a_wrong_one_gets_a_suggestion():
    assert find_item("Figure 7") is ITEMS["figure-7"]
    assert find_item("fig-13") is ITEMS["figure-13"]
    with pytest.raises(UnknownNameError, match="tabel-4.*table-4"):
        find_item("tabel-4")


def test_ls_of_the_studies_is_the_papers_whatever_the_default_is():
    specs = {spec for item in ITEMS.values() for study in (*item.cpu, *item.paper) for spec in study.scalings}
    names = {name_of(spec): spec for spec in specs if spec.kind == "ls"}
    assert set(names) == {"ls", "ls-reduction-4", "ls-reduction-8", "ls-activation-elu", "ls-activation-mish",
                          "ls-calibration-scalar", "ls-calibration-ie"}  # fmt: skip
    assert names["ls"] == LearnableScaling(activation="relu")
    assert names["ls-activation-elu"] == LearnableScaling(activation="elu")
    assert {spec.activation for name, spec in names.items() if "activation" not in name} == {"relu"}
