"""What a benchmark found: ratios with their spread, their target, and what they are ratios to."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scalelong.bench.timing import Spread


@dataclass(frozen=True)
class Figure:
    """One measured figure. `sense` says on which side of `target` it should lie."""

    section: str
    name: str
    against: str  # what it is a ratio to
    value: Spread
    target: float | None = None
    sense: str = "≥"
    note: str = ""

    @property
    def holds(self) -> bool | None:
        if self.target is None:
            return None
        return self.value.median >= self.target if self.sense == "≥" else self.value.median <= self.target

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


def machine() -> dict[str, Any]:
    """What figures depend on beside the code. No name of the machine."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16_in_hardware": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    }
