"""One run of a campaign in its worker: training, sample distances, rounding of the residual stream, its record."""

from __future__ import annotations

import json
import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelong._modules import device_of
from scalelong.errors import RunError
from scalelong.experiments.campaign import FORMAT, Distance
from scalelong.experiments.comparison import POINTS, measure_run, rounded
from scalelong.experiments.rounding import Rounding, register_rounded
from scalelong.files import write_text
from scalelong.runs.config import Config
from scalelong.runs.run import Run

if TYPE_CHECKING:
    from torch import nn

    from scalelong.evaluation.reference import Reference
    from scalelong.runs.logs import Series

LARGEST_FP16 = 65_504
NOISY = ("loss", "grad_norm")  # columns whose stored curve is averaged


def run_planned(job: dict[str, Any]) -> int:
    """Train one run of a plan and write its record. A run that becomes non-finite has a record too: it is a result."""
    from scalelong.training.loop import train
    from scalelong.training.trainer import NonFiniteError

    record = job["record"]
    if record["rounding"] is not None:
        register_rounded()
    config, run = Config.from_dict(job["config"]), Run(job["folder"])
    optimizer = None if record["optimizer"] == "adamw" else partial(_sgd, config.train.lr, record["optimizer"])
    measure = Observed(run, config, None if record["distance"] is None else Distance(**record["distance"]))
    failure = None
    try:
        result = train(config, run.folder, optimizer=optimizer, metrics=measure)
        if not result.finished:
            return 128 + (result.signal or 0)
    except NonFiniteError as error:
        failure = str(error)
    if failure is None and run.step != config.train.steps:
        raise RunError(
            f"{run.folder} has {run.step} steps, the plan asks for {config.train.steps}; move it away to train it again"
        )
    values = {} if failure else measure.final()
    if os.environ.get("RANK", "0") != "0":
        return 0
    made = make_record(run, record, values, failure) | {"images": measure.images}
    write_text(record["path"], json.dumps(made, ensure_ascii=False) + "\n")
    return 0


def _sgd(lr: float, name: str, net: nn.Module) -> Any:
    from scalelong.experiments.frontier import OPTIMIZERS

    return OPTIMIZERS[name]([p for p in net.parameters() if p.requires_grad], lr=lr)


def load_reference(config: Config, spec: Distance) -> tuple[Any, Reference]:
    """The extractor of a plan's distances, and the statistics of its reference images: cached, or computed now."""
    from scalelong.evaluation.extractors import build_extractor
    from scalelong.evaluation.reference import dataset_reference

    extractor = build_extractor(spec.extractor)
    split, n = spec.reference, spec.reference_n
    return extractor, dataset_reference(config.data.name, split, extractor, n, **config.data.options())


class Observed:
    """What a plan measures of the EMA network during training, as `metrics` of `train`: KID and headroom."""

    every_process = True  # each samples its share

    def __init__(self, run: Run, config: Config, spec: Distance | None) -> None:
        self.run, self.spec = run, spec
        self.images = True  # whether the last samples are nearer to the data than one constant image
        if spec is not None:
            self.extractor, self.reference = load_reference(config, spec)

    def __call__(self, net: nn.Module, step: int) -> dict[str, float]:
        values = {}
        if self.spec is not None and self.spec.every and step % self.spec.every == 0:
            values["kid"] = self._evaluate(self.spec.n, net, step)["kid"]
        hooks = [hook for m in net.modules() for hook in m._forward_hooks.values() if isinstance(hook, Rounding)]
        if hooks and (largest := max(hook.largest for hook in hooks)) > 0:
            earlier = Run(self.run.folder).column("headroom").values  # before a resume; hooks keep nothing
            values["headroom"] = float(min([LARGEST_FP16 / largest, *earlier]))
        return values

    def final(self) -> dict[str, float]:
        """The metrics of samples of the trained network."""
        from scalelong.runs.generate import best_device
        from scalelong.training.parallel import join_processes

        if self.spec is None or not self.spec.final:
            return {}
        device = best_device(join_processes()[0])
        return self._evaluate(self.spec.final, self.run.net.to(device), self.run.step)

    def _evaluate(self, n: int, net: nn.Module, step: int) -> dict[str, float]:
        from scalelong.evaluation.evaluate import stored_metrics
        from scalelong.runs.generate import evaluation_request

        assert self.spec is not None
        if hasattr(self.extractor, "to"):
            self.extractor.to(device_of(net))
        spec = self.spec
        request = evaluation_request(self.run.config, n, sampler=spec.sampler, steps=spec.evaluations, batch_size=100)
        result = self.run.evaluate(request, self.reference, self.extractor, net=net, step=step)
        self.images = all(metric.plausible for metric in stored_metrics(result.to_dict()))
        return {name: float(metric.value) for name, metric in result.values.items() if metric.value is not None}


def make_record(run: Run, header: dict[str, Any], values: dict[str, float], failure: str | None) -> dict[str, Any]:
    """What a finished run leaves: settings, versions, thinned curves, and measures at full resolution."""
    measured, log = measure_run(run, header["arm"], run.config.seed), run.stability
    keys = ("campaign", "arm", "tuning", "command", "optimizer", "rounding", "distance")
    ended = {key: run.column(key).last for key in ("kid", "headroom") if len(run.column(key))}
    columns = {name: run.column(name) for name in (*NOISY, "val_loss", "val_loss_ema", "kid", "headroom")}
    return {
        "format": FORMAT, **{key: header[key] for key in keys}, "seed": run.config.seed, "failure": failure,
        "steps": int(run.logged_step), "config": run.config.to_dict(), "parameters": run.record.get("parameters"),
        "versions": run.record.get("versions"), "written": run.record.get("written"),
        "values": measured.values | ended | values, "alarms": 0 if log is None else len(log.alarms()),
        "curves": {name: _thin(curve, name in NOISY) for name, curve in columns.items() if len(curve)},
        "norms": measured.norms,
    }  # fmt: skip


def _thin(curve: Series, noisy: bool) -> dict[str, Any]:
    """At most POINTS entries: of a noisy curve the means over successive ones, each at its last step, else the last."""
    parts = np.array_split(np.arange(len(curve)), min(POINTS, len(curve)))
    ends = [part[-1] for part in parts]
    values = [_finite_mean(curve.values[part]) for part in parts] if noisy else curve.values[ends].tolist()
    return {"steps": curve.steps[ends].astype(int).tolist(), "values": rounded(values)}


def _finite_mean(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan
