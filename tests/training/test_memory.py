"""The memory of a step: counted without data as with data, and the settings with which a preset fits."""

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from scalelong.errors import InvalidValueError
from scalelong.models.registry import Shapes, get_model
from scalelong.runs.config import override
from scalelong.runs.run import build_network
from scalelong.training.memory import GIB, USABLE, activation_bytes, fit, measure, step_bytes
from scalelong.training.presets import PRESETS, preset, sizes
from tiny_runs import tiny_config

GREY = Shapes(1, 8)
PAPER = [name for name, p in PRESETS.items() if p.size == "paper"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", [{}, {"train.gradient_checkpointing": True}, {"model.kind": "unet"}], ids=str)
def test_tensors_without_data_are_counted_as_those_with_data(settings, precision):
    config = tiny_config("digits" if "model.kind" in settings else "digits-uvit")
    config = override(config, {key: value for key, value in settings.items() if key != "model.kind"})
    counted, computed = (activation_bytes(config, 16, GREY, precision, real=real) for real in (False, True))
    assert counted == pytest.approx(computed, rel=0.02)


def test_the_count_is_what_torchs_profiler_sees_of_the_allocator():
    """Bytes that the allocator holds at the peak of forward and backward, gradients being there already."""
    config = override(preset("digits-uvit"), {"model.embed_dim": 128, "model.num_heads": 4})
    net = build_network(config, GREY).train()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x, t, denoise = torch.zeros(64, 1, 8, 8), torch.zeros(64), get_model("uvit").adapt(net)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        (denoise(x, t) - x).square().mean().backward()
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert activation_bytes(config, 64, GREY, "fp32") == pytest.approx(peak, rel=0.1)


def test_activations_of_a_uvit_follow_from_its_shapes():
    """Per block and token of width D in bf16: what autograd keeps, between 25·D and 45·D bytes; linear in images."""
    fixed, per_image = sizes()["imagenet64-uvit-m"]["activations"]["plain"]
    tokens, width, blocks = 258, 768, 17
    assert 25 < per_image / (tokens * width * blocks) < 45
    assert fixed == pytest.approx(2 * sizes()["imagenet64-uvit-m"]["parameters"], rel=0.1)  # weights cast to bf16


def test_checkpointing_saves_memory_and_stored_activations_are_correct():
    """All presets of the paper's size: test_every_stored_activation_is_correct."""
    name = "cifar10-uvit-s"
    assert sizes()[name]["activations"] == measure(preset(name))  # else: python -m scalelong.training.presets
    for each in PAPER:
        activations = sizes()[each]["activations"]
        assert activations["checkpointed"][1] < 0.6 * activations["plain"][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
def test_every_stored_activation_is_correct(name):
    assert sizes()[name]["activations"] == measure(preset(name))


@pytest.mark.parametrize("name", PAPER)
def test_every_preset_fits_eight_gpus_of_40_gb_as_it_is(name):
    if not name.endswith("-24gb"):
        assert fit(preset(name), 8, 40) == {}


@pytest.mark.parametrize("name", [name for name in PAPER if name.endswith("-24gb")])
def test_the_presets_for_24_gb_are_the_papers_in_smaller_parts(name):
    small, full = preset(name), preset(name.removesuffix("-24gb"))
    needed = fit(full, 1, 24)
    assert needed == {"train.accumulate": small.train.accumulate}
    assert override(replace(full, preset=name), needed) == small
    images = small.train.batch_size // small.train.accumulate
    assert step_bytes(sizes()[name], images) < USABLE * 24 * GIB < step_bytes(sizes()[name], 2 * images)


def test_a_small_gpu_recomputes_and_one_that_is_too_small_is_an_error():
    config = preset("imagenet64-uvit-l")
    assert fit(config, 1, 80) == {"train.accumulate": 4}
    tight = fit(config, 1, 11)
    assert tight["train.gradient_checkpointing"] is True
    assert config.train.batch_size % tight["train.accumulate"] == 0
    with pytest.raises(InvalidValueError, match="imagenet64-uvit-l.*4 GiB"):
        fit(config, 1, 4)
    with pytest.raises(InvalidValueError, match="--gpus.*3"):
        fit(config, 3, 24)
    assert fit(preset("digits"), 1, 1) == {}  # of no concern
