"""Learning-rate schedules: the factor on `train.lr` is a function of the update alone, so resuming needs no state."""

import math
from collections.abc import Callable

from scalelong.runs.config import TrainConfig

# How far the rate has come down, from 0 to 1, after a share of the decay. "warmup-stable-decay" (Hägele et al., 2024)
# decays over the last `train.decay_share` of the steps, the others from the end of the warm-up.
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 0.0,
    "cosine": lambda share: 0.5 * (1.0 - math.cos(math.pi * share)),
    "linear": lambda share: share,
    "warmup-stable-decay": lambda share: share,
}


def lr_factor(train: TrainConfig, update: int) -> float:
    """Return lr / train.lr of update `update` (from 0): a linear warm-up to 1, then the decay to `min_lr_ratio`."""
    if update < train.warmup:
        return (update + 1) / train.warmup
    start = train.warmup
    if train.schedule == "warmup-stable-decay":
        start = max(start, train.steps - round(train.decay_share * train.steps))
    share = min(1.0, max(0.0, (update - start) / max(1, train.steps - start)))
    return 1.0 - (1.0 - train.min_lr_ratio) * DECAYS[train.schedule](share)


def same_past(stored: TrainConfig, new: TrainConfig, updates: int) -> bool:
    """Whether the first `updates` updates have equal learning rates, so that a run may continue with `new`'s length."""
    if stored.steps == new.steps or new.schedule == "constant":
        return True
    return all(lr_factor(stored, update) == lr_factor(new, update) for update in range(updates))
