"""The stability frontier: the largest learning rate at which a network does not diverge, found by bisection.

A run *diverges* if its loss or a weight stops being finite, or if its mean loss over the last tenth of the steps is
above that of the untrained network on the same batches. Adam hides the size of gradients, which the paper's theorems
are about; plain SGD does not, so its frontier shows what a scaling does to them. A search takes for granted that what
diverges at one learning rate diverges at every larger one. That holds for SGD; with Adam, a larger one may train again.
"""

import inspect
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.errors import InvalidValueError, RunError, invalid, require, unknown
from scalelong.experiments.statistics import mean_interval

MakeNet = Callable[..., nn.Module]  # seed, or nothing -> an untrained network
MakeBatch = Callable[..., Sequence[Any]]  # (seed, step), step or nothing -> the arguments of the call, then the target
Loss = Callable[[Any, Any], Tensor]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
}
START = {"sgd": 0.01, "momentum": 0.001, "adamw": 0.001}  # where the search begins; it moves by factors of 4
EXPAND = 4.0
RANGE = (1e-9, 1e6)
TOLERANCE = 1.1
AFRESH = "make_net must build a new network at every call, and make_batch the same batch for the same seed and step"


@dataclass(frozen=True)
class Trial:
    """One short run at one learning rate. `initial` and `final` are mean losses over the same last batches.

    `final` is None if the run became non-finite, after `steps` steps.
    """

    lr: float
    seed: int
    initial: float
    final: float | None
    steps: int

    @property
    def diverged(self) -> bool:
        return self.final is None or not self.final <= self.initial


@dataclass(frozen=True)
class StableLearningRate:
    """The largest stable learning rate: geometric mean over seeds, with its 95 % t interval.

    lr         geometric mean over seeds of the largest learning rate that did not diverge
    low, high  the interval; None with one seed
    brackets   seed → (largest that did not diverge, smallest that did)
    trials     every run of the search
    """

    lr: float
    low: float | None
    high: float | None
    brackets: dict[int, tuple[float, float]]
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.3g}, {self.high:.3g}]"
        return f"{self.lr:.3g}{interval}"


def mse(output: Any, target: Tensor) -> Tensor:
    """Mean squared error of a tensor, or of the `.sample` of a diffusers output."""
    output = getattr(output, "sample", output)
    if output.shape != target.shape:
        raise invalid("the target of a batch", f"the output's shape {tuple(output.shape)}", tuple(target.shape))
    return (output - target).square().mean()


def run_trial(
    make_net: MakeNet, make_batch: MakeBatch, lr: float, *,
    optimizer: str = "sgd", steps: int = 300, seed: int = 0, loss: Loss = mse,
) -> Trial:  # fmt: skip
    """Train a new network for `steps` steps at a constant learning rate.

    Random numbers depend on (seed, step) alone, dropout's included; the global random state is left as it was.
    """
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        torch.manual_seed(seed)
        net = _call(make_net, seed)
        if not isinstance(net, nn.Module):
            raise invalid("the result of make_net", "a torch.nn.Module", type(net).__name__)
        trained = [p for p in net.parameters() if p.requires_grad]
        if not trained:
            raise InvalidValueError("the network of make_net has no parameter that requires a gradient")
        stepper, window = _optimizer(optimizer)(trained, lr=lr), max(1, steps // 10)

        def batch_loss(step: int) -> Tensor:
            torch.manual_seed((1_000_003 * seed + step + 1) % 2**32)  # the CPU generator keeps 32 bits
            batch = _call(make_batch, seed, step)
            if not isinstance(batch, tuple | list):
                kind = type(batch).__name__
                raise invalid("the result of make_batch", "a tuple: the call's arguments, then the target", kind)
            *inputs, target = batch
            value = loss(net(*inputs), target)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise invalid("the result of loss", "a tensor with one element", getattr(value, "shape", value))
            return value

        with torch.no_grad():
            initial = _mean([batch_loss(step).item() for step in range(steps - window, steps)])
        if not math.isfinite(initial):
            raise InvalidValueError(f"the untrained network's loss is {initial}; {AFRESH}")
        last: list[float] = []
        for step in range(steps):
            try:
                value = batch_loss(step)
            except Exception:
                if step and (last[-1] > initial or not _is_finite(net)):  # some losses refuse what is not finite
                    return Trial(lr, seed, initial, None, step)
                raise
            if not math.isfinite(value.item()):
                return Trial(lr, seed, initial, None, step)
            last.append(value.item())
            stepper.zero_grad()
            value.backward()
            stepper.step()
        final = _mean(last[-window:]) if _is_finite(net) else math.inf
    return Trial(lr, seed, initial, final if math.isfinite(final) else None, steps)


def _call(make: Callable[..., Any], *values: int) -> Any:
    """Call `make` with as many of the values, from the last, as it takes: (seed, step), (step) or none.

    An argument with a default counts only if it is called `seed` or `step`: `make_net` may be a network's class.
    """
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # some functions of C have no signature
        return make(*values)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return make(*values)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = sum(p.default is p.empty or p.name in ("seed", "step") for p in positional)
    return make(*values[max(0, len(values) - taken) :])


def _is_finite(net: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in net.parameters())


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.inf


def bisect(run: Callable[[float], Trial], start: float, tolerance: float = TOLERANCE) -> Iterator[Trial]:
    """Yield trials until the largest stable learning rate and the smallest that diverges are `tolerance` apart."""
    trial = run(start)
    yield trial
    factor = 1 / EXPAND if trial.diverged else EXPAND
    first, lr = trial.diverged, start
    while trial.diverged == first:
        if not RANGE[0] < lr * factor < RANGE[1]:
            raise InvalidValueError(
                f"the network {'diverges' if first else 'trains'} at every learning rate from {start:g} to {lr:g}; "
                "the frontier is outside the range of the search"
            )
        lr *= factor
        trial = run(lr)
        yield trial
    low, high = (lr, lr * EXPAND) if first else (lr / EXPAND, lr)
    while high / low > tolerance:
        trial = run(math.sqrt(low * high))
        yield trial
        low, high = (low, trial.lr) if trial.diverged else (trial.lr, high)


def stable_learning_rate(
    make_net: MakeNet,
    make_batch: MakeBatch,
    *,
    optimizer: str = "sgd",
    steps: int = 300,
    seeds: Iterable[int] = range(3),
    start: float | None = None,
    tolerance: float = TOLERANCE,
    loss: Loss = mse,
    jobs: int = 1,
) -> StableLearningRate:
    """Find the largest learning rate at which a network does not diverge, by bisection over short runs.

    What diverges at one learning rate is taken to diverge at every larger one; with Adam that need not hold.

    Args:
        make_net: Builds an untrained network: `make_net()` or `make_net(seed)`. Scale it here:
            `lambda: apply(MyUNet(), scaling)`. torch's generator is seeded with `seed` before the call.
        make_batch: Returns the arguments of the network's call and, last, the target: `make_batch(seed, step)`,
            `make_batch(step)` or `make_batch()`. The same seed and step must give the same batch, so that all learning
            rates train on the same data. torch's generator is seeded with both before the call.
        optimizer: "sgd", "momentum" (SGD with momentum 0.9) or "adamw".
        steps: Length of a run. A loss above that of the untrained network after it counts as diverged.
        seeds: One search for each; the interval is over seeds.
        start: Learning rate of the first run.
        tolerance: Ratio between the learning rates that trained and diverged at which a search ends.
        loss: (output, target) → a scalar; mean squared error by default.
        jobs: Seeds in parallel, in processes; the functions must then be importable (no lambdas).

    Returns:
        The learning rate `.lr` with its interval `.low` to `.high`, and every run in `.trials`.

    Examples:
        >>> def make_batch(seed, step):
        ...     x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * seed + step))
        ...     return x, x
        >>> def largest(scaling):
        ...     make_net = lambda seed: scalelong.StackedUNet(32, 6, scaling=scaling, init="norm-preserving", seed=seed)
        ...     return scalelong.stable_learning_rate(make_net, make_batch, steps=20, seeds=range(1)).lr
        >>> largest(scalelong.ConstantScaling(0.5)) > largest(scalelong.NoScaling())
        True
    """
    if type(steps) is not int or steps < 1:
        raise invalid("steps", "an integer >= 1", steps)
    if not tolerance > 1:
        raise invalid("tolerance", "a number > 1", tolerance)
    _optimizer(optimizer)
    start = START[optimizer] if start is None else start
    if not RANGE[0] < start < RANGE[1]:
        raise invalid("start", f"a learning rate between {RANGE[0]:g} and {RANGE[1]:g}", start)
    chosen = list(dict.fromkeys(seeds)) if isinstance(seeds, Iterable) else []
    if not chosen or not all(isinstance(seed, Integral) for seed in chosen):
        raise invalid("seeds", "one or more integers, such as range(3)", seeds)
    if isinstance(make_net, nn.Module):
        raise invalid("make_net", "a function that builds a network: lambda: MyUNet()", type(make_net).__name__)
    if len(chosen) > 1:
        require("scipy.special", "train", "confidence intervals")
    options = {"optimizer": optimizer, "steps": steps, "loss": loss}
    search = partial(_search, make_net, make_batch, start, tolerance, options)
    if jobs > 1:
        try:
            pickle.dumps(search)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidValueError(
                f"jobs={jobs} starts processes, which must import make_net, make_batch and loss: define them by `def` "
                f"at the top of a file (no lambdas or local functions), or use jobs=1 ({error})"
            ) from None
    return summarize(trial for trials in parallel(search, chosen, jobs) for trial in trials)


def summarize(trials: Iterable[Trial]) -> StableLearningRate:
    """Combine the finished searches of several seeds."""
    trials = tuple(trials)
    brackets = {}
    for seed in dict.fromkeys(trial.seed for trial in trials):
        own = [trial for trial in trials if trial.seed == seed]
        trained = max(trial.lr for trial in own if not trial.diverged)
        brackets[seed] = trained, min(trial.lr for trial in own if trial.diverged)
    logs = mean_interval([math.log(trained) for trained, _ in brackets.values()])
    low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
    mean = math.exp(logs.mean) if len(brackets) > 1 else next(iter(brackets.values()))[0]
    return StableLearningRate(mean, low, high, brackets, trials)


def lr_sensitivity(losses: Mapping[float, float], initial: float) -> float:
    """Mean over learning rates of the final loss, capped at the untrained network's, minus the best one.

    0 means that every learning rate of the grid ends at the same loss (Wortsman et al., 2023, average over the grid).
    """
    capped = [min(value, initial) if math.isfinite(value) else initial for value in losses.values()]
    return math.fsum(capped) / len(capped) - min(capped)


def parallel(run: Callable[[Any], Any], items: Sequence[Any], jobs: int) -> Iterator[Any]:
    """Yield `run(item)` in order, from `jobs` processes with one thread each, or in this process if `jobs` is 1."""
    if jobs < 1:
        raise invalid("jobs", "an integer >= 1", jobs)
    if jobs == 1 or len(items) == 1:
        yield from map(run, items)
        return
    context = torch.multiprocessing.get_context("spawn")
    alive, parent = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(jobs, len(items)), mp_context=context, initializer=_start, initargs=(alive,))
    with alive, parent, pool:
        futures = [pool.submit(run, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        except BaseException as error:  # also Ctrl-C, and a caller that wants no more results
            parent.close()
            if isinstance(error, BrokenProcessPool):
                raise RunError(
                    "a worker process ended: memory ran out, or a script starts processes outside of "
                    'if __name__ == "__main__":'
                ) from None
            raise


def _search(
    make_net: MakeNet, make_batch: MakeBatch, start: float, tolerance: float, options: dict[str, Any], seed: int
) -> list[Trial]:
    trials: list[Trial] = []
    try:
        for trial in bisect(partial(run_trial, make_net, make_batch, seed=seed, **options), start, tolerance):
            trials.append(trial)
            first, now = trials[0].initial, trial.initial
            if not math.isclose(first, now, rel_tol=0.01):  # kernels of a GPU may differ by a little
                raise InvalidValueError(f"the untrained network's loss was {first:.4g} and is {now:.4g} now; {AFRESH}")
    except InvalidValueError as error:
        raise InvalidValueError(f"seed {seed}: {error}") from None
    return trials


def _optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]


def _start(alive: Connection) -> None:
    """Prepare a worker: one thread, and it ends when the other end of `alive` closes, also by a kill of the parent."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()


def _end_with(alive: Connection) -> None:
    alive.poll(None)
    os._exit(1)
