"""Monitor the stability of a training run. `StabilityMonitor` records, `read_stability` reads its log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy

__getattr__, __all__ = lazy(  # reading a log does not import torch
    __name__,
    {
        "scalelong.monitor.alarms": ("Alarm", "Limits"),
        "scalelong.monitor.log": ("StabilityLog", "read_stability"),
        "scalelong.monitor.monitor": ("StabilityMonitor",),
    },
)

if TYPE_CHECKING:
    from scalelong.monitor.alarms import Alarm as Alarm
    from scalelong.monitor.alarms import Limits as Limits
    from scalelong.monitor.log import StabilityLog as StabilityLog
    from scalelong.monitor.log import read_stability as read_stability
    from scalelong.monitor.monitor import StabilityMonitor as StabilityMonitor
