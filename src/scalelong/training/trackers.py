"""TensorBoard and Weights & Biases through accelerate: values, sample grids, the run's name, one W&B run per folder."""

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from scalelong.errors import require
from scalelong.files import read_json, write_text
from scalelong.runs.config import flatten
from scalelong.runs.run import Run
from scalelong.training.trainer import Trainer

FILE = "wandb.json"  # in the run folder: the id of its W&B run, which a resumed run continues


def start_tracker(trainer: Trainer, run: Run, tracker: str) -> None:
    """Log to TensorBoard files in the run folder, or to a W&B run in project `scalelong`."""
    require(tracker, extra=tracker, purpose=f"tracker={tracker}")
    if not trainer.accelerator.is_main_process:  # another process would write another id to wandb.json
        return
    from accelerate.tracking import filter_trackers

    accelerator = trainer.accelerator
    accelerator.project_configuration.set_directories(str(run.folder))
    accelerator.log_with = filter_trackers(tracker, accelerator.logging_dir)
    settings = flatten(trainer.config.to_dict())
    simple = {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in settings.items()}
    if tracker == "tensorboard":
        # A resumed run hides what an interrupted one logged after its last checkpoint.
        options: dict[str, Any] = {"purge_step": trainer.progress.step + 1} if trainer.progress.step else {}
        accelerator.init_trackers(run.name, config=simple, init_kwargs={"tensorboard": options})
        return
    options = {"name": run.name, "id": _wandb_id(run), "resume": "allow", "dir": str(run.folder)}
    accelerator.init_trackers("scalelong", config=simple, init_kwargs={"wandb": options})


def _wandb_id(run: Run) -> str:
    stored = (read_json(run.folder / FILE) or {}).get("id")
    if not isinstance(stored, str):
        stored = uuid.uuid4().hex[:12]
        write_text(run.folder / FILE, json.dumps({"id": stored}) + "\n")
    return stored


def log_grid(trainer: Trainer, path: Path, step: int) -> None:
    """Send a sample grid to the trackers that run."""
    from PIL import Image

    with Image.open(path) as picture:
        image = np.asarray(picture.convert("RGB"))[None]  # (1, H, W, 3)
    for tracker in trainer.accelerator.trackers:
        layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        tracker.log_images({"samples": image}, step=step, **layout)
