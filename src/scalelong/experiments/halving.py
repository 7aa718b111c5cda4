"""Successive halving over paired runs: candidates advance together, and those that are worse than chance explains stop.

All candidates train to an eighth of a full training, the survivors to a quarter, a half, and the end. After each rung a
candidate is dropped if it failed, or if the interval of its loss minus the best one's lies above zero. Losses come in
blocks: block b of every candidate shares data order, noise and initial weights (a seed), so only what is left after
removing the means of candidates and blocks is chance. Its variance is pooled over candidates, as in a randomized block
design, so that two or three seeds suffice; the intervals share one error rate over rungs and candidates (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelong.errors import InvalidValueError, invalid, require
from scalelong.experiments.frontier import parallel
from scalelong.experiments.statistics import CONFIDENCE, Estimate

RUNGS = 4


@dataclass(frozen=True)
class Score:
    """The loss of a candidate in every block, or the reason why it failed."""

    losses: tuple[float, ...]
    failed: str | None = None


@dataclass(frozen=True)
class Standing:
    """How far a candidate came, and its loss there minus the best one's at the same steps, paired by block.

    `dropped` is "" for a survivor.
    """

    name: str
    steps: int
    loss: float | None
    worse_by: Estimate | None
    dropped: str


@dataclass(frozen=True)
class Rung:
    """The losses of the candidates that were trained to `steps` and did not fail, one per block."""

    steps: int
    losses: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Gap:
    """The loss of a candidate minus the best one's, at the last step that both reached."""

    steps: int
    loss: Estimate


@dataclass(frozen=True)
class Tuned:
    """The result of a search.

    best        the survivor with the lowest loss
    standings   all candidates, the best first
    steps       training steps of all candidates and blocks together
    grid_steps  what training all of them to the end would take
    rungs       the losses at every rung
    level       confidence of one interval, so that the best candidate survives all rungs with that of the search
    """

    best: str
    standings: tuple[Standing, ...]
    steps: int
    grid_steps: int
    rungs: tuple[Rung, ...] = ()
    level: float = CONFIDENCE

    @property
    def runner_up(self) -> str | None:
        """The candidate that came next to the best one."""
        return self.standings[1].name if len(self.standings) > 1 else None

    def gap(self, name: str) -> Gap | None:
        """Compare a candidate with the best one, paired by block; None if it failed at the first rung."""
        for rung in reversed(self.rungs):
            if name != self.best and {name, self.best} <= rung.losses.keys():
                return Gap(rung.steps, paired_differences(rung.losses, self.best, self.level)[name])
        return None

    @property
    def tied(self) -> tuple[str, ...]:
        """The survivors that are not worse than the best one by more than chance: no difference worth choosing.

        One block has no interval, so it says nothing about chance.
        """
        rivals = [s for s in self.standings if s.worse_by is not None and s.worse_by.low is not None and not s.dropped]
        return tuple(s.name for s in rivals if not _worse(s.worse_by))

    def __getitem__(self, name: str) -> Standing:
        return next(s for s in self.standings if s.name == name)


def halve(
    names: Sequence[str],
    advance: Callable[[Sequence[str], int], Mapping[str, Score]],
    *,
    steps: int,
    blocks: int = 1,
    budget: int | None = None,
    confidence: float = CONFIDENCE,
    may_start: Callable[[int], bool] = lambda cost: True,
) -> Tuned:
    """Search among `names`.

    Args:
        advance: `advance(names, steps)` continues each candidate to `steps` steps in total and returns its score.
        steps: Length of a full training.
        blocks: Trainings per candidate, for counting steps.
        budget: Steps of all trainings together; a rung that would exceed it is not started. Default: no limit.
        confidence: Probability with which the best candidate survives every rung.
        may_start: Whether a further rung of this many steps may start, for a limit on time.
    """
    names = list(names)
    if not names or len(set(names)) < len(names):
        raise invalid("candidates", "one or more different candidates", names)
    if not 0 < confidence < 1:
        raise invalid("confidence", "in (0, 1)", confidence)
    rungs = [math.ceil(steps / 2**k) for k in range(RUNGS - 1, -1, -1)]  # an eighth, a quarter, a half, all
    first = rungs[0] * len(names) * blocks
    if budget is not None and budget < first:
        expected = (
            f"at least {first} steps: {len(names)} candidates × {blocks} seed(s) × {rungs[0]} steps, the first rung"
        )
        raise invalid("the budget", expected, budget)
    level = 1 - (1 - confidence) / (RUNGS * max(1, len(names) - 1))
    alive, spent, reached, placed, done = list(names), 0, 0, list[Standing](), list[Rung]()
    for rung in dict.fromkeys(rungs):
        cost = (rung - reached) * len(alive) * blocks
        if (budget is not None and spent + cost > budget) or (reached and not may_start(cost)):
            break
        found = advance(tuple(alive), rung)
        spent, reached = spent + cost, rung
        done.append(Rung(rung, {name: found[name].losses for name in alive if not found[name].failed}))
        placed = [s for s in placed if s.dropped] + _placed(alive, found, rung, level)
        alive = [s.name for s in placed if not s.dropped]
        if len(alive) == 1:
            break  # decided
    ordered = sorted(placed, key=lambda s: (bool(s.dropped), -s.steps, math.inf if s.loss is None else s.loss))
    return Tuned(ordered[0].name, tuple(ordered), spent, steps * len(names) * blocks, tuple(done), level)


def _placed(alive: Sequence[str], found: Mapping[str, Score], steps: int, level: float) -> list[Standing]:
    trained = {name: found[name].losses for name in alive if not found[name].failed}
    if not trained:
        reasons = "; ".join(f"{name}: {found[name].failed}" for name in alive)
        raise InvalidValueError(f"every candidate failed: {reasons}")
    best = min(trained, key=lambda name: math.fsum(trained[name]))
    gaps = paired_differences(trained, best, level)
    standings = []
    for name in alive:
        if (reason := found[name].failed) is not None:
            standings.append(Standing(name, steps, None, None, f"{reason} by step {steps}"))
            continue
        why = f"worse than {best} at step {steps}" if name != best and _worse(gaps[name]) else ""
        loss = math.fsum(trained[name]) / len(trained[name])
        standings.append(Standing(name, steps, loss, None if name == best else gaps[name], why))
    return standings


def paired_differences(losses: Mapping[str, Sequence[float]], best: str, level: float) -> dict[str, Estimate]:
    """Mean over blocks of each candidate's loss minus that of `best`, with the t interval of the pooled variance.

    With two candidates this is the paired t interval.
    """
    table = np.array([list(values) for values in losses.values()], dtype=float)  # (candidates, blocks)
    if table.ndim != 2 or not table.shape[1]:
        raise invalid(
            "losses", "one list of numbers per candidate, all of one length", [len(v) for v in losses.values()]
        )
    c, b = table.shape
    means, freedom = table.mean(axis=1), (c - 1) * (b - 1)
    half = 0.0
    if freedom:
        rest = table - means[:, None] - table.mean(axis=0)[None] + table.mean()
        special = require("scipy.special", "train", "confidence intervals")
        half = float(special.stdtrit(freedom, (1 + level) / 2)) * math.sqrt(2 * float((rest**2).sum()) / freedom / b)
    lowest, found = means[list(losses).index(best)], {}
    for name, mean in zip(losses, means, strict=True):
        gap, own = float(mean - lowest), 0.0 if name == best else half  # `best` minus itself is exactly 0
        found[name] = Estimate(gap, gap - own, gap + own, b, level) if freedom else Estimate(gap, None, None, b, level)
    return found


def _worse(gap: Estimate | None) -> bool:
    return gap is not None and gap.low is not None and gap.low > 0


MakeRun = Callable[[Any, int, Any], tuple[Sequence[float] | float, Any]]


def tune(
    make_run: MakeRun,
    candidates: Mapping[str, Any] | Sequence[Any],
    *,
    steps: int,
    budget: int | None = None,
    confidence: float = CONFIDENCE,
    jobs: int = 1,
) -> Tuned:
    """Find the best of several settings of your own training loop by successive halving over paired runs.

    Args:
        make_run: `make_run(candidate, steps, state)` continues training from `state` (None at first) to `steps` steps
            in total, and returns the held-out losses and the new state. There is one loss per block, for example per
            seed; block b of every candidate should share data order, noise and initial weights. A loss that is not
            finite drops the candidate.
        candidates: Settings, by name or as a list.
        steps: Length of a full training. Candidates are compared after an eighth, a quarter, a half and all of it.
        budget: Steps of all candidates together, at most.
        confidence: Probability with which the best candidate survives every rung.
        jobs: Candidates in parallel, in processes; `make_run`, candidates and states must then be picklable.

    Returns:
        The best candidate `.best`, those that cannot be told from it `.tied`, and all `.standings`.

    Examples:
        >>> def make_run(lr, steps, state):  # here: gradient descent on w², two blocks
        ...     state = [(done, w) for done, w in state or [(0, 1.0), (0, 2.0)]]
        ...     state = [(steps, w * (1 - 2 * lr) ** (steps - done)) for done, w in state]
        ...     return [w * w for _, w in state], state
        >>> scalelong.tune(make_run, {"lr 0.01": 0.01, "lr 0.1": 0.1}, steps=16).best
        'lr 0.1'
    """
    named = dict(candidates) if isinstance(candidates, Mapping) else {str(value): value for value in candidates}
    if len(named) < len(candidates):
        raise invalid("candidates", "one or more different candidates", list(map(str, candidates)))
    if steps < 1:
        raise invalid("steps", "an integer >= 1", steps)
    states: dict[str, Any] = dict.fromkeys(named)

    def advance(names: Sequence[str], target: int) -> dict[str, Score]:
        results = list(parallel(_Continue(make_run, target), [(named[name], states[name]) for name in names], jobs))
        scores = {}
        for name, (losses, state) in zip(names, results, strict=True):
            values = tuple(float(loss) for loss in np.atleast_1d(np.asarray(losses, dtype=float)))
            states[name] = state
            finite = bool(values) and all(map(math.isfinite, values))
            scores[name] = Score(values, None if finite else "its loss became non-finite")
        return scores

    return halve(list(named), advance, steps=steps, budget=budget, confidence=confidence)


@dataclass(frozen=True)
class _Continue:
    """`make_run` at a number of steps, as a function of one task; picklable."""

    make_run: MakeRun
    steps: int

    def __call__(self, task: tuple[Any, Any]) -> tuple[Sequence[float] | float, Any]:
        candidate, state = task
        return self.make_run(candidate, self.steps, state)
