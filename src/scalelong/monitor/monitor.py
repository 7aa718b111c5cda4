"""Monitor the stability of any PyTorch training loop: norms, ratios, κ, gradients, oscillations, alarms."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalelong._modules import is_compiled, leave_no_trace
from scalelong.errors import ScalingStateError, invalid
from scalelong.monitor.alarms import Alarm, Limits, advice, find
from scalelong.monitor.log import FORMAT, Entry, LogWriter, lookup, rounded
from scalelong.monitor.points import coefficients_of, find_points, spec_of
from scalelong.monitor.probe import Inputs, Probe, as_probe, from_batch
from scalelong.monitor.recorder import Hooks, Norms, ParameterNorms, Recorder
from scalelong.monitor.snapshot import Buffer, Layout, Snapshot, Window, make_entry
from scalelong.monitor.steps import AttachedSteps
from scalelong.monitor.summary import Summary, scalars
from scalelong.skips.application import scaled_root
from scalelong.skips.sites import Site

LOGGER = logging.getLogger("scalelong")


class StabilityMonitor:
    """Record the stability of a training run every `every` steps.

    Every second snapshot also records the step before it, so that a jump spans exactly one update. Between snapshots
    nothing is attached to the network and nothing synchronizes with the device. The monitor does not change the run:
    losses are bit for bit those of a run without it.

    Args:
        net: Any network, possibly wrapped by DDP, DataParallel or torch.compile, or sharded by `fully_shard`: then
            every process must have a monitor, and the main one writes. A network without known long skips is recorded
            by its blocks.
        probe: The fixed batch: the call's arguments `(x_t, t)` or `(x_t, t, {"class_labels": y})`, or a function that
            calls the network. None takes the first samples of the first recorded batch.
        t: The probe's timesteps, if they are not its second argument.
        sites: The long skips, outermost first, for a network that `scalelong.apply` does not know.
        every: Steps between snapshots; 0 turns the monitor off.
        window: Number of snapshots that oscillations and alarms refer to.
        out: Log file, for example "stability.jsonl". An existing file is continued.
        keep: Maximum number of snapshots in the file; a longer run is covered evenly, its end closely.
        ema: The averaged network (or its parameters), to record its distance to the network.
        scaler: The GradScaler of fp16 training, unless gradients are unscaled inside the `with` block.
        times: Range of timesteps.
        bins: Number of bins that divide it.
        limits: Thresholds of the alarms.
        log: Called as `log(scalars, step=step)` at every snapshot, for example `accelerator.log` or `wandb.log`.
        on_alarm: Called with an `Alarm` when one begins. By default it is logged as a warning.

    Examples:
        >>> net = scalelong.UViT(8, 4, embed_dim=16, depth=4, num_heads=2)
        >>> optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        >>> watch = scalelong.StabilityMonitor(net, every=2, out="stability.jsonl")
        >>> for step in range(1, 5):
        ...     x_t, t, eps = torch.randn(4, 3, 8, 8), torch.rand(4) * 1000, torch.randn(4, 3, 8, 8)
        ...     with watch.step(step):  # forward and backward
        ...         loss = (net(x_t, t) - eps).square().mean()
        ...         loss.backward()
        ...     watch.note(loss=loss.detach())
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> print(watch.summary())
        UViT: 2 long skips; step 4...
        >>> watch.last["step"], len(watch.scalars) > 0
        (4, True)
        >>> watch.remove()
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
                raise invalid(name, f"an integer >= {least}", value)
        if times is not None and not times[0] < times[1]:
            raise invalid("times", "an increasing range of timesteps such as (0, 1000)", times)
        kinds = {cls.__name__ for cls in type(net).__mro__}
        if "FullyShardedDataParallel" in kinds:
            raise ScalingStateError("the monitor records networks sharded by fully_shard (FSDP2), got FSDP1's wrapper")
        self.net, self.root = net, scaled_root(net)
        self.points = find_points(self.root, sites)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.every = every
        if distributed and torch.distributed.get_rank() > 0:  # of a sharded network every process runs the probe
            self.every = every if "FSDPModule" in kinds else 0
            out, log, on_alarm = None, None, lambda alarm: None
        self.limits, self.log, self.on_alarm = limits or Limits(), log, on_alarm or LOGGER.warning
        self.scaler, self.times, self.bins, self._t = scaler, times, bins, t
        self.alarms: tuple[Alarm, ...] = ()  # active at the last snapshot
        self._probe = None if probe is None else as_probe(probe, t)
        self._hooks, self._parameters = Hooks(self.root, self.points), ParameterNorms(self.root, self.points)
        self._ema = list(ema) if isinstance(ema, Iterator) else ema
        if ema is not None:
            self._parameters.average_of(self._ema)  # raises an error now if it does not fit
        self._layout, self._window = Layout(self.points, bins), Window(window)
        self._entries: deque[Entry] = deque(maxlen=window)
        self._writer, self._buffer = LogWriter(out, keep, window), Buffer()
        self._before: Snapshot | None = None
        self._edges: tuple[float, ...] = ()
        self._members: list[list[int]] | None = None
        self._step, self._begun = 0, False
        self._attached: AttachedSteps | None = None
        self.clipped = False  # whether snapshots see gradients after clipping, as those of Hugging Face's Trainer do

    def step(self, step: int, batch: Inputs | None = None) -> AbstractContextManager[None]:
        """Wrap the forward and backward pass of a step. Clipping comes after the block.

        Args:
            step: Number of the step, counted over the whole run.
            batch: The arguments of the training call in the form of `probe`. Only a compiled network needs it: hooks do
                not run in compiled code, so the monitor runs the network again, eagerly.

        Returns:
            A context manager.
        """
        self._step = step
        if not self.every or (step % self.every and (step + 1) % (2 * self.every)):
            return nullcontext()
        return self._recording(step, batch)

    def note(self, *, loss: Any = None, t: Any = None, grad_norm: Any = None) -> None:
        """Log values of this step.

        Tensors stay on their device until the next snapshot, so this neither computes nor synchronizes.

        Args:
            loss: The loss, ideally one per sample.
            t: The timesteps of these samples.
            grad_norm: The gradient norm that clipping returned.
        """
        if self.every:
            self._buffer.add(self._step, loss, t, grad_norm)

    def attach(self, optimizer: torch.optim.Optimizer, first: int = 1) -> "StabilityMonitor":
        """Record the steps of a loop that you do not edit: a step ends where `optimizer.step()` begins.

        Two pre-hooks stay on the network until `remove()`. Calls in eval mode or without gradients are not recorded;
        of a compiled network, which runs no hooks, only gradients and the probe are. Gradients are those that the
        optimizer receives, after clipping.

        Args:
            optimizer: The optimizer that trains the network.
            first: Number of the first step, for a resumed run.

        Returns:
            The monitor itself.

        Examples:
            >>> net = scalelong.StackedUNet(32, 3)
            >>> optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
            >>> watch = scalelong.StabilityMonitor(net, every=2).attach(optimizer)
            >>> for _ in range(4):
            ...     net(torch.randn(8, 32)).square().mean().backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            >>> watch.last["step"]
            4
        """
        self._attached = AttachedSteps(self, optimizer, first)
        return self

    def remove(self) -> None:
        """Turn the monitor off. Nothing remains in the network."""
        if self._attached is not None:
            self._attached.detach()
        self.every = 0
        self._before, self._probe, self._ema = None, None, None

    @property
    def last(self) -> Entry | None:
        """The last snapshot, as written to the file."""
        return self._entries[-1] if self._entries else None

    @property
    def scalars(self) -> dict[str, float]:
        """The last snapshot as named numbers, for a tracker."""
        return scalars(self.points, list(self._entries))

    def summary(self, blocks: bool = False) -> Summary:
        """Return the last snapshot, with the active alarms.

        Args:
            blocks: Whether to print the blocks of a network with long skips, too.

        Returns:
            A summary that prints as a table.
        """
        return Summary(self.points, tuple(self._entries), self.alarms, blocks)

    @contextmanager
    def _recording(self, step: int, batch: Inputs | None) -> Iterator[None]:
        recorder = Recorder(len(self.points.all), keep_call=self._probe is None)
        with nullcontext() if is_compiled(self.net) else self._hooks.attached(recorder):  # compiled code runs no hooks
            yield
            self._take_snapshot(step, batch, recorder)

    def _take_snapshot(self, step: int, batch: Inputs | None, recorder: Recorder) -> None:
        gradients = self._parameters.gradients(1.0 if self.scaler is None else float(self.scaler.get_scale()))
        if self.scaler is not None and gradients is not None and gradients.nonfinite is not None:
            gradients = None  # the scaler skips this step itself
        train = recorder.norms()
        if train is None and batch is not None:
            train = self._run(as_probe(batch), recorder.autocast, samples=None)
        if self._probe is None:
            if recorder.call is None:
                raise ScalingStateError(
                    "the monitor recorded no call of the network to take its probe from: the network is compiled, or "
                    "was not called inside `with watch.step(…)`; pass one: StabilityMonitor(net, probe=(x_t, t))"
                )
            self._probe = from_batch(*recorder.call, self._t)
        if not self._edges:
            self._edges = self._probe.edges(self.bins, self.times)
            self._members = self._probe.members(self._edges)
        norms = self._run(self._probe, recorder.autocast, self._probe.n)
        by_time = self._layout.by_time(norms, self._members)
        snapshot = Snapshot(step, norms, train, gradients, by_time, self._kappas(norms))
        if step % self.every == 0:
            self._add_entry(snapshot)
        self._before = snapshot

    def _run(self, inputs: Probe, autocast: dict[str, torch.dtype | None], samples: int | None) -> Norms | None:
        """Run the network on these inputs only to record it."""
        recorder = Recorder(len(self.points.all), samples)
        with leave_no_trace(self.root, autocast), self._hooks.attached(recorder, exclusive=True):
            inputs.call(self.root)
        if (reshard := getattr(self.root, "reshard", None)) is not None:
            reshard()  # no backward follows, until which FSDP2 keeps the gathered weights
        return recorder.norms()

    def _add_entry(self, snapshot: Snapshot) -> None:
        """Write the entry of a snapshot, raise its alarms and log its scalars."""
        if not self._begun:
            self._begin(snapshot.step)
        # Loading a checkpoint or moving the average replaces its tensors, so they are looked up each time.
        drift = None if self._ema is None else self._parameters.drift(self._parameters.average_of(self._ema))
        last = self._entries[-1]["step"] if self._entries else -1
        buffered = self._buffer.collect(self._edges, last - self.clipped)
        if self.scaler is not None:
            buffered = replace(buffered, bad_gradient=None)  # fp16 overflows now and then by design
        exact = make_entry(self._layout, snapshot, self._before, last, buffered, drift)
        self._window.add(self._layout.flatten(exact.get("jump")))
        spreads = self._window.oscillation()
        named = {} if spreads is None else self._layout.unflatten(spreads.tolist())
        entry: Entry = rounded({**exact, "oscillation": {"jumps": len(self._window.rows), **named}})
        former = self._active_before()
        self._entries.append(entry)
        found = find(self._layout, self.limits, list(self._entries), self._window, self._edges)
        kappas = [mean for mean in lookup(entry, "kappa", "mean") or () if mean is not None]
        base = getattr(spec_of(self.root), "kappa", None)  # of CS
        advised = [replace(a, advice=advice(a.kind, a.skip, a.hidden, kappas, base)) for a in found]
        began = {a.kind: a for a in self.alarms if a.kind == "nonfinite" and a.kind in former}
        # One update with a NaN spreads it to all weights, so an alarm that lasts keeps the module where it began.
        self.alarms = tuple(
            replace(began.get(a.kind, a), step=a.step, since=former.get(a.kind, a.since)) for a in advised
        )
        if self.alarms:
            entry["alarms"] = [alarm.to_dict(is_new=alarm.kind not in former) for alarm in self.alarms]
        self._writer.write(entry)
        for alarm in self.alarms:
            if alarm.kind not in former:
                self.on_alarm(alarm)
        if self.log is not None:
            self.log(self.scalars, step=snapshot.step)

    def _begin(self, step: int) -> None:
        """Write the header, and read the window back from an existing file."""
        assert self._probe is not None
        length, sites = self._entries.maxlen or 1, enumerate(self.points.sites, start=1)
        header = {
            "step": 0, "format": FORMAT, "network": self.points.network,
            "skips": [{"i": i, "from": site.source, "to": site.path} for i, site in sites],
            "blocks": list(self.points.blocks), "times": list(self._edges), "probe": self._probe.n,
            "every": self.every, "window": length, "scaling": spec_of(self.root).to_dict(),
        }  # fmt: skip
        for entry in self._writer.begin(header, step)[-length:]:
            self._entries.append(entry)
            self._window.add(self._layout.flatten(entry.get("jump")))
        self._begun = True

    def _active_before(self) -> dict[str, int]:
        """Return the kinds of alarm that are still active, and since when.

        A spike ends with its snapshot. Oscillations and ratios come and go, so earlier entries count for them.
        """
        recent = list(self._entries)[-self.limits.looks :]
        return {
            alarm["kind"]: alarm["since"]
            for entry in recent
            for alarm in entry.get("alarms", [])
            if alarm["kind"] in ("oscillation", "ratio") or entry is recent[-1]
        }

    def _kappas(self, norms: Norms | None) -> list[tuple[float, float, float]]:
        """Return (mean, min, max) of κ_1 … κ_N; empty if they are learned and were not recorded."""
        fixed = coefficients_of(self.root, self.points.n)
        if fixed is not None:
            return [(kappa, kappa, kappa) for kappa in fixed]
        recorded = {} if norms is None else norms.kappas
        return [recorded[i] for i in sorted(recorded)] if len(recorded) == self.points.n else []
