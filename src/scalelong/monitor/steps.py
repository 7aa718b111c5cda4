"""Steps of loops without `with watch.step(…)`: libraries that call hooks, and scripts that are left as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from scalelong.monitor.monitor import StabilityMonitor


class Steps:
    """Begin, end and abandon a recorded step. With accumulated gradients the first of several begins counts."""

    def __init__(self, watch: StabilityMonitor) -> None:
        self.watch = watch
        self._block: AbstractContextManager[None] | None = None

    @property
    def begun(self) -> bool:
        return self._block is not None

    def begin(self, step: int) -> None:
        """Before the forward pass."""
        if self._block is None:
            self._block = self.watch.step(step)
            self._block.__enter__()

    def end(self) -> None:
        """After the backward pass, before the optimizer."""
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)

    def abandon(self, error: BaseException | None = None) -> None:
        """Take the hooks off a step that will not end."""
        block, self._block = self._block, None
        if block is not None:
            error = error or RuntimeError("training ended within a step")
            try:
                block.__exit__(type(error), error, error.__traceback__)
            except BaseException as raised:
                if raised is not error:
                    raise


class AttachedSteps:
    """A pre-hook of the network that begins a step, and one of the optimizer that ends it."""

    def __init__(self, watch: StabilityMonitor, optimizer: torch.optim.Optimizer, first: int) -> None:
        self.steps: Steps | None = Steps(watch)
        self.next = first
        self.handles = [
            watch.root.register_forward_pre_hook(self, with_kwargs=True, prepend=True),
            optimizer.register_step_pre_hook(self.end),
        ]

    def __call__(self, net: Any, args: Any, kwargs: Any) -> None:
        steps = self.steps
        if steps is None or not net.training or not torch.is_grad_enabled() or steps.begun:
            return
        steps.begin(self.next)
        recorder = steps.watch._hooks.recorder
        if recorder is not None:  # the hook that records the call was registered too late for this call
            recorder.record_call(args, kwargs)

    def end(self, *_: Any) -> None:
        if self.steps is not None and self.steps.begun:
            self.steps.end()
            self.next += 1

    def detach(self) -> None:
        if self.steps is not None:
            self.steps.abandon()
        for handle in self.handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> AttachedSteps:
        """A copy of the network, such as an EMA, is not recorded."""
        copied = memo[id(self)] = object.__new__(AttachedSteps)
        copied.steps, copied.handles, copied.next = None, [], 0
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"steps": None, "handles": [], "next": 0}
