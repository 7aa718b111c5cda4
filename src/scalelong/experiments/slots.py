"""Where jobs run: one at a time on each GPU, or side by side on the cores with the threads shared out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from scalelong.errors import ScaleLongError

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Slot:
    """A place for one job at a time, and what its environment gets."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)


def make_slots(
    jobs: int, asked: int | None = None, *, gpus: list[str] | None = None, cores: int | None = None
) -> list[Slot]:
    """Slots for `jobs` runs; `asked` is --jobs. GPUs and cores are those of this machine unless given.

    Threads are shared out, never more than there are cores: two torch processes of two threads each on two cores
    slow each other down up to fifty-fold, for their threads spin while they wait.
    """
    if asked is not None and asked < 1:
        raise ScaleLongError(f"--jobs is at least 1, not {asked}")
    gpus = visible_gpus() if gpus is None else gpus
    cores = usable_cores() if cores is None else cores
    count = max(1, min(jobs, asked or len(gpus) or cores))
    threads = str(_at_most(max(1, cores // count)))
    slots = []
    for k in range(count):
        environment = dict.fromkeys(THREADS, threads)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[k % len(gpus)]
        slots.append(Slot(f"gpu {gpus[k % len(gpus)]}" if gpus else f"{threads} thread(s)", environment))
    return slots


def _at_most(threads: int) -> int:
    """No more threads than the user's own OMP_NUM_THREADS allows."""
    own = os.environ.get("OMP_NUM_THREADS", "")
    return min(threads, int(own)) if own.isdecimal() and int(own) else threads


def usable_cores() -> int:
    """Cores that this process may use, which in a container may be fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """CUDA's names of the GPUs that this process may use: indices or UUIDs, as CUDA_VISIBLE_DEVICES takes them."""
    import torch

    count = torch.cuda.device_count()  # asks the driver and takes no memory on a GPU
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(k) for k in range(count)]
