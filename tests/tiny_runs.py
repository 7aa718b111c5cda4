"""A run small enough that a test can train it many times, as a config and as a command."""

import dataclasses
import sys

from scalelong.files import json_line_blocks
from scalelong.runs.config import override
from scalelong.runs.run import Run
from scalelong.training.presets import preset

TINY = {
    "model.embed_dim": 16,
    "model.depth": 4,
    "model.num_heads": 2,
    "train.batch_size": 8,
    "train.steps": 6,
    "train.warmup": 2,
    "train.log_every": 1,
    "checkpoint.every": 2,
    "validate.n": 16,
    "sample.n": 0,
    "monitor.every": 0,
}
UVIT = ("model.embed_dim", "model.depth", "model.num_heads")


def read_lines(path):
    """Return the entries of a log without a torn last line."""
    return [entry for rows in json_line_blocks(path) for entry in rows]


def tiny_config(name="digits-uvit", scaling=None, **settings):
    values = tiny_settings(**settings)
    if values.get("model.kind", preset(name).model.kind) != "uvit":
        values = {key: value for key, value in values.items() if key not in UVIT}
    config = override(preset(name), values)
    return config if scaling is None else dataclasses.replace(config, scaling=scaling)


def tiny_settings(**settings):
    """TINY with `train__steps=3` and the like instead."""
    return {**TINY, **{key.replace("__", "."): value for key, value in settings.items()}}


def tiny_command(folder, *options):
    """`scalelong train` of the same run in a process of its own."""
    settings = [f"--set={key}={value}" for key, value in TINY.items() if key != "train.steps"]
    return [sys.executable, "-m", "scalelong", "train", "digits-uvit", "--out", str(folder), *settings, *options]


def losses(folder):
    """(step, loss, gradient norm) of every logged step."""
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in read_lines(Run(folder).metrics_path)]
