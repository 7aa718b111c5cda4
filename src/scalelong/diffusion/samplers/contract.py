"""The one contract of all samplers: x_0 = sampler(eps_fn, x_T, process, steps, noise, callback)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scalelong.errors import ScaleLongError
from scalelong.process import Process

EpsFn = Callable[[Tensor, Tensor], Tensor]
"""ε̂(x, t): x (B, …), t (B,) in the process's own time → (B, …)."""

NoiseFn = Callable[[int], Tensor]
"""The k-th draw of N(0, I) for this batch, (B, …): a function of k and of the images, never of a stream."""


@dataclass(frozen=True)
class State:
    """Where a sampler stands before its update number `index`: x at time t, and the noise predicted there."""

    index: int
    t: float
    x: Tensor
    eps: Tensor


Callback = Callable[[State], None]


class SampleFunction(Protocol):
    def __call__(
        self, eps_fn: EpsFn, x_T: Tensor, process: Process, steps: int, noise: NoiseFn, callback: Callback | None
    ) -> Tensor: ...


@dataclass(frozen=True)
class Sampler:
    """A sampler by name, with what must be known about it before it runs."""

    name: str
    summary: str
    function: SampleFunction
    default_steps: int
    stochastic: bool  # uses `noise`; the others are functions of x_T alone
    continuous_only: bool = False  # needs β(t) at every t
    max_steps: int | None = None

    def __call__(
        self,
        eps_fn: EpsFn,
        x_T: Tensor,
        process: Process,
        steps: int | None = None,
        noise: NoiseFn | None = None,
        callback: Callback | None = None,
    ) -> Tensor:
        """From x_T ~ N(0, I), (B, …), to the image. `noise` is needed where `stochastic`."""
        steps = self.default_steps if steps is None else steps
        self.check(process, steps)
        if self.stochastic and noise is None:
            raise ScaleLongError(f"sampler {self.name!r} is stochastic and needs noise: a function k → (B, …)")
        return self.function(eps_fn, x_T, process, steps, noise or _no_noise, callback)

    def supports(self, process: Process) -> bool:
        return process.continuous or not self.continuous_only

    def check(self, process: Process, steps: int) -> None:
        """Raise where this sampler cannot run this process in so many steps."""
        if not self.supports(process):
            raise ScaleLongError(
                f"sampler {self.name!r} needs a process in continuous time ('vp'), got {process.name!r}; "
                "'dpm-solver-fast', 'ddpm', 'ddim' and 'dpm-solver++' sample every process"
            )
        if steps < 1 or (self.max_steps is not None and steps > self.max_steps):
            allowed = "at least 1" if self.max_steps is None else f"in 1 … {self.max_steps}"
            raise ScaleLongError(f"steps of sampler {self.name!r} must be {allowed}, got {steps}")

    def evaluations(self, steps: int | None = None) -> int:
        """Network evaluations for one image. Steps count evaluations in every sampler here, so that budgets compare.

        Classifier-free guidance (g not 0 or 1) doubles the rows of each evaluation, not their number.
        """
        return self.default_steps if steps is None else steps


def times_of(x: Tensor, t: float) -> Tensor:
    """(B,): the time t for every image of x."""
    return torch.full((x.shape[0],), t, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _no_noise(k: int) -> Tensor:
    raise AssertionError("a deterministic sampler asked for noise")
