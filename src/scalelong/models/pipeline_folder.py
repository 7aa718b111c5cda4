"""The files that make a folder a diffusers pipeline: model_index.json, scheduler_config.json and pipeline.py.

Written without importing diffusers' pipelines, because training writes them with every checkpoint.
"""

import json
from pathlib import Path
from typing import Any

from scalelong.diffusion.schedulers import scheduler_settings
from scalelong.objective import Objective
from scalelong.process import get_process
from scalelong.version import __version__

INDEX, SCHEDULER, CODE = "model_index.json", "scheduler_config.json", "pipeline.py"
SCALED_UNET = ("scalelong.models.pipeline", "ScaledUNet")

Component = tuple[str, str]  # module and class


def pipeline_config(objective: Objective) -> dict[str, Any]:
    """The arguments of `ScaleLongPipeline` that record an objective."""
    process = objective.process
    spec = process.name if process == get_process(process.name) else process.to_dict()
    return {"process": spec, "objective": objective.to_dict()}


def component(net: Any) -> Component:
    """Return how model_index.json refers to a network: one of diffusers loads together with its scaling."""
    kind = type(getattr(net, "_orig_mod", net))  # inside torch.compile's wrapper
    return SCALED_UNET if kind.__module__.startswith("diffusers.") else (kind.__module__, kind.__name__)


def write_index(folder: Path, net: Any, objective: Objective, settings: dict[str, Any], **others: Component) -> None:
    """Make a folder with a saved network a pipeline: `ScaleLongPipeline.from_pretrained(folder)` opens it."""
    index = {
        "_class_name": "ScaleLongPipeline",
        "_scalelong_version": __version__,
        **pipeline_config(objective),
        **settings,
        "unet": component(net),
        "scheduler": ("diffusers", "DPMSolverMultistepScheduler"),
        **others,
    }
    scheduler = {"_class_name": "DPMSolverMultistepScheduler", **scheduler_settings(objective.process)}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / SCHEDULER).write_text(json.dumps(scheduler) + "\n", encoding="utf-8")
    write_code(folder, index)


def write_code(folder: Path, index: dict[str, Any]) -> None:
    """Write pipeline.py, which diffusers runs with `custom_pipeline`: it imports the classes that the index names."""
    modules = sorted({"scalelong.models.uvit", *own_modules(index)} - {SCALED_UNET[0]})
    lines = [
        '"""DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)"""',
        "",
        *(f"import {module}  # noqa: F401" for module in modules),
        "from scalelong.models.pipeline import ScaleLongPipeline  # noqa: F401",
    ]
    (folder / CODE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def own_modules(index: dict[str, Any]) -> list[str]:
    """Return the modules of this package whose classes an index names."""
    pairs = [value for value in index.values() if isinstance(value, (list, tuple)) and len(value) == 2]
    return [str(module) for module, _ in pairs if str(module).startswith("scalelong.")]
