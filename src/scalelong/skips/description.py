"""Describe the long skips of a network: where they are, what κ_i is and, measured, how much it matters."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scalelong._modules import evaluating, first_tensor
from scalelong._text import number
from scalelong.interpolant import as_float64
from scalelong.scaling import NoScaling, Scaling, SkipScaling, parse_scaling
from scalelong.scaling.modules import CalibratedSkips
from scalelong.skips.application import scaled_root, sites_of, unwrapped
from scalelong.skips.hooks import Handle, attach, scaling_of, split_joined
from scalelong.skips.records import KEY, recorded_scaling
from scalelong.skips.sites import ROOT, Site

CANCELLED = 0.2  # if a smaller share of a change of κ_i is left after the norm, the norm cancels κ_i
LEGEND = (
    "felt: relative change of the consumer's output per relative change of κ_i; past norm: the same for the skip's "
    "channels after the norm"
)


@dataclass(frozen=True)
class Row:
    """One long skip. Fields that need an example input are None without one.

    Attributes:
        index: i, 1 = outermost.
        path: The module that consumes the skip.
        source: The module that the skip comes from.
        coefficient: κ_i; for LS its mean over the example.
        coefficient_range: LS: the smallest and the largest κ_i on the example.
        shape: The skip's shape on the example.
        felt: Relative change of the consumer's output per relative change of κ_i (1 = proportional).
        norm_passes: Share of that change left after the norm of the concatenation (None: no such norm).
        gain: Path gain of the skip: relative change of h_0, the output of the outermost skip's consumer, per relative
            change of κ_i.
        note: What that means.
    """

    index: int
    path: str
    source: str | None = None
    coefficient: float | None = None
    coefficient_range: tuple[float, float] | None = None
    shape: tuple[int, ...] | None = None
    felt: float | None = None
    norm_passes: float | None = None
    gain: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Description:
    """The long skips of a network, outermost first. Prints as a table."""

    network: str
    scaling: Scaling
    placement: str
    rows: tuple[Row, ...]
    hint: str = ""  # about the whole network

    @property
    def recommended(self) -> str | None:
        """The placement that the measurement speaks for, "join" or "after_norm"; None without an example."""
        if all(row.felt is None for row in self.rows):
            return None
        passes = [row.norm_passes for row in self.rows]
        cancelled = None not in passes and any(share < CANCELLED for share in passes if share is not None)
        return "after_norm" if cancelled or self.placement == "after_norm" else "join"

    def __str__(self) -> str:
        ran, measured = (any(getattr(row, name) is not None for row in self.rows) for name in ("shape", "felt"))
        columns = ["shape"] * ran + ["felt", "past norm"] * measured
        lines = [["i", "from", "to", "κ_i", *columns]]
        for row in self.rows:
            unknown = "learned" if self.scaling.factor else self.scaling.kind
            kappa = unknown if row.coefficient is None else f"{row.coefficient:.4g}"
            if row.coefficient_range is not None:
                kappa += " ({:.3g}…{:.3g})".format(*row.coefficient_range)
            shape = "×".join(map(str, row.shape)) if row.shape else "not called"
            results = [shape] * ran + [number(row.felt, 3), number(row.norm_passes, 3)] * measured
            lines.append([str(row.index), row.source or "?", row.path, kappa, *results])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        table.insert(1, "  ".join("─" * w for w in widths))
        title = f"{self.network}: {len(self.rows)} long skips, {self.scaling}"
        title += f", placement={self.placement!r}" if self.placement != "join" else ""
        notes = dict.fromkeys(row.note for row in self.rows if row.note)
        notes_by_skip = [f"i = {_ranges([r.index for r in self.rows if r.note == note])}: {note}" for note in notes]
        advice = [f"recommended: placement={self.recommended!r}"] if measured else []
        legend, hint = [LEGEND] if measured else [], [self.hint] if self.hint else []
        return "\n".join([title, *table, *legend, *notes_by_skip, *advice, *hint])

    __repr__ = __str__


def describe(net: nn.Module, *example: Any, **kwargs: Any) -> Description:
    """Return a table of the network's long skips; with an example input also shapes and the effect of each κ_i.

    `net(*example, **kwargs)` runs N + 1 times in eval mode without gradients. Nothing is left behind.

    Args:
        net: The network, scaled or not.
        *example: The arguments of one call.
        **kwargs: Its keyword arguments.

    Returns:
        The long skips in `.rows`, outermost first. Prints as a table.

    Examples:
        >>> print(scalelong.describe(scalelong.StackedUNet(32, 3, scaling=scalelong.ConstantScaling(0.5))))
        StackedUNet: 3 long skips, ConstantScaling(kappa=0.5, reverse=False)
        i  from        to          κ_i
        ─  ──────────  ──────────  ────
        1  encoders.0  decoders.0  1
        2  encoders.1  decoders.1  0.5
        3  encoders.2  decoders.2  0.25
    """
    outer, root = unwrapped(net, allow_wrappers=True), scaled_root(net)
    sites, placement = sites_of(root)
    scaler = scaling_of(root)
    spec = NoScaling() if scaler is None else scaler.spec
    kappas: Any = spec.coefficients(len(sites))
    if kappas is None:  # learned: only scalars are known without an example
        scalars = None if scaler is None else scaler.scalars()
        kappas = scalars if scalars is not None and not (example or kwargs) else [None] * len(sites)
    rows = [
        Row(index=i, path=site.path, source=site.source, coefficient=kappa)
        for i, (site, kappa) in enumerate(zip(sites, kappas, strict=True), start=1)
    ]
    if example or kwargs:
        x = first_tensor([*example, *kwargs.values()])
        with evaluating(outer, batch_statistics=x is not None and len(x) > 1):  # κ_i acts on what training computes
            rows = measure_rows(rows, root, sites, placement, lambda: outer(*example, **kwargs))
    hint = ""
    if scaler is None and (recorded := recorded_scaling(root)) is not None:
        former = parse_scaling(recorded.get("scaling"))
        hint = f"saved while scaled with {former}, which is not applied: scalelong.apply(net, **net.config['{KEY}'])"
    if scaler is not None and scaler.moved is not None:
        hint = f"measured on an example, this start moves the output by {scaler.moved:.3g} of its norm"
    for part in () if scaler is None else scaler.conditioners:
        text = f"the features of {part.spec.block} condition {', '.join(part.targets)}"
        hint = "; ".join(filter(None, [hint, text]))
    return Description(type(root).__name__, spec, placement, tuple(rows), hint)


class _Nudge(SkipScaling):
    """Multiplies κ_i by 1 + delta for one i, and keeps what the pass recorded, by skip index."""

    def __init__(self, index: int | None = None, delta: float = 0.0) -> None:
        super().__init__(NoScaling())
        self.index, self.delta = index, delta
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.outputs: dict[int, Tensor] = {}  # of the consumers
        self.norms: dict[int, Tensor] = {}
        self.kappas: dict[int, Tensor] = {}  # learned ones
        self.dead: dict[int, bool] = {}  # whether a calibration network ignores its input

    def forward(self, skip: Tensor, i: int) -> float:
        self.shapes[i] = tuple(skip.shape)
        return 1.0 + self.delta if i == self.index else 1.0


def measure_rows(
    rows: list[Row], root: nn.Module, sites: list[Site], placement: str, call: Callable[[], Any]
) -> list[Row]:
    """Add what a nudge of each κ_i, after the network's own scaling and at the same place, does on the example."""
    first = next((p for p in root.parameters() if p.is_floating_point()), None)
    exact = first is None or first.dtype in (torch.float32, torch.float64)
    delta = 0.01 if exact else 0.1  # in half precision a smaller step would drown in rounding
    measured, plain = [], _Nudge()
    with torch.no_grad():
        _run(plain, root, sites, placement, call)
        if first is not None and first.is_meta:  # shapes, but no values
            return [dataclasses.replace(row, shape=plain.shapes.get(row.index)) for row in rows]
        for row, site in zip(rows, sites, strict=True):
            i, shape = row.index, plain.shapes.get(row.index)
            if shape is None:
                measured.append(dataclasses.replace(row, note="the example did not use this skip"))
                continue
            nudged, passes = _Nudge(i, delta), None
            _run(nudged, root, sites, placement, call)
            felt = _relative_change(nudged.outputs.get(i), plain.outputs.get(i)) / delta
            gain = _relative_change(nudged.outputs.get(1), plain.outputs.get(1)) / delta
            if site.norm is not None:
                passes = _relative_change(nudged.norms.get(i), plain.norms.get(i)) / delta
            results = {"shape": shape, "felt": felt, "norm_passes": passes, "gain": gain}
            row = dataclasses.replace(row, **results, note=_note(felt, passes))  # type: ignore[arg-type]
            if plain.dead.get(i):
                note = "κ_i does not depend on the input and gets no gradient: all hidden units of its calibration "
                note += "network are inactive (the default LearnableScaling() prevents that)"
                row = dataclasses.replace(row, note=note)
            if row.coefficient is None and (kappa := plain.kappas.get(i)) is not None:
                low, high = kappa.min().item(), kappa.max().item()
                row = dataclasses.replace(row, coefficient=kappa.mean().item(), coefficient_range=(low, high))
            measured.append(row)
    return measured


def _run(nudge: _Nudge, root: nn.Module, sites: list[Site], placement: str, call: Callable[[], Any]) -> None:
    handles, scaler = list[Handle](), scaling_of(root)
    try:
        handles += attach(root, sites, nudge, placement=placement)
        for i, site in enumerate(sites, start=1):
            if nudge.index not in (None, i) and i != 1:
                continue
            consumer = root if site.path == ROOT else root.get_submodule(site.path)
            handles.append(consumer.register_forward_hook(partial(_keep, nudge.outputs, i, None)))
            if site.norm is not None:
                keep = partial(_keep, nudge.norms, i, site)
                handles.append(root.get_submodule(site.norm).register_forward_hook(keep))
        if scaler is not None and scaler.is_factor and scaler.spec.coefficients(len(sites)) is None:
            handles.append(scaler.register_forward_hook(partial(_keep_kappa, nudge)))
        call()
    finally:
        for handle in handles:
            handle.remove()


def _keep_kappa(nudge: _Nudge, scaler: nn.Module, args: tuple[Tensor, int], kappa: Tensor) -> None:
    skip, i = args
    nudge.kappas[i] = kappa.detach().float()
    if nudge.index is None and isinstance(scaler, CalibratedSkips) and not skip.is_meta:
        nudge.dead[i] = bool(scaler.is_dead(skip, i))


def _keep(into: dict[int, Tensor], i: int, site: Site | None, *call: Any) -> None:
    """Keep the first tensor of a module's output; at a norm only the skip's channels. `call` ends with the output."""
    if (output := first_tensor(call[-1])) is not None:
        if site is not None and site.channels is not None:
            _, output = split_joined(output, site.channels, site.dim, site.leading)
        into[i] = as_float64(output.detach())


def _relative_change(after: Tensor | None, before: Tensor | None) -> float:
    if after is None or before is None:
        return float("nan")
    size = before.norm()
    return ((after - before).norm() / size).item() if size > 0 else 0.0


def _note(felt: float, passes: float | None) -> str:
    if passes is not None and passes < CANCELLED:
        rest = "only the shortcut passes it on" if felt > 0.01 else "it has almost no effect"
        return f'the norm after the join cancels κ_i, {rest}; placement="after_norm" avoids that'
    return "κ_i has almost no effect" if felt < 0.01 else ""


def _ranges(indices: list[int]) -> str:
    """Format 1, 2, 3, 5 as "1–3, 5"."""
    grouped = itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0])  # constant within a run
    runs = [[str(index) for _, index in run] for _, run in grouped]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)
