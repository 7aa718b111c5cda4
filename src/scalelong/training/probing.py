"""Linear probe of a run: its train and test splits, its objective, and no condition that would tell the class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalelong.errors import DataError, invalid
from scalelong.files import cache_dir
from scalelong.representation import Labelled, LinearProbe, linear_probe
from scalelong.representation.features import choose_blocks
from scalelong.representation.probe import check_times
from scalelong.runs.config import Config, ProbeConfig
from scalelong.runs.run import Run, build_network
from scalelong.training.examples import Examples

FILE = "probe.json"


class ProbedSplits:
    """Labelled images of the splits that a run trains and validates on, at most `n` (or n_test) of each."""

    def __init__(
        self, config: Config, train: Examples, test: Examples | None, n: int | None = None, n_test: int | None = None
    ) -> None:
        if test is None:
            hint = "set holdout (--holdout 0.05) to hold images out"
            raise DataError(f"a probe needs a test split, but {config.data.name} has none; {hint}")
        self.config, self.objective, self.notes = config, train.objective, list[str]()
        self.train, self.test = _labelled(train, n), _labelled(test, n if n_test is None else n_test)
        self.conditions: dict[str, Any] = {}
        if config.data.classes:
            null = train.facts().null_y
            self.conditions["y"] = 0 if null is None else null
            if null is None:
                self.notes.append("the network is conditioned on classes and has no null label: all images get class 0")
        if train.tokens is not None:
            self.conditions["context"] = torch.as_tensor(train.tokens.empty)

    def check(self, net: nn.Module, probe: ProbeConfig) -> None:
        """Validate the settings of a probe before training starts."""
        choose_blocks(net, layer_names(probe.layers))
        check_times(probe.t, self.objective)

    def measure(self, net: nn.Module, probe: ProbeConfig, **options: Any) -> LinearProbe:
        """Probe a network during training."""
        return linear_probe(
            net, self.train, self.test, layers=layer_names(probe.layers), t=probe.t, objective=self.objective,
            conditions=self.conditions, notes=self.notes, **{"pixels": False, **options},
        )  # fmt: skip


def probe_run(
    run: Run,
    *,
    layers: str = "all",
    t: Sequence[float] | None = None,
    n: int | None = None,
    n_test: int | None = None,
    step: int | str | None = None,
    baselines: bool = True,
    fit: str = "lbfgs",
    seed: int = 0,
    batch_size: int = 256,
    cache: bool = True,
    device: torch.device | str = "cpu",
) -> LinearProbe:
    """Probe the EMA network of a run, beside raw pixels and the network before training.

    Args:
        layers: Blocks, separated by commas, or "all".
        t: Times of the noise in the process's own unit.
        n, n_test: Images of the training and the test split; None: all.
        step: As in `Run.network_at`; None: the last.
        baselines: Whether to probe pixels and the untrained network too.
        cache: Whether to keep features in the package's cache folder.
    """
    config = run.config
    for name, value in (("n", n), ("n_test", n_test), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise invalid(name, "an integer >= 1", value)
    splits = ProbedSplits(config, Examples(config, config.data.split), _test_split(config), n, n_test)
    net = (run.net if step is None else run.network_at(step)[0]).to(device)
    first = build_network(config, run.facts.shapes).eval().to(device) if baselines else None
    return splits.measure(
        net, ProbeConfig(layers=layers, t=None if t is None else tuple(t)), untrained=first, pixels=baselines, fit=fit,
        seed=seed, batch_size=batch_size, cache=cache_folder() if cache else None,
    )  # fmt: skip


def cache_folder() -> Path:
    return cache_dir() / "probe"


def layer_names(text: str) -> str | list[str]:
    """Return "all" or the words of a comma-separated list."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    return "all" if words == ["all"] else words


def _test_split(config: Config) -> Examples | None:
    try:
        return Examples(config, config.data.validation)
    except DataError as error:
        raise DataError(f"a probe needs a test split (data.validation={config.data.validation!r}): {error}") from error


def _labelled(examples: Examples, n: int | None) -> Labelled:
    images = examples.images
    if images.labels is None:
        raise DataError(f"a probe needs classes, but {images.name} has none; use data with labels")
    count = len(examples) if n is None else min(n, len(examples))
    rows = torch.arange(count) * len(examples) // count  # spread, because files may be sorted by class
    source = examples.source  # of latents, the fingerprint covers images, the autoencoder's weights and the scale
    return Labelled(lambda indices: source.batch(rows[indices]), images.label_batch(rows), source.fingerprint)
