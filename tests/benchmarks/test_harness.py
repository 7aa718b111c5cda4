"""The benchmark's baselines do the same work as ours, and its arithmetic is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from scalelong import ConstantScaling, UViT

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))
import run  # noqa: E402
from baselines import PilImages, PlainLoop, PlainUViT  # noqa: E402
from harness import Figure, Spread, Times, interleave, peak_of, write  # noqa: E402

sys.path.remove(str(FOLDER))

SHAPE = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 4, "num_heads": 4}


def test_the_plain_network_equals_ours_with_the_same_weights():
    ours, plain = UViT(**SHAPE, scaling=ConstantScaling(0.7)), PlainUViT(**SHAPE, kappa=0.7)
    plain.load_state_dict(ours.state_dict())
    x, t = torch.randn(3, 3, 8, 8), torch.rand(3) * 999
    torch.testing.assert_close(ours(x, t), plain(x, t), rtol=1e-5, atol=1e-6)


def test_ten_training_steps_have_the_losses_of_the_plain_loop():
    trainer = run.make_trainer("digits-uvit")
    loop = run.plain_loop(trainer)
    for number in range(1, 11):
        batch = trainer.batch(number)
        for group in loop.optimizer.param_groups:
            group["lr"] = trainer.config.train.lr * number / trainer.config.train.warmup
        assert trainer.step().loss == pytest.approx(loop.update(batch.x_0, batch.t, batch.eps), rel=1e-5)


def test_the_plain_loop_averages_as_the_formula_says():
    net, images = torch.nn.Linear(2, 2), np.zeros((4, 2, 2, 1), np.uint8)
    options = {"batch_size": 2, "lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0, "flip": False, "decay": 0.75}
    loop = PlainLoop(net, images, **options)
    before, live = loop.averaged.weight.clone(), net.weight.detach() + 1
    net.weight.data = live
    loop.average()
    torch.testing.assert_close(loop.averaged.weight, 0.75 * before + 0.25 * live)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_through_pil_keep_their_pixels(channels):
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 4, channels), np.uint8)
    expected = torch.from_numpy(images[1]).permute(2, 0, 1).float() / 127.5 - 1
    torch.testing.assert_close(PilImages(images, flip=False)[1], expected)


def test_interleaving_runs_every_case_equally_often_and_starts_with_each():
    calls: list[str] = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=4, warm_up=0)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(seconds) for name, seconds in times.seconds.items()} == {"a": 4, "b": 4}


def test_a_speedup_is_taken_round_by_round():
    times = Times({"fast": [1.0, 2.0, 4.0], "slow": [2.0, 4.0, 8.0]})
    assert times.speedup("fast", "slow") == Spread(2.0, 2.0, 2.0)
    assert times.ratio("fast", "slow") == Spread(0.5, 0.5, 0.5)


def test_peak_memory_counts_storages_that_are_alive_together():
    def case() -> None:
        a = torch.zeros(1000)
        b = a + 1  # two storages of 4,000 bytes
        del a
        _ = b.view(10, 100)  # no storage of its own
        _ = b * 2

    assert peak_of(case) == 8000


def test_sections_that_were_not_run_again_stay_in_the_file(tmp_path):
    path, one = tmp_path / "bench.json", Spread(1.0, 1.0, 1.0)
    write(path, "first", [Figure("digits", "old", "x", one), Figure("unet", "kept", "x", one)], [{"axis": "depth"}])
    write(path, "second", [Figure("digits", "new", "x", one, target=2.0)], [])
    record = json.loads(path.read_text())
    assert [figure["name"] for figure in record["figures"]] == ["kept", "new"]
    assert record["figures"][1]["holds"] is False
    assert record["growth"] == [{"axis": "depth"}]


@pytest.mark.slow
def test_the_script_runs_a_section_and_names_an_unknown_one(tmp_path):
    command = [sys.executable, str(FOLDER / "run.py")]
    out = tmp_path / "bench.json"
    subprocess.run([*command, "sampling", "--rounds", "2", "--out", str(out)], check=True, capture_output=True)
    assert {figure["section"] for figure in json.loads(out.read_text())["figures"]} == {"sampling"}
    shown = subprocess.run([*command, "--table", str(out)], check=True, capture_output=True, text=True)
    assert "diffusers' loop" in shown.stdout
    wrong = subprocess.run([*command, "digit"], capture_output=True, text=True)
    assert wrong.returncode != 0
    assert "digits" in wrong.stderr
