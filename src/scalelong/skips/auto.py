"""κ of `ConstantScaling("auto")`: the data's range, narrowed by what the network shows before it is trained.

A heuristic. Theorem 3.1 weighs all long skips alike; in a network the path gain g_i of skip i, the relative change of
h_0 per relative change of κ_i, falls towards the inner ones. Three measurements on one example input narrow the range
of κ that the data gives:

- above `high`, CS moves h_0 by less than FELT: sqrt(Σ g_i² (1 − κ^(i−1))²) to first order. It would be no scaling;
- below `low`, the innermost skip is less than SMALLEST of the backbone that it joins: it would be cut;
- between both, κ is where Σκ² is the geometric mean of its values at the ends: the rule of `estimate_kappa`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong._modules import first_tensor, leave_no_trace
from scalelong.errors import UnsupportedNetworkError, invalid
from scalelong.interpolant import as_float64
from scalelong.scaling import ConstantScaling
from scalelong.scaling.base import SMALLEST
from scalelong.scaling.sums import choose_kappa, cs_sum, kappa_for_sum, rounded_within
from scalelong.skips.description import Row, measure_rows
from scalelong.skips.found import as_call
from scalelong.skips.hooks import Handle, attach
from scalelong.skips.sites import Site

FELT = 0.05


@dataclass(frozen=True)
class AutoKappa:
    """The kappa that `auto` chose, and why.

    Attributes:
        kappa, reason: The choice.
        low, high: The range that data and network leave.
        recommended, mean_ratio: What the data alone recommends, and its mean of ‖ε‖²/‖x_t‖² (Section 4.1).
        gains: g_1…g_N, path gains of the skips.
        ratios: ‖x_i‖/‖h_i‖ where skip i joins the backbone; None where the backbone is not known.
        moved: Relative change of h_0 between kappa = 1 and this one, to first order.
    """

    kappa: float
    reason: str
    low: float
    high: float
    recommended: float
    mean_ratio: float
    gains: tuple[float, ...]
    ratios: tuple[float | None, ...]
    moved: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def auto_scaling(root: nn.Module, sites: Sequence[Site], placement: str, example: Any) -> ConstantScaling:
    """Resolve `ConstantScaling("auto")` from the arguments of one call. ‖ε‖²/‖x_t‖² is that of its input, ‖ε‖² = m."""
    args, kwargs = as_call(root, example)
    x = first_tensor([*args, *kwargs.values()])
    norms = None if x is None else as_float64(x.detach()).flatten(1).square().mean(1)  # ‖x_t‖²/m, (B,)
    if norms is None or not bool((norms > 0).all()) or not bool(norms.isfinite().all()):
        raise invalid(
            "example", 'a noisy training batch (x, t) for kappa="auto"', "an input that is zero or not finite"
        )
    found = auto_kappa(root, sites, placement, lambda: root(*args, **kwargs), float((1 / norms).mean()))
    return ConstantScaling(found.kappa)


def auto_kappa(
    root: nn.Module, sites: Sequence[Site], placement: str, call: Callable[[], Any], mean_ratio: float
) -> AutoKappa:
    """Choose kappa for an unscaled network.

    Args:
        call: Runs the network once, on noisy training images.
        mean_ratio: Mean of ‖ε‖²/‖x_t‖², or of target to input, over the data.
    """
    n = len(sites)
    low, high, recommended, reason = choose_kappa(mean_ratio, n)
    with leave_no_trace(root, batch_statistics=True):
        found = _join_ratios(root, list(sites), call)
        rows = measure_rows([Row(i, s.path) for i, s in enumerate(sites, 1)], root, list(sites), placement, call)
    gains = tuple(row.gain or 0.0 for row in rows)
    ratios = tuple(found.get(i) for i in range(1, n + 1))

    def moved(kappa: float) -> float:
        return math.sqrt(math.fsum((g * (1 - kappa**k)) ** 2 for k, g in enumerate(gains)))

    kappa = recommended
    if moved(low) < FELT:
        reason += f"; this network hardly feels CS: h_0 moves by {moved(low):.1%} at most (describe says why)"
    elif low < high:
        if inner := ratios[-1]:
            low = min(max(low, (SMALLEST / inner) ** (1 / (n - 1))), high)
        high = max(low, min(high, _largest(lambda kappa: moved(kappa) >= FELT)))
        total = math.sqrt(cs_sum(low, n) * cs_sum(high, n))
        kappa = rounded_within(min(max(kappa_for_sum(total, n), low), high), low, high)
        reason = f"Σκ² = {cs_sum(kappa, n):.2f} is the geometric middle of kappa = {low:.2f} and {high:.2f}; "
        reason += f"the data alone recommends {recommended:g}"
    return AutoKappa(kappa, reason, low, high, recommended, mean_ratio, gains, ratios, moved(kappa))


def _largest(holds: Callable[[float], bool]) -> float:
    """Return the largest kappa in [0, 1] at which a decreasing condition holds, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _join_ratios(root: nn.Module, sites: list[Site], call: Callable[[], Any]) -> dict[int, float]:
    """Return ‖x_i‖/‖h_i‖ of every join whose two tensors are known."""
    joins, handles = _Joins(), list[Handle]()
    try:
        handles += attach(root, sites, joins)
        call()
    except UnsupportedNetworkError:  # a skip comes without its backbone
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return joins.ratios


class _Joins:
    """Records the ratio of the two tensors of a join and leaves them as they are."""

    two_sided, spec = True, ConstantScaling(1.0)
    joins = spec.joins

    def __init__(self) -> None:
        self.ratios: dict[int, float] = {}

    def join(self, skip: Tensor, backbone: Tensor, i: int) -> tuple[Tensor, Tensor]:
        sizes = [float(torch.linalg.vector_norm(tensor.detach().float())) for tensor in (skip, backbone)]
        if sizes[1] > 0:
            self.ratios[i] = sizes[0] / sizes[1]
        return skip, backbone
