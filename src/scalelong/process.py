"""Noise processes: how x_0 becomes x_t (Eq. 1), which times are trained on, and what the network is told.

Every process is variance preserving, x_t = √ᾱ(t)·x_0 + √(1 − ᾱ(t))·ε, so ᾱ says everything. Times are the
process's own: t in [0, 1] for the VP-SDE, n in 1 … 1000 for the discrete schedules (n = 0 is the clean image).
Schedules are worked out in float64, where 1 − ᾱ near the image would otherwise drown in rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from scalelong.errors import ScaleLongError, unknown

Time = float | Tensor


@dataclass(frozen=True)
class Process(ABC):
    """The contract. Times may be numbers or tensors of any shape; what comes back is float64 of that shape."""

    name: ClassVar[str]  # what `get_process` knows it by
    continuous: ClassVar[bool]  # has an SDE of its own, with β(t) at every t
    t_max: ClassVar[float]  # where x_t is noise and sampling begins
    t_min: ClassVar[float]  # where solvers that are uniform in log-SNR end: at t = 0 it is infinite

    @abstractmethod
    def log_alpha_bar(self, t: Time) -> Tensor:
        """ln ᾱ(t), which is 0 at t = 0 and falls."""

    @abstractmethod
    def _time_of(self, log_alpha_bar: Tensor) -> Tensor:
        """The t with this ln ᾱ."""

    @abstractmethod
    def times(self, u: Tensor) -> Tensor:
        """Training times, float32, from uniforms in (0, 1)."""

    @abstractmethod
    def network_time(self, t: Tensor) -> Tensor:
        """What the network is fed for the time t."""

    def alpha_bar(self, t: Time) -> Tensor:
        """ᾱ(t)."""
        return self.log_alpha_bar(t).exp()

    def alpha(self, t: Time) -> Tensor:
        """√ᾱ(t), the factor on the image."""
        return (0.5 * self.log_alpha_bar(t)).exp()

    def sigma(self, t: Time) -> Tensor:
        """√(1 − ᾱ(t)), the factor on the noise."""
        return (-torch.expm1(self.log_alpha_bar(t))).sqrt()

    def lambda_(self, t: Time) -> Tensor:
        """λ(t) = ln(√ᾱ/√(1 − ᾱ)), half the log-SNR, in which DPM-Solver counts; +∞ at t = 0."""
        log_alpha_bar = self.log_alpha_bar(t)
        return 0.5 * (log_alpha_bar - torch.log(-torch.expm1(log_alpha_bar)))

    def log_snr(self, t: Time) -> Tensor:
        """ln(ᾱ/(1 − ᾱ)) = 2·λ(t)."""
        return 2.0 * self.lambda_(t)

    def inverse_lambda(self, lambda_: Time) -> Tensor:
        """The t with this λ: ᾱ is the logistic function of 2λ, so ln ᾱ = −softplus(−2λ)."""
        # The threshold beyond which torch calls softplus linear is too coarse for float64.
        return self._time_of(-softplus(-2.0 * _float64(lambda_), threshold=50.0))

    def add_noise(self, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """x_t = √ᾱ·x_0 + √(1 − ᾱ)·ε  (Eq. 1), in x_0's dtype.

        x_0, eps: (B, …); t: (B,), which may stay on the CPU: only its two coefficients move to x_0's device.
        """
        alpha, sigma = _like(self.alpha(t), x_0), _like(self.sigma(t), x_0)
        return alpha * x_0 + sigma * eps

    def predict_x_0(self, x_t: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Eq. 1 solved for x_0: the image that the noise `eps` leaves."""
        alpha, sigma = _like(self.alpha(t), x_t), _like(self.sigma(t), x_t)
        return (x_t - sigma * eps) / alpha

    def predict_eps(self, x_t: Tensor, x_0: Tensor, t: Tensor) -> Tensor:
        """Eq. 1 solved for ε. t > 0."""
        alpha, sigma = _like(self.alpha(t), x_t), _like(self.sigma(t), x_t)
        return (x_t - alpha * x_0) / sigma

    def grid(self, n: int = 1000) -> Tensor:
        """n equal steps of time, without 0: t_max/n … t_max, float64."""
        return torch.arange(1, n + 1, dtype=torch.float64) * (self.t_max / n)

    def betas(self, n: int = 1000) -> Tensor:
        """β_1 … β_n with ∏(1 − β_i) = ᾱ(t_k) at every point of the grid: for schedulers that know discrete steps."""
        log_alpha_bar = self.log_alpha_bar(self.grid(n))
        return -torch.expm1(torch.diff(log_alpha_bar, prepend=torch.zeros(1, dtype=torch.float64)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `get_process` reads it back."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class VPSDE(Process):
    """dx = −½β(t)·x dt + √β(t) dw with β linear in t in [0, 1] (Song et al., 2021); the network is fed 999·t."""

    beta_min: float = 0.1
    beta_max: float = 20.0

    name: ClassVar[str] = "vp"
    continuous: ClassVar[bool] = True
    t_max: ClassVar[float] = 1.0
    t_min: ClassVar[float] = 1e-4

    def __post_init__(self) -> None:
        if not 0 < self.beta_min < self.beta_max:
            raise ScaleLongError(
                f"beta_min and beta_max must satisfy 0 < beta_min < beta_max, got {self.beta_min} and {self.beta_max}"
            )

    def beta(self, t: Time) -> Tensor:
        """β(t), the rate of noise."""
        return self.beta_min + (self.beta_max - self.beta_min) * _float64(t)

    def log_alpha_bar(self, t: Time) -> Tensor:
        t = _float64(t)  # −∫₀ᵗ β
        return -t * (self.beta_min + 0.5 * (self.beta_max - self.beta_min) * t)

    def _time_of(self, log_alpha_bar: Tensor) -> Tensor:
        # The quadratic's root with the sum in the denominator: no cancellation as t → 0.
        integral, slope = -log_alpha_bar, self.beta_max - self.beta_min
        return 2.0 * integral / (self.beta_min + (self.beta_min**2 + 2.0 * slope * integral).sqrt())

    def times(self, u: Tensor) -> Tensor:
        return u.float()

    def network_time(self, t: Tensor) -> Tensor:
        return 999.0 * t


@dataclass(frozen=True)
class DiscreteProcess(Process):
    """1000 steps with given β_n: ᾱ_n = ∏_{i ≤ n}(1 − β_i); between steps ln ᾱ is interpolated linearly."""

    beta_start: float
    beta_end: float

    steps: ClassVar[int] = 1000
    first_step: ClassVar[int]  # what the network is fed at n = 1
    continuous: ClassVar[bool] = False
    t_max: ClassVar[float] = 1000.0
    t_min: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.beta_start <= self.beta_end < 1:
            raise ScaleLongError(
                "beta_start and beta_end must satisfy 0 < beta_start <= beta_end < 1, "
                f"got {self.beta_start} and {self.beta_end}"
            )

    @abstractmethod
    def schedule(self) -> Tensor:
        """β_1 … β_1000, float64."""

    def log_alpha_bar(self, t: Time) -> Tensor:
        t = _float64(t).clamp(0, self.steps)
        table = _log_alpha_bar_table(self).to(t.device)
        below = t.floor().clamp(max=self.steps - 1).long()
        return torch.lerp(table[below], table[below + 1], t - below)

    def _time_of(self, log_alpha_bar: Tensor) -> Tensor:
        table = -_log_alpha_bar_table(self).to(log_alpha_bar.device)  # rises from 0
        value = (-log_alpha_bar).clamp(table[0], table[-1])
        above = torch.searchsorted(table, value).clamp(min=1)
        return above - (table[above] - value) / (table[above] - table[above - 1])

    def times(self, u: Tensor) -> Tensor:
        return (u.double() * self.steps).floor().float() + 1.0  # float64: u·1000 must not round up to 1000

    def network_time(self, t: Tensor) -> Tensor:
        return t - 1.0 + self.first_step


@dataclass(frozen=True)
class DDPM(DiscreteProcess):
    """DDPM's schedule, β linear in n (Ho et al., 2020); the network is fed n − 1 = 0 … 999, as in diffusers."""

    beta_start: float = 1e-4
    beta_end: float = 0.02

    name: ClassVar[str] = "ddpm"
    first_step: ClassVar[int] = 0

    def schedule(self) -> Tensor:
        return torch.linspace(self.beta_start, self.beta_end, self.steps, dtype=torch.float64)


@dataclass(frozen=True)
class StableDiffusion(DiscreteProcess):
    """Stable Diffusion's schedule for latents, √β linear in n; the network is fed n = 1 … 1000 as it is."""

    beta_start: float = 0.00085
    beta_end: float = 0.012

    name: ClassVar[str] = "sd"
    first_step: ClassVar[int] = 1

    def schedule(self) -> Tensor:
        return torch.linspace(self.beta_start**0.5, self.beta_end**0.5, self.steps, dtype=torch.float64) ** 2


@lru_cache
def _log_alpha_bar_table(process: DiscreteProcess) -> Tensor:
    """ln ᾱ_0 … ln ᾱ_1000, float64; ᾱ_0 = 1, the empty product."""
    return torch.cat([torch.zeros(1, dtype=torch.float64), torch.log1p(-process.schedule()).cumsum(0)])


PROCESSES: dict[str, type[Process]] = {kind.name: kind for kind in (VPSDE, DDPM, StableDiffusion)}


def get_process(spec: str | Mapping[str, Any] | Process) -> Process:
    """A process by name ("vp", "ddpm", "sd"), or from the mapping that `to_dict` gives (missing values: defaults)."""
    if isinstance(spec, Process):
        return spec
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = str(settings.pop("name", ""))
    if name not in PROCESSES:
        raise unknown("process", name, PROCESSES)
    known = [field.name for field in fields(PROCESSES[name])]
    for key in settings:
        if key not in known:
            raise unknown(f"setting of process {name!r}", key, known)
    return PROCESSES[name](**settings)


def _float64(value: Time) -> Tensor:
    if isinstance(value, Tensor) and value.device.type == "mps":  # which has no float64
        value = value.cpu()
    return torch.as_tensor(value, dtype=torch.float64)


def _like(coefficient: Tensor, x: Tensor) -> Tensor:
    """(B,) float64 → (B, 1, …) in x's dtype and device; a single number for all stays one."""
    coefficient = coefficient.to(device=x.device, dtype=x.dtype)
    return coefficient.reshape(-1, *[1] * (x.ndim - 1)) if coefficient.ndim else coefficient
