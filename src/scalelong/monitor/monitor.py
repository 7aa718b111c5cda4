"""Watch the stability of a training run, in any PyTorch loop: norms, ratios, κ, gradients, oscillation, alarms."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalelong._modules import is_compiled, leave_no_trace
from scalelong.errors import ScaleLongError
from scalelong.monitor.advice import advice
from scalelong.monitor.alarms import Alarm as Alarm
from scalelong.monitor.alarms import Finding, find
from scalelong.monitor.alarms import Limits as Limits
from scalelong.monitor.buffer import Buffer
from scalelong.monitor.log import FORMAT, Entry, LogWriter
from scalelong.monitor.oscillation import Window
from scalelong.monitor.parameter_norms import BlockNorms, ParameterNorms
from scalelong.monitor.points import find_points, unwrapped
from scalelong.monitor.probe import Inputs, Probe, as_probe, from_batch
from scalelong.monitor.recorder import Hooks, Norms, Recorder
from scalelong.monitor.scalars import scalars
from scalelong.monitor.snapshot import Layout, Snapshot, make_entry, oscillations
from scalelong.monitor.summary import Summary
from scalelong.scaling import BlockScaling, ConstantScaling, FixedSkips
from scalelong.skips.application import scaling_of
from scalelong.skips.sites import Site

LOGGER = logging.getLogger("scalelong")


class StabilityMonitor:
    """`watch = StabilityMonitor(net, probe=(x_t, t))`, then `with watch.step(step):` around forward and backward.

    It looks every `every` steps, and at every second look at the step before it too, so that a jump is over exactly
    one update. Between looks nothing is attached to the network and nothing waits for the device. Looking does not
    disturb: losses are bit for bit those of a run without it.

    net       any network, also wrapped by DDP, DataParallel or torch.compile; long skips that are not known are
              given by `sites`, and a network without any is watched by its blocks
    probe     the fixed batch: the call's arguments `(x_t, t)` or `(x_t, t, {"class_labels": y})`, or a function of
              the network that calls it; None takes the first samples of the first batch that a look sees
    t         the probe's timesteps, where they are not its second argument
    every, window   steps from look to look (0: off), and looks that oscillation and alarms are taken over
    out, keep       the file, stability.jsonl say, and the most looks that it holds; a file that is there is continued
    ema       the averaged network (or its parameters), for the distance between it and the raw one
    scaler    fp16's GradScaler, unless the gradients are unscaled within the block
    times, bins     the range of timesteps and how many bins it is cut into
    log       called as log(scalars, step=step) at every look: `accelerator.log`, `wandb.log`
    on_alarm  called with an `Alarm` when one begins; by default it is logged as a warning
    """

    def __init__(
        self,
        net: nn.Module,
        probe: Inputs | None = None,
        *,
        t: Any = None,
        sites: Iterable[Site | str] | None = None,
        every: int = 10,
        window: int = 50,
        out: Path | str | None = None,
        keep: int = 1000,
        ema: Any = None,
        scaler: Any = None,
        times: tuple[float, float] | None = None,
        bins: int = 4,
        limits: Limits | None = None,
        log: Callable[..., Any] | None = None,
        on_alarm: Callable[[Alarm], Any] | None = None,
    ) -> None:
        for name, value, least in (("every", every, 0), ("window", window, 2), ("keep", keep, 8), ("bins", bins, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ScaleLongError(f"{name} is a whole number from {least} up, not {value!r}")
        if times is not None and not times[0] < times[1]:
            raise ScaleLongError(f"times is the range of timesteps, (0, 1000) say, not {times!r}")
        self.net, self.root = net, unwrapped(net)
        self.points = find_points(self.root, sites)
        self.every = every if _first_process() else 0
        self.limits, self.log, self.on_alarm = limits or Limits(), log, on_alarm
        self.scaler, self.times, self.bins, self._t = scaler, times, bins, t
        self._probe = None if probe is None else as_probe(probe, t)
        self._hooks, self._parameters = Hooks(self.root, self.points), ParameterNorms(self.root, self.points)
        self._ema = None if ema is None else self._parameters.average_of(ema)
        self._layout = Layout(self.points, bins)
        self._window, self._by_time = Window(window), Window(window)
        self._oscillation: Entry | None = None  # as it was told last
        self._entries: deque[Entry] = deque(maxlen=window)
        self._writer, self._buffer = LogWriter(out, keep), Buffer()
        self._before: Snapshot | None = None
        self._in_bins: tuple[tuple[float, ...], list[list[int]] | None] | None = None
        self._step = 0
        self._begun = False
        self.alarms: tuple[Alarm, ...] = ()  # in force at the last look

    # ------------------------------------------------------------------------------------ in the loop

    def step(self, step: int, batch: Inputs | None = None) -> AbstractContextManager[None]:
        """Around the forward and backward pass of step `step`; clipping and the optimizer come after it.

        batch   the arguments of the training call, as `probe`: only where the network is compiled, whose own pass
                hooks do not see, so that it is run again on them
        """
        self._step = step
        if not self.every or (step % self.every and (step + 1) % (2 * self.every)):
            return nullcontext()
        return self._looking(step, batch)

    def note(self, *, loss: Any = None, t: Any = None, grad_norm: Any = None) -> None:
        """Tell the loss of this step (better one a sample, with their timesteps) and the norm that clipping returned.

        Tensors are kept as they are until the next look: this costs nothing and waits for nothing.
        """
        if self.every:
            self._buffer.add(self._step, loss, t, grad_norm)

    def remove(self) -> None:
        """Stop looking. Nothing is left in the network; between looks nothing ever is."""
        self.every = 0
        self._before, self._probe, self._ema = None, None, None

    # ------------------------------------------------------------------------------------ to look at

    @property
    def last(self) -> Entry | None:
        """The last look, as it stands in the file."""
        return self._entries[-1] if self._entries else None

    @property
    def scalars(self) -> dict[str, float]:
        """The last look as plain numbers with names, for a logger."""
        return {} if self.last is None else scalars(self.points, self.last)

    def summary(self) -> Summary:
        """The last look as a table, and the alarms in force; prints."""
        return Summary(self.points, self.last, self.alarms)

    # ------------------------------------------------------------------------------------ a look

    @contextmanager
    def _looking(self, step: int, batch: Inputs | None) -> Iterator[None]:
        compiled = is_compiled(self.net)  # then hooks would not be met
        seen = None if compiled else Recorder(self.points.size, keep_call=self._probe is None)
        with self._hooks.open(seen):
            yield
            self._look(step, batch, seen)

    def _look(self, step: int, batch: Inputs | None, seen: Recorder | None) -> None:
        autocast = {} if seen is None else seen.autocast
        gradients = self._gradients()
        train = None if seen is None else seen.norms()
        if train is None and batch is not None:
            train = self._run(as_probe(batch), autocast, samples=None)
        probe = self._the_probe(seen)
        norms = self._run(probe, autocast, probe.n)
        edges, members = self._times_of(probe)
        look = Snapshot(step, norms, train, gradients, self._layout.by_time(norms, members))
        if step % self.every == 0:
            self._tell(look, probe, edges)
        self._before = look

    def _gradients(self) -> BlockNorms | None:
        if self.scaler is None:
            return self._parameters.gradients()
        found = self._parameters.gradients(float(self.scaler.get_scale()))
        return found if found is None or found.bad is None else None  # the scaler skips such a step by itself

    def _the_probe(self, seen: Recorder | None) -> Probe:
        if self._probe is None:
            if seen is None or seen.call is None:
                raise ScaleLongError(
                    "the monitor saw no call of the network to take its probe from (is it compiled, or not called "
                    "inside `with watch.step(…)`?); give one: StabilityMonitor(net, probe=(x_t, t))"
                )
            self._probe = from_batch(*seen.call, self._t)
            seen.call = None
        return self._probe

    def _times_of(self, probe: Probe) -> tuple[tuple[float, ...], list[list[int]] | None]:
        """The edges of the timestep bins, and which of them the probe's samples are in."""
        if self._in_bins is None:
            edges = probe.edges(self.bins, self.times)
            self._in_bins = edges, probe.members(edges)
        return self._in_bins

    def _run(self, inputs: Probe, autocast: dict[str, torch.dtype | None], samples: int | None) -> Norms | None:
        """A pass of the network on these inputs, to look at alone."""
        recorder = Recorder(self.points.size, samples)
        with leave_no_trace(self.root, autocast), self._hooks.alone(recorder):
            inputs.call(self.root)
        return recorder.norms()

    def _tell(self, look: Snapshot, probe: Probe, edges: tuple[float, ...]) -> None:
        if not self._begun:
            self._begin(look.step, probe, edges)
        drift = None if self._ema is None else self._parameters.drift(self._ema)
        last = self._entries[-1]["step"] if self._entries else -1
        noted = self._buffer.collect(edges, last)
        if self.scaler is not None:
            noted = noted.without_gradient_trouble()
        entry = make_entry(self._layout, look, self._before, last, noted, drift, self._kappas(look.probe))
        self._oscillation = oscillations(self._layout, entry, self._window, self._by_time, self._oscillation)
        entry["oscillation"] = self._oscillation
        self._entries.append(entry)
        findings = find(self.points, self.limits, list(self._entries), self._window, self._by_time, edges)
        self.alarms = tuple(self._alarm(finding, look.step) for finding in findings)
        before = self._lasting()
        new = [alarm for alarm in self.alarms if alarm.kind not in before]
        if self.alarms:
            entry["alarms"] = [alarm.to_dict(whole=alarm in new) for alarm in self.alarms]
        self._writer.write(entry)
        for alarm in new:
            (self.on_alarm or _warn)(alarm)
        if self.log is not None:
            self.log(self.scalars, step=look.step)

    def _begin(self, step: int, probe: Probe, edges: tuple[float, ...]) -> None:
        """The header, and the window of the looks before this one where the file has them."""
        scaler = scaling_of(self.root)
        header = {
            "step": 0, "format": FORMAT, **self.points.to_dict(), "times": list(edges), "probe": probe.n,
            "every": self.every, "window": self._entries.maxlen,
            "scaling": {"kind": "none"} if scaler is None else scaler.spec.to_dict(),
        }  # fmt: skip
        for entry in self._writer.begin(header, step)[-(self._entries.maxlen or 1) :]:
            self._entries.append(entry)
            self._window.add(self._layout.read(entry.get("jump")))
            self._by_time.add(self._layout.read_by_time(entry.get("jump")))
        self._begun = True

    def _lasting(self) -> dict[str, int]:
        """The kinds of alarm that were in force before the last look, and since when.

        A spike is over with its look; oscillations and ratios come and go, so theirs are looked for further back.
        """
        former = list(self._entries)[-1 - self.limits.looks : -1]
        return {
            alarm["kind"]: alarm["since"]
            for entry in former
            for alarm in entry.get("alarms", [])
            if alarm["kind"] in ("oscillation", "ratio") or entry is former[-1]
        }

    def _alarm(self, finding: Finding, step: int) -> Alarm:
        began = self._lasting().get(finding.kind, step if finding.since is None else finding.since)
        skip = None if finding.point is None else self.points.skip_of(finding.point)
        kappas = [mean for mean, _, _ in self._kappas(None)] or _means(self.last)
        scaler = scaling_of(self.root)
        base = scaler.spec.kappa if scaler is not None and isinstance(scaler.spec, ConstantScaling) else None
        return Alarm(
            finding.kind, step, began, finding.module, finding.what, skip, finding.times, finding.value,
            finding.reference, advice(finding.kind, skip, kappas, base),
        )  # fmt: skip

    def _kappas(self, norms: Norms | None) -> list[tuple[float, float, float]]:
        """(mean, least, greatest) of κ_1 … κ_N; empty where they are learned and were not seen."""
        n, scaler = self.points.n, scaling_of(self.root)
        if scaler is None or isinstance(scaler.spec, BlockScaling):
            return [(1.0, 1.0, 1.0)] * n
        if isinstance(scaler, FixedSkips):
            return [(kappa, kappa, kappa) for kappa in scaler.coefficients]
        seen = {} if norms is None else norms.kappas
        return [seen[i] for i in range(1, n + 1)] if len(seen) == n else []


def _means(entry: Entry | None) -> list[float]:
    means = ((entry or {}).get("kappa") or {}).get("mean") or []
    return [mean for mean in means if mean is not None]


def _warn(alarm: Alarm) -> None:
    LOGGER.warning("%s", alarm)


def _first_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0)
