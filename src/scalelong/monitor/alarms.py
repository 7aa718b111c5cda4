"""Alarms: what is wrong, in which module, at which timesteps, since when, and what the paper's theory advises."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from scalelong.errors import invalid
from scalelong.kappa import choose_kappa, sum_of_squares
from scalelong.monitor.log import Entry, lookup, rounded
from scalelong.monitor.snapshot import Layout, Window, spread, typical
from scalelong.scaling.specs import PAPER_MEAN, ConstantScaling, kappa_notices

GENERAL = "a lower learning rate, a longer warm-up or tighter gradient clipping"


@dataclass(frozen=True)
class Limits:
    """Thresholds of the alarms. All comparisons are within one window of snapshots.

    Attributes:
        growth: From the older to the newer half: of the relative oscillation on the probe (if above half of
            `oscillation`), or of the median jump.
        oscillation: Relative oscillation on the probe in the newer half of the window, whatever it was before.
        spike: Robust standard deviations of log(gradient norm) or log(loss) above the median, which must also exceed
        gradient_factor: times the median gradient norm, or
        loss_factor: times the median loss.
        ratio_growth: Of the skip-to-backbone ratio, from the oldest tenth of the window to the newest tenth.
        looks: Least snapshots (or jumps) per side of a comparison. An alarm that returns within them counts once.

    Examples:
        >>> watch = scalelong.StabilityMonitor(scalelong.StackedUNet(32, 3), limits=scalelong.Limits(spike=10))
        >>> watch.limits.spike
        10
    """

    growth: float = 3.0
    oscillation: float = 0.1
    spike: float = 6.0
    gradient_factor: float = 5.0
    loss_factor: float = 2.0
    ratio_growth: float = 4.0
    looks: int = 10

    def __post_init__(self) -> None:
        for f in fields(self):
            value, least = getattr(self, f.name), 2 if f.name == "looks" else 0
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0 or value < least:
                raise invalid(f"limits: {f.name}", "a number >= 2" if least else "a number > 0", value)


@dataclass(frozen=True)
class Alarm:
    """One thing that is wrong.

    Attributes:
        kind: "nonfinite", "oscillation", "gradient", "loss", "ratio" or "dead".
        step: The step of the alarm.
        since: The step at which it began.
        module: The module it is at.
        what: What is wrong there.
        skip: Index of the long skip, if the alarm is at one.
        hidden: i, if the alarm is about h_i of the paper's Eq. 3.
        times: The range of timesteps in which it is worst, if known.
        value: The measured value.
        reference: The value it is compared with.
        advice: What may help.

    Examples:
        >>> alarm = scalelong.Alarm("loss", step=90, since=80, module="net", what="the loss doubled", value=2.0)
        >>> print(alarm)
        step 90: the loss doubled since step 80.
        >>> alarm.to_dict(is_new=False)
        {'kind': 'loss', 'module': 'net', 'since': 80}
    """

    kind: str
    step: int
    since: int
    module: str
    what: str
    skip: int | None = None
    times: tuple[float, float] | None = None
    value: float | None = None
    reference: float | None = None
    advice: str = ""
    hidden: int | None = None

    def __str__(self) -> str:
        times = "" if self.times is None else f", worst at timesteps {self.times[0]:g} to {self.times[1]:g}"
        since = f" since step {self.since}" if self.since != self.step else ""
        return f"step {self.step}: {self.what}{since}{times}. {self.advice}"

    def to_dict(self, is_new: bool) -> dict[str, Any]:
        """Return the log's form: complete when the alarm begins, then only its name and beginning.

        Args:
            is_new: Whether the alarm begins at this step.

        Returns:
            JSON-ready values.
        """
        if not is_new:
            return {"kind": self.kind, "module": self.module, "since": self.since}
        values = {
            k: v for k, v in asdict(self).items() if v not in (None, "") and k not in ("what", "advice", "hidden")
        }
        values |= {key: rounded(values[key]) for key in ("value", "reference") if key in values}
        return {**values, "text": str(self)}


def find(
    layout: Layout, limits: Limits, entries: Sequence[Entry], window: Window, edges: Sequence[float]
) -> list[Alarm]:
    """Return the alarms at the last entry: at most one of each kind, the worst. They have no advice yet."""
    found = [
        _nonfinite(layout, entries[-1]),
        _oscillation(layout, limits, entries[-1], window, edges),
        _spike(layout, limits, entries, edges, "grad"),
        _spike(layout, limits, entries, edges, "loss"),
        _ratio(layout, limits, entries),
        _dead(layout, entries[-1]),
    ]
    return [alarm for alarm in found if alarm is not None]


def _nonfinite(layout: Layout, entry: Entry) -> Alarm | None:
    bad = entry.get("nonfinite")
    if bad is None:
        return None
    what, skip, hidden = f"the {bad['of']} is not finite", None, 0
    if "point" in bad:
        point = layout.points.all[bad["point"]]
        later = " now; updates may have spread it, every=1 names where it begins"
        late = "" if bad["since"] == entry["step"] else later
        what = f"{point.name} is not finite on the {bad['of']} batch (the first such point{late})"
        skip, hidden = point.skip, point.hidden
    return Alarm("nonfinite", entry["step"], bad["since"], bad["module"], what, skip, hidden=hidden)


def _oscillation(layout: Layout, limits: Limits, entry: Entry, window: Window, edges: Sequence[float]) -> Alarm | None:
    halves = window.halves(limits.looks)
    if halves is None:
        return None
    jumps = [half[:, : layout.points.features] for half in halves]  # on the probe
    (older, newer), (older_typical, newer_typical) = map(spread, jumps), map(typical, jumps)
    # A single jump raises the standard deviation, so the typical jump must have grown as well.
    grown = (newer >= limits.growth * older) & (newer_typical >= limits.growth * older_typical)
    grown &= newer >= 0.5 * limits.oscillation
    over = grown | (newer >= limits.oscillation)
    if not over.any():
        return None
    worst = int(torch.where(over, newer, -math.inf).argmax())
    point, value, before = layout.points.all[worst], float(newer[worst]), float(older[worst])
    change = f"has grown from {before:.3g} to {value:.3g}" if bool(grown[worst]) else f"is {value:.3g}"
    others = int(over.sum()) - 1
    what = f"the relative oscillation of {point.name} {change}" + (f" (and at {others} other points)" if others else "")
    # The timestep bin in which h_i, or the block, oscillates most.
    followed = point.skip if layout.points.n else worst + 1
    spreads, times = window.oscillation(), None
    if followed is not None and spreads is not None:
        times = _worst_bin(edges, spreads[layout.size :].view(-1, layout.bins)[followed - 1])
    reference = before if math.isfinite(before) else None
    step = entry["step"]
    return Alarm(
        "oscillation", step, step, point.module, what, point.skip, times, value, reference, hidden=point.hidden
    )


def _spike(layout: Layout, limits: Limits, entries: Sequence[Entry], edges: Sequence[float], key: str) -> Alarm | None:
    """Compare the largest gradient norm (key "grad") or "loss" since the last snapshot with the window's median."""
    *past, now = [lookup(entry, key, "max") for entry in entries]
    logs = [math.log(value) for value in past if value]
    if not now or len(logs) < limits.looks:
        return None
    median = statistics.median(logs)
    sigma = 1.4826 * statistics.median(abs(value - median) for value in logs)  # robust: exact for a normal law
    above = math.log(now) - median
    kind, name, factor = "loss", "loss", limits.loss_factor
    if key == "grad":
        kind, name, factor = "gradient", "gradient norm", limits.gradient_factor
    if above < math.log(factor) or above < limits.spike * sigma:
        return None
    times = _worst_bin(edges, _over_medians(entries, "loss", "bins"))
    module = layout.points.network
    what = f"the {name} {now:.3g} is {math.exp(above):.3g} times its median over the window"
    if key == "grad" and (worst := _argmax(_over_medians(entries, "grad", "blocks"))) is not None:
        module = layout.points.blocks[worst]
        what += f", and largest in {module} compared with its own median"
    step, since, skip = entries[-1]["step"], entries[-1][key].get("at"), layout.points.skip_of(module)
    return Alarm(kind, step, step if since is None else since, module, what, skip, times, now, math.exp(median))


def _ratio(layout: Layout, limits: Limits, entries: Sequence[Entry]) -> Alarm | None:
    """Compare the skip-to-backbone ratios of the window's newest and oldest tenth."""
    rows = [ratio for entry in entries if (ratio := lookup(entry, "probe", "ratio"))]
    if not layout.points.n or len(rows) < 2 * limits.looks:
        return None
    tenth = max(1, len(rows) // 10)
    growths = []
    for i, column in enumerate(zip(*rows, strict=True), start=1):
        old, new = ([value for value in part if value] for part in (column[:tenth], column[-tenth:]))
        if old and new:
            before, value = statistics.median(old), statistics.median(new)
            growths.append((value / before, i, before, value))
    growth, i, before, value = max(growths, default=(0.0, 0, 0.0, 0.0))
    if growth < limits.ratio_growth:
        return None
    what = f"the ratio of long skip {i} to the backbone it joins has grown from {before:.3g} to {value:.3g}"
    step = entries[-1]["step"]
    return Alarm("ratio", step, step, layout.points.sites[i - 1].path, what, i, None, value, before, hidden=i)


def _dead(layout: Layout, entry: Entry) -> Alarm | None:
    """Report calibration networks whose hidden units are all inactive on the probe."""
    dead = lookup(entry, "kappa", "dead")
    if not dead:
        return None
    kappas = ", ".join(f"κ_{i}" for i in dead)
    what = f"{kappas} of LS {'do' if len(dead) > 1 else 'does'} not depend on the input and cannot learn to"
    step, i = entry["step"], dead[0]
    return Alarm("dead", step, step, layout.points.sites[i - 1].path, what, i, None, float(len(dead)))


def _over_medians(entries: Sequence[Entry], *path: str) -> Tensor:
    """Divide every value of a list in the last entry by the median of its past values; NaN where there is none."""
    *past, now = [lookup(entry, *path) or [] for entry in entries]
    columns = [[row[k] for row in past if k < len(row) and row[k]] for k in range(len(now))]
    pairs = zip(now, columns, strict=True)
    return torch.tensor([value / statistics.median(col) if value and col else math.nan for value, col in pairs])


def _argmax(values: Tensor) -> int | None:
    return None if values.isnan().all() else int(torch.where(values.isnan(), -math.inf, values).argmax())


def _worst_bin(edges: Sequence[float], values: Tensor) -> tuple[float, float] | None:
    k = _argmax(values)
    return None if k is None else (float(edges[k]), float(edges[k + 1]))


def advice(kind: str, skip: int | None, hidden: int | None, coefficients: Sequence[float], kappa: float | None) -> str:
    """Say what the theory advises about an alarm: the Σκ_j² behind it, and a kappa that lowers the sum.

    The alarm is at long skip `skip` and about h_i with i = `hidden`, if any. `coefficients` are κ_1 … κ_N, empty if the
    network has no known long skips; `kappa` is the base of CS, if applied.
    """
    if not coefficients:
        return f"This network has no known long skips, so the theory does not apply; {GENERAL} may help."
    if kind == "dead":
        return (
            'All hidden units of the calibration network are inactive; LearnableScaling(activation="elu") prevents it.'
        )
    i = len(coefficients) if hidden is None else hidden
    scaled = i < len(coefficients)  # a long skip joins before the feature
    if kind == "nonfinite":
        proposal = _proposal(coefficients, kappa, i + 1) if scaled else ""
        return f"{GENERAL.capitalize()} may help, and under fp16 also bf16{proposal and '; '}{proposal}."
    if kind == "gradient":
        block = min(skip or 1, len(coefficients))
        law = f"Theorem 3.3 bounds the squared gradient of block {block} by ℓ·‖x_t‖²·Σκ_j² over j ≥ {block}"
        return f"{law}, here {sum_of_squares(coefficients, block):.3g}; {_remedy(coefficients, kappa, block)}."
    if kind == "loss":
        law = f"Theorem 3.3 bounds the gradient by ℓ·Σκ_j², here Σκ_j² = {sum_of_squares(coefficients):.3g}"
        return f"{law}; {_remedy(coefficients, kappa, 1)}; {GENERAL} may help too."
    if not scaled:
        law = "No long skip joins before this feature, so Theorem 3.1 does not bound its oscillation"
        return f"{law}; the gradient causes it: {_remedy(coefficients, kappa, 1)}."
    law = f"Theorem 3.1: the range of ‖h_{i}‖² is proportional to Σκ_j² over j > {i}"
    return f"{law}, here {sum_of_squares(coefficients, i + 1):.3g}; {_remedy(coefficients, kappa, i + 1)}."


def _remedy(coefficients: Sequence[float], kappa: float | None, start: int) -> str:
    """Propose CS with the recommended kappa if that lowers the sum from `start` on, otherwise the general means."""
    text = _proposal(coefficients, kappa, start) or f"the coefficients are already small, so {GENERAL} may help"
    return "; ".join([text, *(note.text for note in kappa_notices(coefficients, kappa) if note.level == "warning")])


def _proposal(coefficients: Sequence[float], kappa: float | None, start: int) -> str:
    """CS with the recommended kappa, if that lowers the sum from `start` on; otherwise nothing."""
    n, now = len(coefficients), sum_of_squares(coefficients, start)
    _, _, recommended, _ = choose_kappa(PAPER_MEAN, n)
    then = sum_of_squares(ConstantScaling(recommended).coefficients(n), start)
    if n == 1 or then >= 0.9 * now:
        return ""
    change = f"kappa = {recommended:g} instead of {kappa:g}" if kappa else f"ConstantScaling({recommended:g})"
    over = "" if start == 1 else f" over j ≥ {start}"
    return f"{change} makes Σκ_j²{over} {then:.3g} instead of {now:.3g}"
