"""The benchmark's contestants do the same work, and its arithmetic is right."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from scalelong.bench.contestants import pair
from scalelong.bench.growth import slope
from scalelong.bench.memory import peak_of
from scalelong.bench.peak import alone, flop, products, together
from scalelong.bench.reference import PilImages, ReferenceLoop, ReferenceUViT
from scalelong.bench.remote import Remote
from scalelong.bench.suite import joined
from scalelong.bench.timing import Spread, Times, interleave
from scalelong.errors import ScaleLongError
from scalelong.models import UViT
from scalelong.scaling import ConstantScaling

SHAPE = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 4, "num_heads": 4}
LOSS_TOLERANCE = 1e-5  # relative; no optimisation of ours may move a loss further from the usual code's


def test_the_reference_is_our_network_with_the_same_weights() -> None:
    torch.manual_seed(0)
    ours = UViT(**SHAPE, scaling=ConstantScaling(0.7))
    usual = ReferenceUViT(**SHAPE, kappa=0.7)
    usual.load_state_dict(ours.state_dict())
    x, t = torch.randn(3, 3, 8, 8), torch.rand(3) * 999
    torch.testing.assert_close(ours(x, t), usual(x, t), rtol=1e-5, atol=1e-6)


def test_ten_steps_of_training_have_the_losses_of_the_usual_code() -> None:
    trainer, loop = pair("digits")
    trainer.ema.warmup = False
    for number in range(1, 11):
        batch = trainer.batch(number)
        warmed = trainer.config.train.lr * number / trainer.config.train.warmup
        for group in loop.optimizer.param_groups:
            group["lr"] = warmed
        usual = loop.update(batch.x_0, batch.t, batch.eps)
        assert trainer.step().loss == pytest.approx(usual, rel=LOSS_TOLERANCE)


def test_the_reference_averages_as_the_formula_says() -> None:
    net = torch.nn.Linear(2, 2)
    images = np.zeros((4, 2, 2, 1), np.uint8)
    loop = ReferenceLoop(
        net, images, batch_size=2, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, flip=False, decay=0.75
    )
    before, live = loop.averaged.weight.clone(), net.weight.detach() + 1
    net.weight.data = live
    loop.average()
    torch.testing.assert_close(loop.averaged.weight, 0.75 * before + 0.25 * live)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_through_pil_keep_their_pixels(channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 4, channels), np.uint8)
    expected = torch.from_numpy(images[1]).permute(2, 0, 1).float() / 127.5 - 1
    torch.testing.assert_close(PilImages(images, flip=False)[1], expected)


def test_flop_are_those_that_torch_counts() -> None:
    size = {"batch": 2, "tokens": 17, "width": 32, "depth": 4}
    layers = products(**size)
    linear = flop(layers, **size) - 12.0 * 2 * 17**2 * 32 * 5
    with FlopCounterMode(display=False) as counter:
        run, work = alone(layers)
        run()
    assert counter.get_total_flops() == work
    assert linear == sum(6.0 * p.M * p.K * p.N * p.count for p in layers)
    with FlopCounterMode(display=False) as counter:
        UViT(**SHAPE)(torch.randn(2, 3, 8, 8), torch.rand(2)).sum().backward()
    counted = counter.get_total_flops()
    assert linear == pytest.approx(counted, rel=0.12)  # torch adds patch embedding, decoder, convolution


def test_interleaving_runs_every_case_as_often_and_begins_with_each() -> None:
    calls: list[str] = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=4, warm_up=0)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(seconds) for name, seconds in times.seconds.items()} == {"a": 4, "b": 4}


def test_a_speedup_is_taken_round_by_round() -> None:
    times = Times({"fast": [1.0, 2.0, 4.0], "slow": [2.0, 4.0, 8.0]})
    assert times.speedup("fast", "slow") == Spread(2.0, 2.0, 2.0)
    assert times.share("fast", "slow") == Spread(0.5, 0.5, 0.5)


def test_a_contestant_whose_process_ends_is_named() -> None:
    with pytest.raises(ScaleLongError, match="builtins:nothing"):
        Remote("builtins:nothing")


def test_sections_that_were_not_run_again_stay_in_the_file_of_one_machine() -> None:
    figure = {"section": "limit", "name": "old"}
    before = {"machine": {"threads": 1}, "figures": [figure, {"section": "digits", "name": "old"}], "growth": [1]}
    now = {"machine": {"threads": 1}, "figures": [{"section": "digits", "name": "new"}], "growth": []}
    both = joined(before, now)
    assert both["figures"] == [{"section": "digits", "name": "new"}, figure]
    assert both["growth"] == [1]
    elsewhere = {**now, "machine": {"threads": 2}}
    assert joined(before, elsewhere) == elsewhere


def test_all_products_of_a_network_are_run_as_often_as_it_has_them() -> None:
    layers = products(batch=2, tokens=17, width=32, depth=4)
    with FlopCounterMode(display=False) as counter:
        together(layers)()
    assert counter.get_total_flops() == sum(6 * p.M * p.K * p.N * p.count for p in layers)


def test_peak_memory_counts_what_is_alive_together() -> None:
    def run() -> None:
        a = torch.zeros(1000)
        b = a + 1  # two of 4000 bytes at once
        del a
        _ = b.view(10, 100)  # no storage of its own
        _ = b * 2

    assert peak_of(run) == 8000


def test_the_slope_of_a_power_law_is_its_exponent() -> None:
    assert math.isclose(slope((1, 2, 4), [3.0, 3.0 * 2**1.5, 3.0 * 4**1.5]), 1.5)


def test_the_command_prints_json_and_names_unknown_sections() -> None:
    from scalelong.cli.app import app

    runner = CliRunner()
    done = runner.invoke(app, ["bench", "sampling", "--rounds", "2", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)["figures"]
    assert {f["section"] for f in figures} == {"sampling"}
    assert all(f["value"]["low"] <= f["value"]["median"] <= f["value"]["high"] for f in figures)
    wrong = runner.invoke(app, ["bench", "digit"])
    assert wrong.exit_code != 0
    assert "digits" in str(wrong.exception) + wrong.output
