"""Diffusion: the noise processes, the objective, and samplers behind one contract.

process = get_process("vp")
t, eps = process.times(uniforms), normals
simple_loss(net, process, x_0, t, eps).loss.backward()
for images in sample(net, 64, (3, 32, 32), process, sampler="dpm-solver-fast"): ...
"""

from __future__ import annotations

from scalelong.diffusion.guidance import clip_denoised, guided
from scalelong.diffusion.objective import SimpleLoss, simple_loss
from scalelong.diffusion.process import DDPM, PROCESSES, VPSDE, Process, StableDiffusion, get_process
from scalelong.diffusion.samplers import SAMPLERS, Sampler, State, get_sampler
from scalelong.diffusion.sampling import sample

__all__ = [
    "DDPM",
    "PROCESSES",
    "SAMPLERS",
    "VPSDE",
    "Process",
    "Sampler",
    "SimpleLoss",
    "StableDiffusion",
    "State",
    "clip_denoised",
    "get_process",
    "get_sampler",
    "guided",
    "sample",
    "simple_loss",
]
