"""Modules of the methods in `methods.py`. Those that need both tensors of a join are called with the backbone too."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.errors import UnsupportedNetworkError
from scalelong.scaling.base import Scaling, SkipShape
from scalelong.scaling.methods import (
    ComposedScaling,
    FreeU,
    GatedScaling,
    LerpScaling,
    MagnitudePreserving,
    NormScaling,
    SelfConditioning,
    SkipAdapter,
    SkipTuning,
)
from scalelong.scaling.modules import FixedSkips, SkipScaling, TunableSkips

EPS = 1e-6  # of the norms, as in Hunyuan-DiT


class NormSkips(SkipScaling):
    """gain·norm(s) + offset, or the same of [x, s]; the statistics are over the channels at every position."""

    spec: NormScaling

    def __init__(self, spec: NormScaling, shapes: Sequence[SkipShape]) -> None:
        super().__init__(spec)
        self.two_sided = spec.over == "both"
        self.dims = tuple(shape.dim for shape in shapes)
        self.gains, self.offsets = nn.ParameterList(), nn.ParameterList()
        for i, shape in enumerate(shapes if spec.gain == "learned" else (), start=1):
            if shape.channels is None or (self.two_sided and shape.backbone is None):
                hint = "pass apply an example=(x, t), or gain=1.0"
                raise UnsupportedNetworkError(f"a learned gain requires the width of the join of long skip {i}; {hint}")
            width = shape.channels + (shape.backbone or 0 if self.two_sided else 0)
            self.gains.append(nn.Parameter(torch.ones(width)))
            if spec.norm == "layer":
                self.offsets.append(nn.Parameter(torch.zeros(width)))

    def forward(self, skip: Tensor, i: int, backbone: Tensor | None = None) -> Any:
        dim = self.dims[i - 1]
        if backbone is None:
            return self._normed(skip, i, dim)
        joined = self._normed(torch.cat([backbone, skip.to(backbone.dtype)], dim=dim), i, dim)
        x, s = joined.split([backbone.shape[dim], skip.shape[dim]], dim=dim)
        return s, x

    def _normed(self, x: Tensor, i: int, dim: int) -> Tensor:
        normed = _centered(x, dim, self.spec.norm)
        normed = normed * torch.rsqrt(normed.square().mean(dim, keepdim=True) + EPS)
        if not self.gains:
            return (normed * float(self.spec.gain)).to(x.dtype)
        shape = [1] * x.ndim
        shape[dim] = -1
        normed = normed * self.gains[i - 1].view(shape)
        return (normed + self.offsets[i - 1].view(shape) if len(self.offsets) else normed).to(x.dtype)

    @torch.no_grad()
    def observe(self, skip: Tensor, backbone: Tensor | None, i: int) -> None:
        """Set gain and offset such that the normalized tensors have the size and the mean of these."""
        dim = self.dims[i - 1]
        x = skip if backbone is None else torch.cat([backbone, skip.to(backbone.dtype)], dim=dim)
        centered = _centered(x, dim, self.spec.norm)
        self.gains[i - 1].fill_(centered.square().mean().sqrt().item())
        if len(self.offsets):
            self.offsets[i - 1].fill_((x - centered).mean().item())


def _centered(x: Tensor, dim: int, norm: str) -> Tensor:
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return x - x.mean(dim, keepdim=True) if norm == "layer" else x


class MagnitudePreservingSkips(SkipScaling):
    """w_x and w_s from the widths of the two tensors."""

    spec: MagnitudePreserving
    two_sided = True

    def forward(self, skip: Tensor, i: int, backbone: Tensor) -> tuple[Tensor, Tensor]:
        dim = self.sites[i - 1].dim if self.sites else 1
        w_x, w_s = mp_weights(backbone.shape[dim], skip.shape[dim], self.spec.t)
        return skip * w_s, backbone * w_x


def mp_weights(n_x: int, n_s: int, t: float) -> tuple[float, float]:
    """Return EDM2's w_x and w_s for widths N_x and N_s."""
    c = math.sqrt((n_x + n_s) / ((1 - t) ** 2 + t**2))
    return c * (1 - t) / math.sqrt(n_x), c * t / math.sqrt(n_s)


class GatedSkips(SkipScaling):
    """κ_i = g_i = exp(ζ_i)."""

    def __init__(self, spec: GatedScaling, n: int) -> None:
        super().__init__(spec)
        self.log_gate = nn.Parameter(torch.zeros(n))

    def forward(self, skip: Tensor, i: int) -> Tensor:
        return self.log_gate[i - 1].exp().to(skip.dtype)

    def scalars(self) -> tuple[float, ...] | None:
        return None if self.log_gate.is_meta else tuple(self.log_gate.detach().exp().tolist())


class LerpSkips(SkipScaling):
    """(1 − f_i)·s and f_i·x, which the join adds."""

    two_sided = True

    def __init__(self, spec: LerpScaling, n: int) -> None:
        super().__init__(spec)
        self.weight = nn.Parameter(torch.full((n,), spec.weight))

    def forward(self, skip: Tensor, i: int, backbone: Tensor) -> tuple[Tensor, Tensor]:
        f = self.weight[i - 1].to(skip.dtype)
        return skip * (1 - f), backbone * f


class AdapterSkips(SkipScaling):
    """s + W₂·GELU(W₁·s), one pair of matrices per skip."""

    def __init__(self, spec: SkipAdapter, shapes: Sequence[SkipShape]) -> None:
        super().__init__(spec)
        self.dims = tuple(shape.dim for shape in shapes)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for i, shape in enumerate(shapes, start=1):
            if shape.channels is None:
                raise UnsupportedNetworkError(f"SkipAdapter requires the channels of long skip {i}; pass an example")
            rank = min(spec.rank, shape.channels)
            self.down.append(nn.Linear(shape.channels, rank, bias=False))
            self.up.append(nn.Linear(rank, shape.channels, bias=False))
            nn.init.zeros_(self.up[-1].weight)  # type: ignore[arg-type]

    def forward(self, skip: Tensor, i: int) -> Tensor:
        dim = self.dims[i - 1]
        down, up = self.down[i - 1], self.up[i - 1]
        dtype = next(down.parameters()).dtype  # may not be the skip's
        hidden = nn.functional.gelu(down(skip.movedim(dim, -1).to(dtype)))
        return skip + up(hidden).movedim(-1, dim).to(skip.dtype)


class TimedSkips(FixedSkips):
    """ρ_i while the timestep of the pass is within a range, 1 otherwise. Hooks on the network set `active`."""

    spec: SkipTuning
    timed = True
    active: Tensor | None = None  # (B,) of 0 and 1

    def __init__(self, spec: SkipTuning, coefficients: tuple[float, ...]) -> None:
        super().__init__(spec, coefficients)
        assert spec.timesteps is not None
        self.range = TunableSkips(spec, spec.timesteps)

    def set(self, spec: Scaling, n: int) -> None:
        if not isinstance(spec, SkipTuning) or spec.timesteps is None:
            raise UnsupportedNetworkError(f"{self.spec} acts within a range of timesteps, which {spec} does not have")
        super().set(spec, n)
        self.range.write(spec.timesteps)

    def observe_timestep(self, t: Tensor | float) -> None:
        """Record which samples of a pass are within the range."""
        t = torch.as_tensor(t).reshape(-1).float()
        self.active = (t >= self.range.value(0)) & (t <= self.range.value(1))

    def forget_timestep(self) -> None:
        self.active = None

    def forward(self, skip: Tensor, i: int) -> Tensor:
        if self.active is None:
            raise UnsupportedNetworkError(f"{self.spec} has not seen a timestep: call the network, not a part of it")
        active = self.active.to(skip.device)
        if len(active) > 1:  # frames of a video are in the batch of a skip
            active = active.repeat_interleave(skip.shape[0] // len(active))
        kappa = 1.0 + (self.value(i - 1) - 1.0) * active.float()
        return kappa.view(-1, *[1] * (skip.ndim - 1)).to(skip.dtype)


class FreeUSkips(TunableSkips):
    """b on half of the backbone's channels, s on the skip's lowest frequencies, in two stages."""

    spec: FreeU
    two_sided = True

    def __init__(self, spec: FreeU, shapes: Sequence[SkipShape]) -> None:
        super().__init__(spec, spec.factors)
        self.shapes = tuple(shapes)
        self.sizes: tuple[Any, Any] = (None, None)  # of the two stages; every pass starts with the innermost skip

    def set(self, spec: Scaling, n: int) -> None:
        if not isinstance(spec, FreeU) or spec.version != self.spec.version:
            raise UnsupportedNetworkError(f"{self.spec} can be changed to other factors of its version, not to {spec}")
        self.spec = spec
        self.write(spec.factors)

    def forward(self, skip: Tensor, i: int, backbone: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shapes[i - 1]
        s, x = (_as_map(y, shape.dim, shape.extras, i) for y in (skip, backbone))  # (B, C, …)
        stage = self._stage(s, i)
        if stage > 1:
            return skip, backbone
        b, low = self.value(stage), self.value(2 + stage)
        amplified = x * (b if self.spec.version == 1 else _gain(x, b))
        half = x.shape[1] // 2
        x = torch.cat([amplified[:, :half], x[:, half:]], dim=1)
        s = filtered(s, low)
        return _from_map(s, skip, shape), _from_map(x, backbone, shape)

    def _stage(self, s: Tensor, i: int) -> int:
        """Return 0 for the innermost stage, 1 for the next: by resolution, for tokens by skip."""
        if self.shapes[i - 1].extras is not None and self.sites and self.sites[i - 1].dim == -1:
            return len(self.shapes) - i
        size = tuple(s.shape[2:])
        if i == len(self.shapes):  # written before it is read, so that a compiled graph does not depend on it
            self.sizes = (size, None)
        first, second = self.sizes
        if size != first and second is None:
            self.sizes = (first, second := size)
        return 0 if size == first else 1 if size == second else 2


def _gain(x: Tensor, b: Any) -> Tensor:
    """Return version 2's factor: from 1 where the mean over the channels is smallest to b where it is largest."""
    mean = x.mean(1, keepdim=True)  # (B, 1, …)
    low, high = (f(mean.flatten(1), dim=1).view(-1, *[1] * (x.ndim - 1)) for f in (torch.amin, torch.amax))
    return 1 + (b - 1) * (mean - low) / (high - low).clamp(min=torch.finfo(x.dtype).tiny)


def filtered(x: Tensor, s: Any) -> Tensor:
    """Multiply the frequencies −1 and 0 along every axis after the channels by s (FreeU's filter, threshold 1)."""
    wide = x if x.dtype is torch.float64 else x.float()
    dims = list(range(2, x.ndim))
    low = torch.ones((), dtype=wide.dtype, device=x.device)
    for k in dims:
        near = torch.zeros(x.shape[k], dtype=wide.dtype, device=x.device)
        near[0] = near[-1] = 1.0
        low = low[..., None] * near
    spectrum = torch.fft.fftn(wide, dim=dims) * (1 + (s - 1) * low)
    return torch.fft.ifftn(spectrum, dim=dims).real.to(x.dtype)


def _as_map(x: Tensor, dim: int, extras: int | None, i: int) -> Tensor:
    """Return features as (B, C, …): tokens after the extra ones as a square map."""
    if x.ndim < 3:
        raise UnsupportedNetworkError(f"FreeU filters a map of features; long skip {i} has shape {tuple(x.shape)}")
    if dim % x.ndim == 1:
        return x
    if x.ndim > 3:  # (B, H, W, C)
        return x.movedim(dim, 1)
    patches = x.shape[1] - (extras or 0)
    side = math.isqrt(max(0, patches))
    if side * side != patches:
        raise UnsupportedNetworkError(f"FreeU needs a square map of patches; long skip {i} has {patches} patches")
    return x[:, extras or 0 :].transpose(1, 2).reshape(len(x), -1, side, side)


def _from_map(x: Tensor, like: Tensor, shape: SkipShape) -> Tensor:
    if shape.dim % like.ndim == 1:
        return x
    if like.ndim > 3:
        return x.movedim(1, shape.dim)
    return torch.cat([like[:, : shape.extras or 0], x.flatten(2).transpose(1, 2)], dim=1)


class ConditionedSkips(SkipScaling):
    """κ_i = 1, and W·features of one block in the conditioning of later ones (`skips/conditioning.py`)."""

    spec: SelfConditioning
    features: Tensor | None = None  # (B, C) of this pass, until the last block that they condition

    @property
    def conditioners(self) -> tuple[SkipScaling, ...]:  # type: ignore[override]
        return (self,)

    def bind(self, targets: tuple[str, ...], features: int, width: int, token: int | None) -> None:
        """Make W for the blocks `targets` of a network; `token` is the time token's position, None for an embedding."""
        self.targets, self.token = targets, token
        self.projection = nn.Linear(features, width, bias=False)
        nn.init.zeros_(self.projection.weight)

    def forward(self, skip: Tensor, i: int) -> float:
        return 1.0

    def scalars(self) -> None:
        return None  # the network is not that of κ alone

    def enter(self, path: str, x: Tensor) -> Tensor:
        """Condition a block's time embedding (B, D), or the time token among its tokens (B, L, D)."""
        if path not in self.targets:
            return x
        if self.features is None:
            raise UnsupportedNetworkError(
                f"{self.spec} has no features of this pass: call the network, not a part of it"
            )
        c = self.projection(self.features).to(x.dtype)  # (B, D)
        if path == self.targets[-1]:
            self.features = None  # which would keep the graph of the pass
        if self.token is None:
            return x + c
        k = self.token
        return torch.cat([x[:, :k], (x[:, k] + c)[:, None], x[:, k + 1 :]], dim=1)


class ComposedSkips(SkipScaling):
    """The modules of several specs, one after the other."""

    spec: ComposedScaling

    def __init__(self, spec: ComposedScaling, shapes: Sequence[SkipShape]) -> None:
        super().__init__(spec)
        self.parts = nn.ModuleList(part.build(shapes) for part in spec.scalings)
        self.two_sided = any(part.two_sided for part in self._modules_of())

    def _modules_of(self) -> list[SkipScaling]:
        return [part for part in self.parts if isinstance(part, SkipScaling)]

    @property
    def timed(self) -> bool:  # type: ignore[override]
        return any(part.timed for part in self._modules_of())

    @property
    def conditioners(self) -> tuple[SkipScaling, ...]:  # type: ignore[override]
        return tuple(one for part in self._modules_of() for one in part.conditioners)

    def placed(self, sites: tuple[Any, ...], placement: str) -> None:
        super().placed(sites, placement)
        for part in self._modules_of():
            part.placed(sites, placement)

    def observe(self, skip: Tensor, backbone: Tensor | None, i: int) -> None:
        for part in self._modules_of():
            if isinstance(part, NormSkips):
                part.observe(skip, backbone if part.two_sided else None, i)

    def observe_timestep(self, t: Any) -> None:
        for part in self._modules_of():
            if isinstance(part, TimedSkips):
                part.observe_timestep(t)

    def forget_timestep(self) -> None:
        for part in self._modules_of():
            if isinstance(part, TimedSkips):
                part.forget_timestep()

    def set(self, spec: Scaling, n: int) -> None:
        parts = self._modules_of()
        changes = spec.scalings if isinstance(spec, ComposedScaling) else (spec,)
        for change in changes:
            alike = [part for part in parts if part.spec.family == change.family]
            if not alike:  # κ listed one by one
                alike = [part for part in parts if isinstance(part, FixedSkips)]
            if len(alike) != 1:
                raise UnsupportedNetworkError(f"{self.spec} has {len(alike)} parts that {change} could change")
            alike[0].set(change, n)
        self.spec = ComposedScaling(tuple(part.spec for part in parts))

    def forward(self, skip: Tensor, i: int, backbone: Tensor | None = None) -> Any:
        if self.is_factor:  # κ_i of all
            kappa: Any = 1.0
            for part in self._modules_of():
                kappa = part(skip * kappa, i) * kappa
            return kappa
        for part in self._modules_of():
            skip, backbone = part.join(skip, backbone, i)
        return skip if backbone is None else (skip, backbone)
