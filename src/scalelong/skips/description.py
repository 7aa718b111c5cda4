"""Say, from a measurement, where the long skips of a network are, what κ_i is and whether it is felt."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scalelong._modules import evaluating, first_tensor
from scalelong.scaling import NoScaling, Scaling, SkipScaling
from scalelong.skips.application import _root, scaling_of, sites_of
from scalelong.skips.hooks import attach, detach, split_trailing
from scalelong.skips.sites import Site

CANCELLED = 0.2  # less than this share of a change of κ behind the norm: the norm cancels κ
LEGEND = (
    "felt: how the consumer's output moves with κ_i, both relative; past norm: how the skip's own channels do behind it"
)


@dataclass(frozen=True)
class Row:
    """One long skip. What needs an example input is None without one.

    index         i, 1 = outermost
    path, source  the module that consumes the skip, and the one that it comes from
    coefficient   κ_i; for LS its mean over the example
    coefficient_range   LS: the smallest and the largest κ_i on the example
    shape         the skip's shape on the example
    felt          relative change of the consumer's output for a relative change of κ_i (1 = in proportion)
    norm_passes   share of that change that is left behind the norm which sees the join (None: no such norm)
    note          what that means
    """

    index: int
    path: str
    source: str | None = None
    coefficient: float | None = None
    coefficient_range: tuple[float, float] | None = None
    shape: tuple[int, ...] | None = None
    felt: float | None = None
    norm_passes: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Description:
    """The long skips of a network, outermost first; prints as a table."""

    network: str
    scaling: Scaling
    placement: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        measured = any(row.felt is not None for row in self.rows)
        head = ["i", "from", "to", "κ_i", *(["shape", "felt", "past norm"] if measured else [])]
        lines = [head]
        for row in self.rows:
            cells = [str(row.index), row.source or "?", row.path, _kappa(row)]
            if measured:
                shape = "×".join(map(str, row.shape)) if row.shape else "not called"
                cells += [shape, _figure(row.felt), _figure(row.norm_passes)]
            lines.append(cells)
        widths = [max(len(line[c]) for line in lines) for c in range(len(head))]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        table.insert(1, "  ".join("─" * w for w in widths))
        title = f"{self.network}: {len(self.rows)} long skips, {self.scaling}"
        title += f", placement={self.placement!r}" if self.placement != "join" else ""
        notes = dict.fromkeys(row.note for row in self.rows if row.note)
        told = [f"i = {_ranges([row.index for row in self.rows if row.note == note])}: {note}" for note in notes]
        return "\n".join([title, *table, *([LEGEND] if measured else []), *told])

    __repr__ = __str__


def describe(net: nn.Module, *example: Any, **kwargs: Any) -> Description:
    """A table of the network's long skips; with an example input also shapes and whether each κ_i is felt.

    `net(*example, **kwargs)` is run N + 1 times without gradients, in eval mode, and nothing stays behind.
    """
    root = _root(net, wrapped=True)
    sites, placement = sites_of(root)
    scaler = scaling_of(root)
    spec = NoScaling() if scaler is None else scaler.spec
    name = type(root).__name__
    kappas = spec.coefficients(len(sites)) or (None,) * len(sites)
    rows = [
        Row(index=i, path=site.path, source=site.source, coefficient=kappa)
        for i, (site, kappa) in enumerate(zip(sites, kappas, strict=True), start=1)
    ]
    if example or kwargs:
        rows = _measured(root, sites, placement, rows, example, kwargs)
    elif scaler is not None and hasattr(scaler, "kappa") and isinstance(scaler.kappa, nn.Parameter):
        rows = [dataclasses.replace(row, coefficient=k) for row, k in zip(rows, scaler.kappa.tolist(), strict=True)]
    return Description(network=name, scaling=spec, placement=placement, rows=tuple(rows))


class _Nudge(SkipScaling):
    """κ_i ← κ_i·(1 + delta) for one i, and a record of what each skip looks like as it arrives."""

    def __init__(self, index: int | None = None, delta: float = 0.0) -> None:
        super().__init__(NoScaling())
        self.index, self.delta = index, delta
        self.shapes: dict[int, tuple[int, ...]] = {}

    def forward(self, skip: Tensor, i: int) -> float:
        self.shapes[i] = tuple(skip.shape)
        return 1.0 + self.delta if i == self.index else 1.0


@dataclass
class _Seen:
    """What one run of the network showed at each site."""

    outputs: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)
    kappas: dict[int, Tensor] = field(default_factory=dict)


def _measured(
    root: nn.Module,
    sites: list[Site],
    placement: str,
    rows: list[Row],
    example: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Row]:
    delta = 0.01 if _precise(root) else 0.1  # in half precision a smaller step would be rounding
    with torch.no_grad(), evaluating(root):
        plain = _Nudge()
        base = _run(root, sites, placement, plain, range(1, len(sites) + 1), example, kwargs)
        measured = []
        for row, site in zip(rows, sites, strict=True):
            i = row.index
            if i not in plain.shapes:
                measured.append(dataclasses.replace(row, note="this skip was not met on the example"))
                continue
            seen = _run(root, sites, placement, _Nudge(i, delta), [i], example, kwargs)
            felt = _relative_change(seen.outputs.get(i), base.outputs.get(i)) / delta
            passes = None
            if site.norm is not None:
                passes = _relative_change(seen.norms.get(i), base.norms.get(i)) / delta
            row = dataclasses.replace(
                row, shape=plain.shapes[i], felt=felt, norm_passes=passes, note=_note(felt, passes)
            )
            if (kappa := base.kappas.get(i)) is not None and (row.coefficient is None):
                low, high = kappa.min().item(), kappa.max().item()
                row = dataclasses.replace(row, coefficient=kappa.mean().item(), coefficient_range=(low, high))
            measured.append(row)
    return measured


def _run(
    root: nn.Module,
    sites: list[Site],
    placement: str,
    nudge: _Nudge,
    indices: Any,
    example: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Seen:
    """One forward pass with `nudge` acting behind the network's own scaling, in the same place."""
    seen, handles = _Seen(), list[RemovableHandle]()
    attach(root, sites, nudge, placement)
    for i in indices:
        site = sites[i - 1]
        handles.append(root.get_submodule(site.path).register_forward_hook(_Capture(seen.outputs, i)))
        if site.norm is not None:
            capture = _Capture(seen.norms, i, site.channels, site.dim)
            handles.append(root.get_submodule(site.norm).register_forward_hook(capture))
    scaler = scaling_of(root)
    if scaler is not None and scaler.spec.coefficients(len(sites)) is None:
        handles.append(scaler.register_forward_hook(_CaptureKappa(seen.kappas)))
    try:
        root(*example, **kwargs)
    finally:
        detach(root, nudge)
        for handle in handles:
            handle.remove()
    return seen


class _Capture:
    """Keeps a module's output, the first tensor of it (at a norm: the skip's trailing channels only)."""

    def __init__(self, into: dict[int, Tensor], index: int, trailing: int | None = None, dim: int = 1) -> None:
        self.into, self.index, self.trailing, self.dim = into, index, trailing, dim

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        output = first_tensor(output)
        if output is None:
            return
        if self.trailing is not None:
            output = split_trailing(output, self.trailing, self.dim)[1]
        self.into[self.index] = output.detach().double()


class _CaptureKappa:
    def __init__(self, into: dict[int, Tensor]) -> None:
        self.into = into

    def __call__(self, module: nn.Module, args: tuple[Tensor, int], output: Tensor) -> None:
        self.into[args[1]] = output.detach().float()


def _relative_change(after: Tensor | None, before: Tensor | None) -> float:
    if after is None or before is None:
        return float("nan")
    size = before.norm()
    return ((after - before).norm() / size).item() if size > 0 else 0.0


def _note(felt: float, passes: float | None) -> str:
    if passes is not None and passes < CANCELLED:
        rest = "what is felt comes through the shortcut" if felt > 0.01 else "hardly anything is felt"
        return f'the norm behind the join cancels κ_i, {rest}; placement="after_norm" avoids that'
    return "κ_i is hardly felt here" if felt < 0.01 else ""


def _precise(root: nn.Module) -> bool:
    first = next((p for p in root.parameters() if p.is_floating_point()), None)
    return first is None or first.dtype in (torch.float32, torch.float64)


def _kappa(row: Row) -> str:
    if row.coefficient is None:
        return "learned"
    text = f"{row.coefficient:.4g}"
    if row.coefficient_range is not None:
        text += f" ({row.coefficient_range[0]:.3g}…{row.coefficient_range[1]:.3g})"
    return text


def _ranges(indices: list[int]) -> str:
    """1, 2, 3, 5 as "1–3, 5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
