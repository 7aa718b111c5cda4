"""NaN in data, weights and gradients: the run stops or leaves the step out, and no checkpoint is spoilt."""

import dataclasses
import math

import pytest
import torch
from fault_runs import as_arguments, check_error, command_line, losses, small_config
from safetensors.torch import load_file

from scalelong.errors import NonFiniteError
from scalelong.training.examples import Examples
from scalelong.training.loop import train
from scalelong.training.trainer import Trainer
from tiny_runs import read_lines

STEPS, AT = 5, 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finite") / "whole"
    train(small_config(train__steps=STEPS), folder, quiet=True)
    return folder


def in_data(monkeypatch, value):
    batch = Examples.batch

    def spoilt(self, step, first, count):
        made = batch(self, step, first, count)
        if step == AT:
            made.x_0[0, 0, 0, 0] = value
        return dataclasses.replace(made)

    monkeypatch.setattr(Examples, "batch", spoilt)


def in_weights(monkeypatch, value):
    step = Trainer.step

    def spoilt(self):
        if self.progress.step + 1 == AT:
            with torch.no_grad():
                self.net.mid_block.mlp.fc1.weight[0, 0] = value
        return step(self)

    monkeypatch.setattr(Trainer, "step", spoilt)


def in_gradients(monkeypatch, value):
    norm = Trainer._clipped_norm

    def spoilt(self):
        if self.progress.step + 1 == AT:
            self.net.mid_block.mlp.fc1.weight.grad[0, 0] = value
        return norm(self)

    monkeypatch.setattr(Trainer, "_clipped_norm", spoilt)


PLACES = {"data": in_data, "weights": in_weights, "gradients": in_gradients}


def check_finite(folder):
    for path in (folder / "checkpoints").glob("*/*.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values()), path


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", PLACES)
def test_the_run_stops_with_an_error_and_resumes_exactly_once_it_is_cured(
    tmp_path, whole, capsys, monkeypatch, note, place, value
):
    folder = tmp_path / "run"
    with monkeypatch.context() as spoiled:
        PLACES[place](spoiled, value)
        code, err = command_line(capsys, *as_arguments(train__steps=STEPS), f"--out={folder}", "-q")
    check_error(code, err, f"not finite at step {AT}", "timesteps in the batch")
    check_finite(folder)
    train(small_config(train__steps=STEPS), folder, quiet=True)
    assert losses(folder) == losses(whole)
    note(
        "NaN or infinity appears",
        f"in {place}",
        1,
        "the run stopped with a diagnosis; without the cause it resumed exactly",
    )


@pytest.mark.parametrize("place", ["data", "gradients"])
def test_the_step_can_be_left_out(tmp_path, whole, monkeypatch, place):
    folder = tmp_path / "run"
    PLACES[place](monkeypatch, math.nan)
    train(small_config(train__steps=STEPS, train__nonfinite="skip"), folder, quiet=True)
    check_finite(folder)
    assert [entry["step"] for entry in read_lines(folder / "metrics.jsonl") if entry.get("skipped")] == [AT]
    assert losses(folder)[: AT - 1] == losses(whole)[: AT - 1]
    assert math.isfinite(losses(folder)[-1][1])


def test_spoilt_weights_never_take_the_place_of_a_good_checkpoint(tmp_path, monkeypatch, note):
    """Leaving steps out cannot help where the weights themselves are gone: that is an error in either mode."""
    folder = tmp_path / "run"
    in_weights(monkeypatch, math.nan)
    with pytest.raises(NonFiniteError, match=r"mid_block\.mlp\.fc1\.weight is not finite.*no checkpoint was written"):
        train(small_config(train__steps=STEPS, train__nonfinite="skip"), folder, quiet=True)
    check_finite(folder)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]
    note(
        "NaN or infinity appears",
        "in weights, with train.nonfinite=skip",
        1,
        "no checkpoint was written; the previous one is kept",
    )
