"""One run of a comparison in its own processes: `python -m scalelong.experiments.worker`, the job in $SCALELONG_JOB.

torchrun starts it once per GPU. Standard input stays open while the comparison lives. When it closes (the comparison
was killed, for example), the run stops as on SIGTERM: it writes a checkpoint, so nothing keeps training unnoticed and
the same command resumes.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from scalelong.errors import MissingExtraError, ScaleLongError
from scalelong.experiments.plan import DistanceSpec, Job, trained_steps
from scalelong.models.imports import import_networks
from scalelong.runs.config import Config
from scalelong.runs.run import Run

JOB = "SCALELONG_JOB"  # JSON, in the environment: every process of a run reads it
LOCK_TIMEOUT = 30.0  # seconds to wait for an earlier process of the same run to write its last checkpoint


def main() -> None:
    threading.Thread(target=_stop_when_closed, args=(sys.stdin.fileno(),), daemon=True).start()
    try:
        raise SystemExit(run_job(json.loads(os.environ[JOB])))
    except (ScaleLongError, MissingExtraError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def run_job(job: dict[str, Any]) -> int:
    """Train and measure the distance. Returns the exit code."""
    if job.get("record") is not None:
        from scalelong.experiments.campaign_run import run_planned

        return run_planned(job)
    config, run = Config.from_dict(job["config"]), Run(job["folder"])
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
        if not has_distance(run, spec, config.train.steps):
            print(f"Fréchet distance: {spec.n} samples", file=sys.stderr, flush=True)
            measure_distance(run, spec)
    return 0


def is_finished(job: Job) -> bool:
    """Whether the folder already has everything that the job makes, so that no process needs to start."""
    if job.record is not None:
        return Path(job.record["path"]).exists()
    run, steps = Run(job.folder), job.config.train.steps
    return trained_steps(run) == steps and (job.distance is None or has_distance(run, job.distance, steps))


def has_distance(run: Run, spec: DistanceSpec, step: int) -> bool:
    """Whether RUN/distance.json belongs to this step and this spec."""
    from scalelong.evaluation.extractors import NAMES

    card = run.evaluations.get("compare", {}).get("card", {})
    generation = card.get("generation") or {}
    return bool(
        str(card.get("extractor", "")).startswith(NAMES[spec.extractor or run.config.evaluate.extractor])
        and card.get("n") == spec.n
        and generation.get("step") == step
        and spec.evaluations in (None, generation.get("evaluations"))
    )


def measure_distance(run: Run, spec: DistanceSpec) -> None:
    """Compare samples of the run's EMA network with its training data and write RUN/distance.json."""
    from scalelong.evaluation import build_extractor
    from scalelong.runs.generate import best_device, evaluation_request
    from scalelong.training.parallel import join_processes

    device = best_device(join_processes()[0])
    request = evaluation_request(run.config, spec.n, steps=spec.evaluations or run.config.sample.steps)
    extractor: Any = build_extractor(spec.extractor or run.config.evaluate.extractor)
    run.evaluate(request, extractor=extractor.to(device), net=run.net.to(device), save_as="compare")


def _stop_when_closed(source: int) -> None:
    # Without a buffer: Python cannot shut down while a thread waits inside a buffered read.
    while os.read(source, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
