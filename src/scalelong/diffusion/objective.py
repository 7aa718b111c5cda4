"""The objective: the network predicts the noise that was added."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from scalelong.diffusion.network import Network, drop_conditions, given, predict_noise
from scalelong.process import Process


@dataclass(frozen=True)
class SimpleLoss:
    """L_simple of a batch."""

    loss: Tensor  # (), the mean over samples
    per_sample: Tensor  # (B,), the mean over elements


def simple_loss(
    net: Network,
    process: Process,
    x_0: Tensor,
    t: Tensor,
    eps: Tensor,
    *,
    y: Tensor | None = None,
    context: Tensor | None = None,
    drop: Tensor | None = None,
    null_y: int | Tensor | None = None,
    null_context: Tensor | None = None,
) -> SimpleLoss:
    """L_simple = E‖ε − ε̂(x_t, t)‖² with x_t of Eq. 1  (Eq. 2; the mean over elements, not the sum).

    x_0, eps: (B, …); t: (B,) in the process's own time; y: (B,); context: (B, L, D).
    drop: (B,) bool, the samples whose conditions become null (`null_y`, `null_context`), for classifier-free
    guidance. Nothing is drawn here: t, eps and drop are arguments, so the loss is a function of them.
    """
    conditions = given(y=y, context=context)
    if drop is not None:
        conditions = drop_conditions(conditions, {"y": null_y, "context": null_context}, drop)
    x_t = process.add_noise(x_0, eps, t)
    predicted = predict_noise(net, process, x_t, t, conditions)
    per_sample = (eps - predicted).square().flatten(1).mean(1)
    return SimpleLoss(per_sample.mean(), per_sample)
