"""The base classes of interpolants x_t = α(t)·x_0 + σ(t)·ε; `process` has the ones to choose from."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

Time = float | Tensor


@dataclass(frozen=True)
class Interpolant(ABC):
    """Base class. Times are numbers or tensors of any shape; methods return float64 tensors of the same shape."""

    name: ClassVar[str]  # the name that `get_process` accepts
    continuous: ClassVar[bool] = True  # defined at every t, not by a table of steps
    t_max: ClassVar[float] = 1.0  # x_t is noise here; sampling starts here
    t_start: ClassVar[float] = 1.0  # the same, or just before it where the log-SNR at t_max is −∞
    t_min: ClassVar[float]  # solvers that step uniformly in log-SNR stop here: at t = 0 the log-SNR may be infinite

    @abstractmethod
    def alpha(self, t: Time) -> Tensor:
        """α(t), the factor on the image."""

    @abstractmethod
    def sigma(self, t: Time) -> Tensor:
        """σ(t), the factor on the noise."""

    @abstractmethod
    def derivatives(self, t: Time) -> tuple[Tensor, Tensor]:
        """(dα/dt, dσ/dt); the discrete schedules count 1000 steps as one unit of time."""

    @abstractmethod
    def log_alpha(self, t: Time) -> Tensor:
        """ln α(t)."""

    @abstractmethod
    def lambda_(self, t: Time) -> Tensor:
        """λ(t) = ln(α/σ), half the log-SNR, the time variable of DPM-Solver; decreasing in t."""

    @abstractmethod
    def inverse_lambda(self, lambda_: Time) -> Tensor:
        """Inverse of `lambda_`."""

    @abstractmethod
    def network_time(self, t: Tensor) -> Tensor:
        """The timestep that the network receives for time t."""

    def times(self, u: Tensor) -> Tensor:
        """Map uniform samples in (0, 1) to training times, float32."""
        return u.float()

    @property
    def prior_std(self) -> float:
        """Standard deviation of the noise that sampling starts from."""
        return 1.0

    def add_noise(self, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """x_t = α·x_0 + σ·ε  (Eq. 1), in x_0's dtype.

        x_0, eps: (B, …); t: (B,). t may stay on the CPU: only the two coefficients move to x_0's device.
        """
        return like(self.alpha(t), x_0) * x_0 + like(self.sigma(t), x_0) * eps

    def predict_x_0(self, x_t: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Solve Eq. 1 for x_0. Where α(t_max) = 0, it has no solution at t_max; the one at t_start takes its place."""
        if self.t_start < self.t_max:
            t = t.clamp(max=self.t_start)
        return (x_t - like(self.sigma(t), x_t) * eps) / like(self.alpha(t), x_t)

    def predict_eps(self, x_t: Tensor, x_0: Tensor, t: Tensor) -> Tensor:
        """Solve Eq. 1 for ε; needs σ > 0."""
        return (x_t - like(self.alpha(t), x_t) * x_0) / like(self.sigma(t), x_t)

    def norm(self, t: Time) -> Tensor:
        """√(α² + σ²): x_t divided by it is variance preserving, with the same signal-to-noise ratio."""
        return torch.hypot(self.alpha(t), self.sigma(t))

    def grid(self, n: int = 1000) -> Tensor:
        """n equally spaced times t_max/n … t_max, float64; 0 is not included."""
        return torch.arange(1, n + 1, dtype=torch.float64) * (self.t_max / n)

    def betas(self, n: int = 1000) -> Tensor:
        """β_1 … β_n with ∏_{i ≤ k}(1 − β_i) = α²/(α² + σ²) on the grid, for schedulers with discrete steps."""
        log_alpha_bar = self._log_alpha_bar(self.grid(n).clamp(max=self.t_start))
        return -torch.expm1(torch.diff(log_alpha_bar, prepend=torch.zeros(1, dtype=torch.float64)))

    def _log_alpha_bar(self, t: Tensor) -> Tensor:
        return -softplus(-2.0 * self.lambda_(t), threshold=50.0)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict that `get_process` accepts."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class Process(Interpolant):
    """A variance-preserving interpolant: α = √ᾱ, σ = √(1 − ᾱ)."""

    @abstractmethod
    def log_alpha_bar(self, t: Time) -> Tensor:
        """ln ᾱ(t): 0 at t = 0, decreasing in t."""

    @abstractmethod
    def log_alpha_bar_slope(self, t: Time) -> Tensor:
        """d ln ᾱ/dt."""

    @abstractmethod
    def _time_of(self, log_alpha_bar: Tensor) -> Tensor:
        """Inverse of `log_alpha_bar`."""

    def alpha_bar(self, t: Time) -> Tensor:
        """ᾱ(t)."""
        return self.log_alpha_bar(t).exp()

    def alpha(self, t: Time) -> Tensor:
        """√ᾱ(t), the factor on the image."""
        return (0.5 * self.log_alpha_bar(t)).exp()

    def sigma(self, t: Time) -> Tensor:
        """√(1 − ᾱ(t)), the factor on the noise."""
        return (-torch.expm1(self.log_alpha_bar(t))).sqrt()

    def log_alpha(self, t: Time) -> Tensor:
        return 0.5 * self.log_alpha_bar(t)

    def derivatives(self, t: Time) -> tuple[Tensor, Tensor]:
        # dα/dt = ½α·s and dσ/dt = −½ᾱ·s/σ for s = d ln ᾱ/dt; dσ/dt is infinite at t = 0 if s is not 0 there.
        half = 0.5 * self.log_alpha_bar_slope(t)
        return half * self.alpha(t), -half * self.alpha_bar(t) / self.sigma(t)

    def lambda_(self, t: Time) -> Tensor:
        log_alpha_bar = self.log_alpha_bar(t)
        return 0.5 * (log_alpha_bar - torch.log(-torch.expm1(log_alpha_bar)))

    def inverse_lambda(self, lambda_: Time) -> Tensor:
        """Inverse of `lambda_`: ᾱ is the logistic function of 2λ, so ln ᾱ = −softplus(−2λ)."""
        # torch's default threshold, beyond which softplus is linear, is too coarse for float64.
        return self._time_of(-softplus(-2.0 * as_float64(lambda_), threshold=50.0))

    def _log_alpha_bar(self, t: Tensor) -> Tensor:
        return self.log_alpha_bar(t)


def as_float64(value: Time) -> Tensor:
    if isinstance(value, Tensor) and value.device.type == "mps":  # no float64 on MPS
        value = value.cpu()
    return torch.as_tensor(value, dtype=torch.float64)


def like(coefficient: Tensor, x: Tensor) -> Tensor:
    """Reshape (B,) float64 to (B, 1, …) with x's dtype and device; a scalar stays a scalar."""
    coefficient = coefficient.to(device=x.device, dtype=x.dtype)
    return coefficient.reshape(-1, *[1] * (x.ndim - 1)) if coefficient.ndim else coefficient
