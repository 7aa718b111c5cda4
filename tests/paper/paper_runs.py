"""A study small enough to train in a test: five scalings, two seeds, twelve steps of a tiny U-ViT on digits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from scalelong.experiments.plan import DistanceSpec, plan
from scalelong.experiments.worker import run_job
from scalelong.paper.studies import CS, LS, NONE, REVERSE, UNIFORM
from scalelong.paper.study import Study

TINY = Study(
    "tiny",
    "digits-uvit",
    (NONE, UNIFORM, CS, REVERSE, LS),
    steps=12,
    settings=(
        "model.embed_dim=16", "model.depth=4", "model.num_heads=2", "train.batch_size=4", "train.clip=none",
        "train.warmup=2", "validate.every=4", "validate.n=16", "sample.n=0", "sample.every=0", "monitor.every=1",
        "train.log_every=1", "checkpoint.every=4", "checkpoint.keep=3",
    ),
    seeds=(0, 1),
    distance=DistanceSpec("pixels", 72, 3),
    label="tiny",
    seconds=1,
)  # fmt: skip


def train_tiny(study: Study, out: Path) -> None:
    """In this process: a comparison's workers would each start an interpreter."""
    for job in plan(study.variants(), study.seeds, out / study.name, study.distance):
        spec = None if job.distance is None else asdict(job.distance)
        assert run_job({"config": job.config.to_dict(), "folder": str(job.folder), "distance": spec}) == 0
