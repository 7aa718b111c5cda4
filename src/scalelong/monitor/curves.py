"""What the paper's Fig. 1 shows of a norm: a smoothed curve that grows, and the band around it."""

from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

LEAST = 10  # snapshots in which a band is measured; in fewer, the curve's own slope would dominate it
Array = TypeVar("Array")  # a tensor or a NumPy array


class NormCurves(NamedTuple, Generic[Array]):
    """Columns as in the norms, NaN where too few of them are finite.

    smooth  (snapshots, width), the running mean over a twentieth of the snapshots, at least 5
    final   (width,), the mean over the last tenth of training
    growth  (width,), p of norm ∝ step^p, least squares on the logarithms
    band    (width,), the absolute oscillation: root mean square of norm − smooth
    running_band  (snapshots, width), the same over a running window, to draw around `smooth`
    """

    smooth: Array
    final: Array
    growth: Array
    band: Array
    running_band: Array


def norm_curves(steps: Tensor, norms: Tensor, late: Tensor | None = None) -> NormCurves[Tensor]:
    """Separate norms (snapshots, width) of evenly spaced steps into a smooth curve and the band around it.

    Growth and band are those of the snapshots in `late`, by default the second half of training. Snapshots that are
    not finite are ignored.
    """
    late = steps >= steps[-1] / 2 if late is None else late
    norms = torch.where(norms.isfinite(), norms.double(), torch.nan)
    half = max(5, len(norms) // 20) // 2

    def running_mean(rows: Tensor) -> Tensor:
        edge = rows.new_full((half, rows.shape[1]), torch.nan)  # torch 2.8 does not pad rows without columns
        return torch.cat([edge, rows, edge]).unfold(0, 2 * half + 1, 1).nanmean(-1)

    smooth = running_mean(norms)
    squares = (norms - smooth).square()
    enough = squares[late].isfinite().sum(0) >= LEAST
    band = torch.where(enough, squares[late].nanmean(0).sqrt(), torch.nan)
    final = norms[steps >= 0.9 * steps[-1]].nanmean(0)
    return NormCurves(smooth, final, _exponents(steps[late], norms[late]), band, running_mean(squares).sqrt())


def _exponents(steps: Tensor, norms: Tensor) -> Tensor:
    """p of norm ∝ step^p for every column; NaN for fewer than three positive norms, or all at one step."""
    x, y = steps.double().log()[:, None].expand_as(norms), norms.log()
    known = x.isfinite() & y.isfinite()
    x, y = (torch.where(known, values, torch.nan) for values in (x, y))
    x, y = x - x.nanmean(0), y - y.nanmean(0)
    spread = x.square().nansum(0)
    return torch.where((known.sum(0) >= 3) & (spread > 0), (x * y).nansum(0) / spread, torch.nan)
