"""A run small enough that a test can train it many times, as a config and as a command."""

import dataclasses

from scalelong.runs.config import override
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


def tiny_config(name="digits", scaling=None, **settings):
    config = override(preset(name), tiny_settings(**settings))
    return config if scaling is None else dataclasses.replace(config, scaling=scaling)


def tiny_settings(**settings):
    """TINY with `train__steps=3` and the like instead."""
    return {**TINY, **{key.replace("__", "."): value for key, value in settings.items()}}
