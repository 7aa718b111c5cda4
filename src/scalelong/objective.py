"""Objectives: what a network learns to predict, at which times, with which weight, and how its output is used.

An objective is an interpolant x_t = α·x_0 + σ·ε and a target F = p·x_0 + q·ε. Its two equations are solved in one
place, `Objective.denoised`, so that samplers, guidance and measurements use x̂_0 and ε̂ whatever the network predicts:

| target | p, q | x̂_0 and ε̂ exist |
|---|---|---|
| eps | 0, 1 | where α > 0 for x̂_0; ε̂ always |
| x0 | 1, 0 | x̂_0 always; where σ > 0 for ε̂ |
| v | −σ, α | always |
| flow | dα/dt, dσ/dt: F = dx_t/dt | where the derivatives are finite: always for `linear`, ε − x_0 there |
| precondition "edm" | σ/(n·σ_data), −α·σ_data/n with n² = σ² + α²·σ_data² | always; the network's input is x_t/n |

With α = 1 the last row is Karras et al. (2022): x̂_0 = c_skip·x_t + c_out·F(c_in·x_t, c_noise). Nothing is drawn here:
times are a function of uniform numbers, and the loss one of (x_0, t, ε).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import pi
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scalelong._objectives import OBJECTIVES, PRECONDITIONS, TARGETS, TIMES, WEIGHTS, objective_name
from scalelong.errors import InvalidValueError, invalid, unknown
from scalelong.process import INTERPOLANTS, Interpolant, get_process, like


class Denoised(NamedTuple):
    """The image and the noise that a prediction implies, each like x_t."""

    x_0: Tensor
    eps: Tensor


class Coefficients(NamedTuple):
    """α, σ of x_t = α·x_0 + σ·ε and p, q of F = p·x_0 + q·ε, float64, and det = α·q − σ·p."""

    alpha: Tensor
    sigma: Tensor
    p: Tensor
    q: Tensor

    @property
    def det(self) -> Tensor:
        return self.alpha * self.q - self.sigma * self.p


@dataclass(frozen=True)
class Objective:
    """What a network is trained on. `get_objective("flow")` returns one by name.

    Args:
        process: The interpolant, or its name or mapping.
        target: "eps", "x0", "v" (α·ε − σ·x_0) or "flow" (dx_t/dt).
        times: Density of training times: "uniform"; "logit-normal", t = sigmoid(N(logit_mean, logit_std²));
            "log-normal", ln(σ/α) ~ N(p_mean, p_std²); "mode", SD3's density with heavy tails.
        weight: Of a sample's loss on x̂_0, with SNR = α²/σ²: "min-snr", min(SNR, γ); "soft-min-snr", γ·SNR/(SNR + γ);
            "sigmoid", SNR·sigmoid(bias − ln SNR)·|d ln SNR/dt|; "edm", SNR + 1/σ_data². "one" weights the loss of the
            network's own output by 1.
        precondition: "none", or "edm" with target "x0".
        sigma_data: Standard deviation of the data, for precondition and weight "edm".
    """

    process: Interpolant
    target: str = "eps"
    times: str = "uniform"
    weight: str = "one"
    precondition: str = "none"
    sigma_data: float = 0.5
    p_mean: float = -1.2
    p_std: float = 1.2
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    snr_gamma: float = 5.0
    bias: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "process", get_process(self.process))
        parts = {"target": TARGETS, "times": TIMES, "weight": WEIGHTS, "precondition": PRECONDITIONS}
        for name, known in parts.items():
            if getattr(self, name) not in known:
                raise unknown(name, str(getattr(self, name)), known)
        for name in ("sigma_data", "p_std", "logit_std", "snr_gamma"):
            if not 0 < getattr(self, name) < float("inf"):
                raise invalid(name, "a number > 0", getattr(self, name))
        if self.precondition == "edm" and self.target != "x0":
            raise invalid("target", "'x0' with precondition 'edm', which defines the network's output", self.target)

    @property
    def name(self) -> str:
        """eps, x0, v, flow or edm: what the network predicts."""
        return objective_name(self.target, self.precondition)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict that `get_objective` accepts."""
        return {"name": self.name, **asdict(self), "process": self.process.to_dict()}

    # ------------------------------------------------------------------------------------------ training

    def training_times(self, u: Tensor) -> Tensor:
        """Map uniform samples in (0, 1) to training times (B,), float32, in the process's own time."""
        if self.times == "uniform":
            return self.process.times(u)
        u = u.double()
        if self.times == "mode":  # Esser et al. (2024), Eq. 20
            v = 1 - u - self.mode_scale * ((pi * u / 2).cos() ** 2 - 1 + u)
        else:
            normal = torch.special.ndtri(u)
            if self.times == "log-normal":
                t = self.process.inverse_lambda(-(self.p_mean + self.p_std * normal))
                t = t.clamp(max=self.process.t_max)
                return (t if self.process.continuous else t.round().clamp(min=1)).float()
            v = torch.sigmoid(self.logit_mean + self.logit_std * normal)
        return self.process.times(v.clamp(1e-7, 1 - 1e-7))

    def network_inputs(self, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the network is called with: c_in·x_t, and its timesteps on x_t's device."""
        time = self.process.network_time(t).to(x_t.device)
        return (x_t if self.precondition == "none" else like(self.input_scale(t), x_t) * x_t), time

    def input_scale(self, t: Tensor) -> Tensor:
        """c_in, the factor on x_t at the network's input: 1, or such that inputs have unit variance."""
        return torch.ones_like(self.process.alpha(t)) if self.precondition == "none" else 1 / self._input_norm(t)

    def target_of(self, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """F = p·x_0 + q·ε, what the network should return for x_t."""
        if self.name in ("eps", "x0"):
            return eps if self.name == "eps" else x_0
        c = self.coefficients(t)
        return like(c.p, x_0) * x_0 + like(c.q, x_0) * eps

    def loss_weights(self, t: Tensor) -> Tensor | None:
        """Weights (B,) of ‖F − F̂‖², float64; None if all are 1."""
        if self.weight == "one" or (self.weight == "edm" and self.precondition == "edm"):
            return None  # EDM's weight is 1/c_out²
        c = self.coefficients(t)
        log_snr = (2 * self.process.lambda_(t)).clamp(-40, 40)
        snr = log_snr.exp()
        if self.weight == "min-snr":
            weight = snr.clamp(max=self.snr_gamma)
        elif self.weight == "soft-min-snr":
            weight = self.snr_gamma * snr / (snr + self.snr_gamma)
        elif self.weight == "edm":
            weight = snr + self.sigma_data**-2
        else:  # Kingma & Gao (2023): w(ln SNR) of a loss that is an integral over ln SNR
            d_alpha, d_sigma = self.process.derivatives(t)
            slope = 2 * (d_sigma / c.sigma - d_alpha / c.alpha).clamp(max=torch.finfo(torch.float32).max)
            weight = snr * torch.sigmoid(self.bias - log_snr) * slope
        return weight * (c.sigma / c.det).square().clamp(max=torch.tensor(40.0).exp().item())  # (dx̂_0/dF)²

    # -------------------------------------------------------------------------------------- conversions

    def coefficients(self, t: Tensor) -> Coefficients:
        """α, σ, p and q at times t, float64."""
        alpha, sigma = self.process.alpha(t), self.process.sigma(t)
        if self.precondition == "edm":
            norm = self._input_norm(t)
            p, q = sigma / (norm * self.sigma_data), -alpha * self.sigma_data / norm
        elif self.target == "v":
            p, q = -sigma, alpha
        elif self.target == "flow":
            p, q = self.process.derivatives(t)
        else:
            zero, one = torch.zeros_like(alpha), torch.ones_like(alpha)
            p, q = (zero, one) if self.target == "eps" else (one, zero)
        return Coefficients(alpha, sigma, p, q)

    def denoised(self, x_t: Tensor, output: Tensor, t: Tensor) -> Denoised:
        """x̂_0 and ε̂ of the network's output F̂ at x_t (B, …) and t (B,): the solution of F̂ = p·x̂_0 + q·ε̂ and Eq. 1."""
        if self.name == "eps":
            return Denoised(self.process.predict_x_0(x_t, output, t), output)
        if self.name == "x0":
            return Denoised(output, self.process.predict_eps(x_t, output, t))
        c = self.coefficients(t)
        det = c.det
        x_0 = like(c.q / det, x_t) * x_t - like(c.sigma / det, x_t) * output
        return Denoised(x_0, like(c.alpha / det, x_t) * output - like(c.p / det, x_t) * x_t)

    def noise(self, x_t: Tensor, output: Tensor, t: Tensor) -> Tensor:
        """ε̂ alone."""
        return output if self.name == "eps" else self.denoised(x_t, output, t).eps

    def _input_norm(self, t: Tensor) -> Tensor:
        """n = √(σ² + α²·σ_data²), the standard deviation of x_t."""
        return torch.hypot(self.process.sigma(t), self.process.alpha(t) * self.sigma_data)


def convert(value: Tensor, x_t: Tensor, t: Tensor, process: str | Interpolant, source: str, target: str) -> Tensor:
    """Convert a prediction of target `source` at x_t and t into one of target `target`.

    Raises `InvalidValueError` at times where it is undefined: noise says nothing about x_0 where α = 0, and an image
    nothing about ε where σ = 0.
    """
    before, after = (Objective(get_process(process), name) for name in (source, target))
    if source == target:
        return value
    c, other = before.coefficients(t), after.coefficients(t)
    undefined = ~(c.det.isfinite() & (c.det != 0) & other.p.isfinite() & other.q.isfinite())
    if bool(undefined.any()):
        at = torch.as_tensor(t, dtype=torch.float64).expand_as(undefined)[undefined].flatten()[0].item()
        alpha, sigma = float(before.process.alpha(at)), float(before.process.sigma(at))
        raise InvalidValueError(
            f"{target!r} does not follow from {source!r} at t = {at:g} of process {before.process.name!r}, where "
            f"α = {alpha:.3g} and σ = {sigma:.3g}; use times inside the process, or target 'v'"
        )
    return after.target_of(*before.denoised(x_t, value, t), t)


def get_objective(spec: Any, **changes: Any) -> Objective:
    """Return an objective by name, from a mapping, or from a process, which means noise prediction on it.

    get_objective("flow"); get_objective("v", process="sd"); get_objective({"name": "edm", "sigma_data": 0.6})
    """
    if isinstance(spec, Objective):
        return replace(spec, **changes)
    if isinstance(spec, Interpolant):
        return Objective(spec, **changes)
    settings = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    name = settings.pop("name", "eps")
    if name not in OBJECTIVES:
        if name not in INTERPOLANTS:
            raise unknown("objective or process", str(name), (*OBJECTIVES, *INTERPOLANTS))
        return Objective(get_process({"name": name, **settings}), **changes)
    settings = {**OBJECTIVES[name], **settings, **changes}
    known = [field.name for field in fields(Objective)]
    for key in settings.keys() - set(known):
        raise unknown(f"part of objective {name!r}", key, known)
    return Objective(**settings)
