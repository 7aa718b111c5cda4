"""The training objective: predict the noise that was added."""

from __future__ import annotations

from torch import Tensor

from scalelong.diffusion.network import Network, drop_conditions, make_conditions, predict_noise
from scalelong.process import Process


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
) -> Tensor:
    """L_simple = E‖ε − ε̂(x_t, t)‖² with x_t of Eq. 1 (Eq. 2, as a mean over elements), one value per sample.

    The function draws nothing: t, eps and drop are arguments, so the loss is a deterministic function of them.

    Args:
        x_0, eps: images and noise, (B, …).
        t: times in the process's own unit, (B,).
        y, context: labels (B,) and text tokens (B, L, D).
        drop: boolean mask (B,) of samples whose conditions become null, for classifier-free guidance.
        null_y, null_context: the null label and the tokens of the empty prompt.

    Returns:
        Loss per sample, (B,). Take its mean for training.
    """
    conditions = make_conditions(y, context)
    if drop is not None:
        conditions = drop_conditions(conditions, {"y": null_y, "context": null_context}, drop)
    x_t = process.add_noise(x_0, eps, t)
    predicted = predict_noise(net, process, x_t, t, conditions)
    return (eps - predicted).square().flatten(1).mean(1)
