"""Interpolants between image and noise: x_t = α(t)·x_0 + σ(t)·ε, and the timestep that the network receives.

| name | α | σ | time | the network receives |
|---|---|---|---|---|
| vp | √ᾱ | √(1 − ᾱ) | t in [0, 1] | 999·t |
| ddpm, cosine, sd | √ᾱ_n | √(1 − ᾱ_n) | n in 1 … 1000, 0 is the clean image | n − 1; n for sd |
| linear | 1 − t | t | t in [0, 1], pure noise at 1 | 1000·t |
| edm | 1 | σ_min … σ_max | t in [0, 1], σ^(1/ρ) linear in t | c_noise = ln σ/4, mapped to 0 … 1000 |

The first four are variance preserving, so that ᾱ defines them: a `Process` (Eq. 1). Schedules are computed in float64,
because 1 − ᾱ is lost to rounding near the clean image in float32.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from scalelong.errors import invalid, unknown
from scalelong.interpolant import Interpolant, Process, Time, as_float64, like

__all__ = [
    "DDPM", "EDM", "INTERPOLANTS", "PROCESSES", "VPSDE", "Cosine", "DiscreteProcess", "Interpolant", "Linear",
    "Process", "StableDiffusion", "get_process", "like",
]  # fmt: skip


@dataclass(frozen=True)
class VPSDE(Process):
    """dx = −½β(t)·x dt + √β(t) dw with β linear in t in [0, 1] (Song et al., 2021). The network receives 999·t."""

    beta_min: float = 0.1
    beta_max: float = 20.0
    name: ClassVar[str] = "vp"
    t_min: ClassVar[float] = 1e-4

    def __post_init__(self) -> None:
        if not 0 < self.beta_min < self.beta_max:
            raise invalid("beta_min, beta_max", "0 < beta_min < beta_max", (self.beta_min, self.beta_max))

    def beta(self, t: Time) -> Tensor:
        """β(t), the noise rate."""
        return self.beta_min + (self.beta_max - self.beta_min) * as_float64(t)

    def log_alpha_bar(self, t: Time) -> Tensor:
        t = as_float64(t)  # −∫₀ᵗ β
        return -t * (self.beta_min + 0.5 * (self.beta_max - self.beta_min) * t)

    def log_alpha_bar_slope(self, t: Time) -> Tensor:
        return -self.beta(t)

    def _time_of(self, log_alpha_bar: Tensor) -> Tensor:
        # The root of the quadratic with the sum in the denominator: no cancellation as t → 0.
        integral, growth = -log_alpha_bar, self.beta_max - self.beta_min
        return 2.0 * integral / (self.beta_min + (self.beta_min**2 + 2.0 * growth * integral).sqrt())

    def network_time(self, t: Tensor) -> Tensor:
        return 999.0 * t


@dataclass(frozen=True)
class DiscreteProcess(Process):
    """1000 steps: ᾱ_n = ∏_{i ≤ n}(1 − β_i). Between steps ln ᾱ is interpolated linearly."""

    steps: ClassVar[int] = 1000
    first_step: ClassVar[int]  # the timestep that the network receives at n = 1
    continuous: ClassVar[bool] = False
    t_max: ClassVar[float] = 1000.0
    t_start: ClassVar[float] = 1000.0
    t_min: ClassVar[float] = 1.0

    @abstractmethod
    def step_betas(self) -> Tensor:
        """β_1 … β_1000, float64."""

    def log_alpha_bar(self, t: Time) -> Tensor:
        t = as_float64(t).clamp(0, self.steps)
        table = _log_alpha_bar_table(self, t.device)
        below = t.floor().clamp(max=self.steps - 1).long()
        return torch.lerp(table[below], table[below + 1], t - below)

    def log_alpha_bar_slope(self, t: Time) -> Tensor:
        """The slope of the step that ends at or after t."""
        above = as_float64(t).ceil().clamp(1, self.steps).long()
        return self.steps * _log_alpha_bar_table(self, above.device).diff()[above - 1]

    def _time_of(self, log_alpha_bar: Tensor) -> Tensor:
        table = -_log_alpha_bar_table(self, log_alpha_bar.device)  # increasing from 0
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
def _log_alpha_bar_table(process: DiscreteProcess, device: torch.device) -> Tensor:
    """ln ᾱ_0 … ln ᾱ_1000, float64; ᾱ_0 = 1, the empty product. Cached per device: a copy to CUDA waits for it."""
    table = torch.cat([torch.zeros(1, dtype=torch.float64), torch.log1p(-process.step_betas()).cumsum(0)])
    return table.to(device)


@dataclass(frozen=True)
class Linear(Interpolant):
    """x_t = (1 − t)·x_0 + t·ε, the straight path of flow matching: pure noise at t = 1. The network receives 1000·t."""

    name: ClassVar[str] = "linear"
    t_start: ClassVar[float] = 0.9995
    t_min: ClassVar[float] = 1e-3

    def alpha(self, t: Time) -> Tensor:
        return 1.0 - as_float64(t)

    def sigma(self, t: Time) -> Tensor:
        return as_float64(t)

    def derivatives(self, t: Time) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(as_float64(t))
        return -one, one

    def log_alpha(self, t: Time) -> Tensor:
        return torch.log1p(-as_float64(t))

    def lambda_(self, t: Time) -> Tensor:
        return -torch.logit(as_float64(t))

    def inverse_lambda(self, lambda_: Time) -> Tensor:
        return torch.sigmoid(-as_float64(lambda_))

    def network_time(self, t: Tensor) -> Tensor:
        return 1000.0 * t


@dataclass(frozen=True)
class EDM(Interpolant):
    """x_t = x_0 + σ·ε with σ^(1/ρ) linear in t from σ_min to σ_max (Karras et al., 2022, Eq. 5).

    The network receives c_noise = ln σ/4 mapped linearly from its range to [0, 1000]: on the scale of c_noise itself,
    about −1.6 to 1.1, a sinusoidal embedding made for timesteps up to 1000 is almost constant.
    """

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    name: ClassVar[str] = "edm"
    t_min: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise invalid("sigma_min, sigma_max", "0 < sigma_min < sigma_max", (self.sigma_min, self.sigma_max))
        if not 0 < self.rho < math.inf:
            raise invalid("rho", "a number > 0", self.rho)

    @property
    def prior_std(self) -> float:
        return self.sigma_max

    def _ends(self) -> tuple[float, float]:
        return self.sigma_min ** (1 / self.rho), self.sigma_max ** (1 / self.rho)

    def alpha(self, t: Time) -> Tensor:
        return torch.ones_like(as_float64(t))

    def sigma(self, t: Time) -> Tensor:
        low, high = self._ends()
        return (low + as_float64(t) * (high - low)) ** self.rho

    def derivatives(self, t: Time) -> tuple[Tensor, Tensor]:
        low, high = self._ends()
        slope = self.rho * (high - low) * (low + as_float64(t) * (high - low)) ** (self.rho - 1)
        return torch.zeros_like(slope), slope

    def log_alpha(self, t: Time) -> Tensor:
        return torch.zeros_like(as_float64(t))

    def lambda_(self, t: Time) -> Tensor:
        return -self.sigma(t).log()

    def inverse_lambda(self, lambda_: Time) -> Tensor:
        low, high = self._ends()
        sigma = (-as_float64(lambda_)).exp().clamp(self.sigma_min, self.sigma_max)
        return (sigma ** (1 / self.rho) - low) / (high - low)

    def network_time(self, t: Tensor) -> Tensor:
        low, high = math.log(self.sigma_min), math.log(self.sigma_max)
        return (1000.0 * (self.sigma(t).log() - low) / (high - low)).to(t.dtype)


PROCESSES: dict[str, type[Process]] = {kind.name: kind for kind in (VPSDE, DDPM, Cosine, StableDiffusion)}
INTERPOLANTS: dict[str, type[Interpolant]] = {**PROCESSES, Linear.name: Linear, EDM.name: EDM}


def get_process(spec: str | Mapping[str, Any] | Interpolant) -> Any:
    """Return an interpolant by name, a key of `INTERPOLANTS`, or from a mapping: its name and any of its parameters."""
    if isinstance(spec, Interpolant):
        return spec
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = str(settings.pop("name", ""))
    if name not in INTERPOLANTS:
        raise unknown("process", name, INTERPOLANTS)
    known = [field.name for field in fields(INTERPOLANTS[name])]
    for key in settings.keys() - set(known):
        raise unknown(f"parameter of process {name!r}", key, known)
    return INTERPOLANTS[name](**settings)
