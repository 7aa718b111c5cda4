"""Interpolants, objectives and samplers behind one contract.

objective = get_objective("v", process="sd")
simple_loss(net, objective, x_0, t, eps).mean().backward()
for images in sample(net, 64, (3, 32, 32), objective, sampler="dpm-solver-fast"): ...
"""

from scalelong.diffusion.network import Denoiser, clip_denoised, guided, simple_loss
from scalelong.diffusion.samplers import SAMPLERS, Sampler, get_sampler
from scalelong.diffusion.sampling import RangeCheck, sample, to_uint8
from scalelong.objective import OBJECTIVES, Denoised, Objective, convert, get_objective
from scalelong.process import (
    DDPM,
    EDM,
    INTERPOLANTS,
    PROCESSES,
    VPSDE,
    Cosine,
    Interpolant,
    Linear,
    Process,
    StableDiffusion,
    get_process,
)

__all__ = [
    "DDPM", "EDM", "INTERPOLANTS", "OBJECTIVES", "PROCESSES", "SAMPLERS", "VPSDE", "Cosine", "Denoised", "Denoiser",
    "Interpolant", "Linear", "Objective", "Process", "RangeCheck", "Sampler", "StableDiffusion", "clip_denoised",
    "convert", "get_objective", "get_process", "get_sampler", "guided", "sample", "simple_loss", "to_uint8",
]  # fmt: skip
