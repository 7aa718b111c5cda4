"""Noise processes: how x_0 becomes x_t (Eq. 1), which times training draws, and the timestep the network receives.

Every process is variance preserving, x_t = √ᾱ(t)·x_0 + √(1 − ᾱ(t))·ε, so ᾱ defines it. Each process has its own
time: t in [0, 1] for the VP-SDE, n in 1 … 1000 for the discrete schedules (n = 0 is the clean image).
Schedules are computed in float64, because 1 − ᾱ is lost to rounding near the clean image in float32.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from scalelong.errors import invalid, unknown

Time = float | Tensor


@dataclass(frozen=True)
class Process(ABC):
    """Base class. Times are numbers or tensors of any shape; methods return float64 tensors of the same shape."""

    name: ClassVar[str]  # the name that `get_process` accepts
    continuous: ClassVar[bool]  # defined by an SDE, with β(t) at every t
    t_max: ClassVar[float]  # x_t is pure noise here; sampling starts here
    t_min: ClassVar[float]  # solvers that step uniformly in log-SNR stop here: at t = 0 the log-SNR is infinite

    @abstractmethod
    def log_alpha_bar(self, t: Time) -> Tensor:
        """ln ᾱ(t): 0 at t = 0, decreasing in t."""

    @abstractmethod
    def _time_of(self, log_alpha_bar: Tensor) -> Tensor:
        """Inverse of `log_alpha_bar`."""

    @abstractmethod
    def times(self, u: Tensor) -> Tensor:
        """Map uniform samples in (0, 1) to training times, float32."""

    @abstractmethod
    def network_time(self, t: Tensor) -> Tensor:
        """The timestep that the network receives for time t."""

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
        """λ(t) = ln(√ᾱ/√(1 − ᾱ)), half the log-SNR, the time variable of DPM-Solver; +∞ at t = 0."""
        log_alpha_bar = self.log_alpha_bar(t)
        return 0.5 * (log_alpha_bar - torch.log(-torch.expm1(log_alpha_bar)))

    def inverse_lambda(self, lambda_: Time) -> Tensor:
        """Inverse of `lambda_`: ᾱ is the logistic function of 2λ, so ln ᾱ = −softplus(−2λ)."""
        # torch's default threshold, beyond which softplus is linear, is too coarse for float64.
        return self._time_of(-softplus(-2.0 * _float64(lambda_), threshold=50.0))

    def add_noise(self, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """x_t = √ᾱ·x_0 + √(1 − ᾱ)·ε  (Eq. 1), in x_0's dtype.

        x_0, eps: (B, …); t: (B,). t may stay on the CPU: only the two coefficients move to x_0's device.
        """
        return _like(self.alpha(t), x_0) * x_0 + _like(self.sigma(t), x_0) * eps

    def predict_x_0(self, x_t: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Solve Eq. 1 for x_0."""
        return (x_t - _like(self.sigma(t), x_t) * eps) / _like(self.alpha(t), x_t)

    def predict_eps(self, x_t: Tensor, x_0: Tensor, t: Tensor) -> Tensor:
        """Solve Eq. 1 for ε; needs t > 0."""
        return (x_t - _like(self.alpha(t), x_t) * x_0) / _like(self.sigma(t), x_t)

    def grid(self, n: int = 1000) -> Tensor:
        """n equally spaced times t_max/n … t_max, float64; 0 is not included."""
        return torch.arange(1, n + 1, dtype=torch.float64) * (self.t_max / n)

    def betas(self, n: int = 1000) -> Tensor:
        """β_1 … β_n with ∏_{i ≤ k}(1 − β_i) = ᾱ(t_k) on the grid, for schedulers with discrete steps."""
        log_alpha_bar = self.log_alpha_bar(self.grid(n))
        return -torch.expm1(torch.diff(log_alpha_bar, prepend=torch.zeros(1, dtype=torch.float64)))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict that `get_process` accepts."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class VPSDE(Process):
    """dx = −½β(t)·x dt + √β(t) dw with β linear in t in [0, 1] (Song et al., 2021). The network receives 999·t."""

    beta_min: float = 0.1
    beta_max: float = 20.0
    name: ClassVar[str] = "vp"
    continuous: ClassVar[bool] = True
    t_max: ClassVar[float] = 1.0
    t_min: ClassVar[float] = 1e-4

    def __post_init__(self) -> None:
        if not 0 < self.beta_min < self.beta_max:
            raise invalid("beta_min, beta_max", "0 < beta_min < beta_max", (self.beta_min, self.beta_max))

    def beta(self, t: Time) -> Tensor:
        """β(t), the noise rate."""
        return self.beta_min + (self.beta_max - self.beta_min) * _float64(t)

    def log_alpha_bar(self, t: Time) -> Tensor:
        t = _float64(t)  # −∫₀ᵗ β
        return -t * (self.beta_min + 0.5 * (self.beta_max - self.beta_min) * t)

    def _time_of(self, log_alpha_bar: Tensor) -> Tensor:
        # The root of the quadratic with the sum in the denominator: no cancellation as t → 0.
        integral, growth = -log_alpha_bar, self.beta_max - self.beta_min
        return 2.0 * integral / (self.beta_min + (self.beta_min**2 + 2.0 * growth * integral).sqrt())

    def times(self, u: Tensor) -> Tensor:
        return u.float()

    def network_time(self, t: Tensor) -> Tensor:
        return 999.0 * t


@dataclass(frozen=True)
class DiscreteProcess(Process):
    """1000 steps: ᾱ_n = ∏_{i ≤ n}(1 − β_i). Between steps ln ᾱ is interpolated linearly."""

    steps: ClassVar[int] = 1000
    first_step: ClassVar[int]  # the timestep that the network receives at n = 1
    continuous: ClassVar[bool] = False
    t_max: ClassVar[float] = 1000.0
    t_min: ClassVar[float] = 1.0

    @abstractmethod
    def step_betas(self) -> Tensor:
        """β_1 … β_1000, float64."""

    def log_alpha_bar(self, t: Time) -> Tensor:
        t = _float64(t).clamp(0, self.steps)
        table = _log_alpha_bar_table(self).to(t.device)
        below = t.floor().clamp(max=self.steps - 1).long()
        return torch.lerp(table[below], table[below + 1], t - below)

    def _time_of(self, log_alpha_bar: Tensor) -> Tensor:
        table = -_log_alpha_bar_table(self).to(log_alpha_bar.device)  # increasing from 0
        value = (-log_alpha_bar).clamp(table[0], table[-1])
        above = torch.searchsorted(table, value).clamp(min=1)
        return above - (table[above] - value) / (table[above] - table[above - 1])

    def times(self, u: Tensor) -> Tensor:
        return (u.double() * self.steps).floor().float() + 1.0  # float64: u·1000 must not round up to 1000

    def network_time(self, t: Tensor) -> Tensor:
        return t - 1.0 + self.first_step


@dataclass(frozen=True)
class PowerProcess(DiscreteProcess):
    """β^(1/power) linear in n."""

    beta_start: float
    beta_end: float
    power: ClassVar[int]

    def __post_init__(self) -> None:
        if not 0 < self.beta_start <= self.beta_end < 1:
            got = (self.beta_start, self.beta_end)
            raise invalid("beta_start, beta_end", "0 < beta_start <= beta_end < 1", got)

    def step_betas(self) -> Tensor:
        start, end = (beta ** (1 / self.power) for beta in (self.beta_start, self.beta_end))
        return torch.linspace(start, end, self.steps, dtype=torch.float64) ** self.power


@dataclass(frozen=True)
class DDPM(PowerProcess):
    """DDPM's schedule, β linear in n (Ho et al., 2020). The network receives n − 1 = 0 … 999, as in diffusers."""

    beta_start: float = 1e-4
    beta_end: float = 0.02
    name: ClassVar[str] = "ddpm"
    power: ClassVar[int] = 1
    first_step: ClassVar[int] = 0


@dataclass(frozen=True)
class StableDiffusion(PowerProcess):
    """Stable Diffusion's schedule for latents, √β linear in n. The network receives n = 1 … 1000."""

    beta_start: float = 0.00085
    beta_end: float = 0.012
    name: ClassVar[str] = "sd"
    power: ClassVar[int] = 2
    first_step: ClassVar[int] = 1


@dataclass(frozen=True)
class Cosine(DiscreteProcess):
    """IDDPM's schedule, ᾱ_n ∝ cos²((n/1000 + s)/(1 + s)·π/2) with β at most 0.999 (Nichol & Dhariwal, 2021).

    The network receives n − 1 = 0 … 999, as in diffusers, where the schedule is called squaredcos_cap_v2.
    """

    s: float = 0.008
    name: ClassVar[str] = "cosine"
    first_step: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if not 0 <= self.s < 1:
            raise invalid("s", "in [0, 1)", self.s)

    def step_betas(self) -> Tensor:
        n = torch.arange(self.steps + 1, dtype=torch.float64) / self.steps
        alpha_bar = ((n + self.s) / (1 + self.s) * (math.pi / 2)).cos() ** 2
        return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999)


@lru_cache
def _log_alpha_bar_table(process: DiscreteProcess) -> Tensor:
    """ln ᾱ_0 … ln ᾱ_1000, float64; ᾱ_0 = 1, the empty product."""
    return torch.cat([torch.zeros(1, dtype=torch.float64), torch.log1p(-process.step_betas()).cumsum(0)])


PROCESSES: dict[str, type[Process]] = {kind.name: kind for kind in (VPSDE, DDPM, Cosine, StableDiffusion)}


def get_process(spec: str | Mapping[str, Any] | Process) -> Process:
    """Return a process by name ("vp", "ddpm", "cosine", "sd") or from a mapping: its name and any of its parameters."""
    if isinstance(spec, Process):
        return spec
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = str(settings.pop("name", ""))
    if name not in PROCESSES:
        raise unknown("process", name, PROCESSES)
    known = [field.name for field in fields(PROCESSES[name])]
    for key in settings.keys() - set(known):
        raise unknown(f"parameter of process {name!r}", key, known)
    return PROCESSES[name](**settings)


def _float64(value: Time) -> Tensor:
    if isinstance(value, Tensor) and value.device.type == "mps":  # no float64 on MPS
        value = value.cpu()
    return torch.as_tensor(value, dtype=torch.float64)


def _like(coefficient: Tensor, x: Tensor) -> Tensor:
    """Reshape (B,) float64 to (B, 1, …) with x's dtype and device; a scalar stays a scalar."""
    coefficient = coefficient.to(device=x.device, dtype=x.dtype)
    return coefficient.reshape(-1, *[1] * (x.ndim - 1)) if coefficient.ndim else coefficient
