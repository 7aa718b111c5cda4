"""One run of a comparison in its own processes: `python -m scalelong.experiments.worker`, the job in $SCALELONG_JOB.

torchrun starts it once per GPU. Standard input stays open while the comparison lives. When it closes (the comparison
was killed, for example), the run stops as on SIGTERM: it writes a checkpoint, so nothing keeps training unnoticed and
the same command resumes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import MissingExtraError, ScaleLongError
from scalelong.experiments.plan import DistanceSpec, Job, trained_steps
from scalelong.models.imports import import_networks
from scalelong.runs.config import Config
from scalelong.runs.run import Run

if TYPE_CHECKING:
    from scalelong.runs.generate import Request

JOB = "SCALELONG_JOB"  # JSON, in the environment: every process of a run reads it
LOCK_TIMEOUT = 30.0  # seconds to wait for an earlier process of the same run to write its last checkpoint
MEASURE_TIMEOUT = 600.0  # the same where it may be in the middle of a sample distance


def main() -> None:
    threading.Thread(target=_stop_when_closed, args=(sys.stdin.fileno(),), daemon=True).start()
    try:
        raise SystemExit(run_job(json.loads(os.environ[JOB])))
    except (ScaleLongError, MissingExtraError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def run_job(job: dict[str, Any]) -> int:
    """Train and measure the distance. Returns the exit code."""
    run = Run(job["folder"])
    if job.get("record") is not None:
        from scalelong.experiments.campaign_run import run_planned

        with run.locked(timeout=MEASURE_TIMEOUT):
            pass
        return run_planned(job)
    config = Config.from_dict(job["config"])
    if config.data.text is None and config.data.vae is None:
        import_networks()
    from scalelong.training.loop import train

    with run.locked(timeout=LOCK_TIMEOUT):
        pass
    result = train(config, run.folder)
    if not result.finished:
        return 128 + (result.signal or 0)
    if job["distance"] is not None:
        spec = DistanceSpec(**job["distance"])
        if not has_distance(run, spec, config):
            print(f"Fréchet distance: {spec.n} samples", file=sys.stderr, flush=True)
            measure_distance(run, spec, config)
    return 0


def is_finished(job: Job) -> bool:
    """Whether the folder already has everything that the job makes, so that no process needs to start."""
    if job.record is not None:
        return Path(job.record["path"]).exists()
    run, steps = Run(job.folder), job.config.train.steps
    return trained_steps(run) == steps and (job.distance is None or has_distance(run, job.distance, job.config))


def has_distance(run: Run, spec: DistanceSpec, config: Config) -> bool:
    """Whether RUN/distance.json is what `measure_distance` would write: a resumed run may change how it samples."""
    card = run.evaluations.get("compare", {}).get("card", {})
    if not card:
        return False

    from scalelong.diffusion.samplers import get_sampler
    from scalelong.evaluation.extractors import NAMES

    request, generation = _request(spec, config), card.get("generation") or {}
    wanted = {
        "step": config.train.steps, "sampler": request.sampler, "guidance": request.guidance,
        "evaluations": get_sampler(request.sampler).evaluations(request.steps),
        "clip_denoised": request.clips(config),
    }  # fmt: skip
    return bool(
        str(card.get("extractor", "")).startswith(NAMES[spec.extractor or config.evaluate.extractor])
        and card.get("n") == spec.n
        and all(generation.get(key) == value for key, value in wanted.items())
    )


def measure_distance(run: Run, spec: DistanceSpec, config: Config) -> None:
    """Compare samples of the run's EMA network with its training data and write RUN/distance.json."""
    from scalelong.evaluation import build_extractor
    from scalelong.runs.generate import best_device
    from scalelong.training.parallel import join_processes

    device = best_device(join_processes()[0])
    extractor: Any = build_extractor(spec.extractor or config.evaluate.extractor)
    run.evaluate(_request(spec, config), extractor=extractor.to(device), net=run.net.to(device), save_as="compare")


def _request(spec: DistanceSpec, config: Config) -> Request:
    from scalelong.runs.generate import evaluation_request

    return evaluation_request(config, spec.n, steps=spec.evaluations or config.sample.steps)


def _stop_when_closed(source: int) -> None:
    # Without a buffer: Python cannot shut down while a thread waits inside a buffered read.
    while os.read(source, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
