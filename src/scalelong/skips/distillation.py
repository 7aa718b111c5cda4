"""Distill LS: the κ_i that its calibration networks compute, averaged over data and time, become constants."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong._modules import first_tensor, leave_no_trace
from scalelong._text import number
from scalelong.errors import ScalingStateError, invalid
from scalelong.interpolant import as_float64
from scalelong.scaling import ExplicitScaling
from scalelong.skips.application import apply_quietly, scaled_root
from scalelong.skips.found import as_call
from scalelong.skips.hooks import scaling_of
from scalelong.skips.sites import declared_sites

Losses = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class DistilledSkip:
    """κ_i of one long skip as LS computed it.

    Attributes:
        index: i, 1 = outermost.
        coefficient: Its mean over inputs and gated tokens or channels: the constant that replaces it.
        spread: Its standard deviation over all of them, which is lost.
        spread_over_inputs: The part of it that depends on the input (image and time): of the mean of each input.
        low, high: The smallest and the largest value.
    """

    index: int
    coefficient: float
    spread: float
    spread_over_inputs: float
    low: float
    high: float


@dataclass(frozen=True)
class Distillation:
    """The result of `distill`. Prints as a table.

    Attributes:
        scaling: The constants.
        skips: What each of them replaces.
        inputs: Number of inputs that were averaged.
        output_change: Relative change of the network's output; None without examples.
        losses_before, losses_after: With LS and with the constants, one per sample (or example); empty without `loss`.
    """

    scaling: ExplicitScaling
    skips: tuple[DistilledSkip, ...]
    inputs: int
    output_change: float | None = None
    losses_before: tuple[float, ...] = ()
    losses_after: tuple[float, ...] = ()

    @property
    def loss_change(self) -> float | None:
        """Mean loss with the constants minus that with LS."""
        pairs = list(zip(self.losses_after, self.losses_before, strict=True))
        return math.fsum(after - before for after, before in pairs) / len(pairs) if pairs else None

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"scaling": self.scaling.to_dict(), "loss_change": self.loss_change}
        return {key: value for key, value in values.items() if not key.startswith("losses_")}

    def __str__(self) -> str:
        lines = ["i  κ_i      spread   over inputs  range"]
        for s in self.skips:
            cells = (number(value, 3).ljust(7) for value in (s.coefficient, s.spread, s.spread_over_inputs))
            lines.append(f"{s.index:<2} {'  '.join(cells)}      {s.low:.3g} … {s.high:.3g}")
        if self.output_change is not None:
            lines.append(f"the output moves by {self.output_change:.3g} of its norm, over {self.inputs} inputs")
        if (change := self.loss_change) is not None:
            lines.append(
                f"mean loss {math.fsum(self.losses_before) / len(self.losses_before):.4g}, change {change:+.3g}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def distill(net: nn.Module, examples: Iterable[Any] = (), *, loss: Losses | None = None) -> Distillation:
    """Replace LS by constants in place: κ_i averaged over examples. Returns them and what is lost.

    Args:
        net: A trained network that is scaled with `LearnableScaling`.
        examples: Arguments of calls, as `apply` takes one, or functions that call the network: noisy training batches
            `(x, t)` over all times. LS with `calibration="scalar"` needs none, because its κ_i depends on nothing.
        loss: `loss(net, example)` returns the loss of each sample, or of the batch. It is called on every example
            before and after.

    Returns:
        The constants, the spread of κ_i that they lose, and the change in output and loss.

    Example:
        >>> net = scalelong.UViT(img_size=8, embed_dim=32, depth=4, num_heads=2, scaling="ls").eval()
        >>> batches = [(torch.randn(4, 3, 8, 8), torch.linspace(1, 999, 4)) for _ in range(2)]
        >>> result = scalelong.distill(net, batches)
        >>> result.scaling == scalelong.ExplicitScaling([skip.coefficient for skip in result.skips])
        True
    """
    root = scaled_root(net)
    scaler = scaling_of(root)
    if scaler is None or not scaler.spec.distills:
        got = "an unscaled network" if scaler is None else str(scaler.spec)
        raise ScalingStateError(f"distill needs a network scaled with LearnableScaling, got {got}")
    calls = list(examples) if isinstance(examples, Iterator) else examples
    records = [_Record() for _ in scaler.sites]
    outputs, before = _pass(root, calls, loss, lambda: scaler.register_forward_hook(_keep(records)))
    scalars = scaler.scalars()
    if outputs is None and scalars is None:
        hint = "only calibration='scalar' needs none"
        raise invalid("examples", f"one or more calls (x, t), on which {scaler.spec} computes κ_i", [], hint)
    skips = tuple(
        DistilledSkip(i, scalars[i - 1], 0.0, 0.0, scalars[i - 1], scalars[i - 1]) if scalars else record.skip(i)
        for i, record in enumerate(records, start=1)
    )
    spec = ExplicitScaling([skip.coefficient for skip in skips])
    sites = scaler.sites if declared_sites(root) is None else None
    apply_quietly(root, spec, sites=sites, placement=scaler.placement, replace=True)
    moved, after = _pass(root, calls, loss)
    change = None if outputs is None or moved is None else float((moved - outputs).norm() / outputs.norm())
    return Distillation(spec, skips, records[0].inputs if records else 0, change, before, after)


class _Record:
    """Running sums of κ_i."""

    def __init__(self) -> None:
        self.inputs, self.units, self.total, self.squares, self.by_input = 0, 0, 0.0, 0.0, 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, kappa: Tensor) -> None:
        rows = as_float64(kappa.detach()).flatten(1)  # (B, tokens or channels)
        self.inputs, self.units = self.inputs + len(rows), self.units + rows.numel()
        self.total, self.squares = self.total + float(rows.sum()), self.squares + float(rows.square().sum())
        self.by_input += float(rows.mean(1).square().sum())
        self.low, self.high = min(self.low, float(rows.min())), max(self.high, float(rows.max()))

    def skip(self, i: int) -> DistilledSkip:
        if not self.units:
            raise invalid("examples", f"calls that use long skip {i}", "calls that do not")
        mean = self.total / self.units
        spread, over_inputs = (
            max(0.0, squares / n - mean**2) ** 0.5
            for squares, n in ((self.squares, self.units), (self.by_input, self.inputs))
        )
        return DistilledSkip(i, mean, spread, over_inputs, self.low, self.high)


def _keep(records: list[_Record]) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Tensor, int], kappa: Tensor) -> None:
        if kappa.ndim:  # a scalar parameter has no axis of inputs
            records[args[1] - 1].add(kappa)

    return hook


def _pass(
    root: nn.Module, calls: Iterable[Any], loss: Losses | None, watch: Callable[[], Any] | None = None
) -> tuple[Tensor | None, tuple[float, ...]]:
    """Run all calls. Returns their outputs and losses; `watch` registers a hook for the calls alone."""
    outputs, losses = list[Tensor](), list[float]()
    with leave_no_trace(root):
        for call in calls:
            args, kwargs = ((), {}) if callable(call) else as_call(root, call)
            handle = watch() if watch else None
            returned = call() if callable(call) else root(*args, **kwargs)
            if handle is not None:
                handle.remove()
            output = first_tensor(list(returned.values()) if hasattr(returned, "keys") else returned)
            assert output is not None
            outputs.append(as_float64(output.detach()).flatten().cpu())
            if loss is not None:
                losses += as_float64(loss(root, call)).detach().flatten().tolist()
    return torch.cat(outputs) if outputs else None, tuple(losses)
