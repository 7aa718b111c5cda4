"""Steps of loops without `with watch.step(…)`: libraries that call hooks, and scripts that are left as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from scalelong._modules import is_compiled

if TYPE_CHECKING:
    from scalelong.monitor.monitor import StabilityMonitor


class Steps:
    """Begin, end and abandon a recorded step. With accumulated gradients the first of several begins counts.

    Passes in eval mode or without gradients are not recorded: validation may run between accumulated batches.
    """

    def __init__(self, watch: StabilityMonitor) -> None:
        self.watch = watch
        watch._hooks.training_only = True
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
    """Pre-hooks of the network that begin a step, and one of the optimizer that ends it.

    What a step registers at the network itself comes too late for the call that began it. The first of the two
    pre-hooks runs what belongs before the network's own hooks, the last one what belongs after them.
    """

    def __init__(self, watch: StabilityMonitor, optimizer: torch.optim.Optimizer, first: int) -> None:
        self.steps: Steps | None = Steps(watch)
        self.next = first
        self.waiting: list[int] = []  # hooks that `last` runs
        self.paused = False  # while an optimizer evaluates its closure again, which is not another step
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper has no hooks of its own
        self.handles = [
            watch.root.register_forward_pre_hook(self, with_kwargs=True, prepend=True),
            watch.root.register_forward_pre_hook(self.last, with_kwargs=True),
            optimizer.register_step_pre_hook(self.before_step),
        ]

    def __call__(self, net: Any, args: Any, kwargs: Any) -> None:
        steps = self.steps
        if steps is None or torch.compiler.is_compiling():
            return
        if self.paused or steps.begun or not (net.training and torch.is_grad_enabled()):
            return
        known, before = set(net._forward_pre_hooks), list[int]()
        steps.begin(self.next)
        for key in net._forward_pre_hooks:
            if key == self.handles[0].id:
                before, self.waiting = self.waiting, []
            elif key not in known:
                self.waiting.append(key)
        net._forward_pre_hooks.move_to_end(self.handles[0].id, last=False)  # decides first, also for the next calls
        _run(net, before, args, kwargs)

    def last(self, net: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            waiting, self.waiting = self.waiting, []
            _run(net, waiting, args, kwargs)

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the step, or let the closure that the optimizer is about to call end it."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if not callable(closure):
            self.end()
            return None
        evaluated = False

        def recorded() -> Any:
            nonlocal evaluated
            self.paused, evaluated = evaluated, True
            try:
                loss = closure()
                if not self.paused:
                    self.end()
                return loss
            finally:
                self.paused = False

        return (args[0], recorded, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def end(self) -> None:
        steps = self.steps
        if steps is not None and not steps.begun and is_compiled(steps.watch.net):
            steps.begin(self.next)  # compiled code runs no hooks: gradients and the probe are left
        if steps is not None and steps.begun:
            steps.end()
            self.next += 1

    def detach(self) -> None:
        if self.steps is not None:
            self.steps.abandon()
        for handle in self.handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> AttachedSteps:
        """A copy of the network, such as an EMA, is not recorded."""
        copied = memo[id(self)] = object.__new__(AttachedSteps)
        copied.__dict__.update(self.__getstate__())
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"steps": None, "handles": [], "next": 0, "waiting": [], "paused": False}


def _run(net: Any, keys: list[int], args: Any, kwargs: Any) -> None:
    for key in keys:
        hook, with_kwargs = net._forward_pre_hooks[key], key in net._forward_pre_hooks_with_kwargs
        hook(net, args, kwargs) if with_kwargs else hook(net, args)
