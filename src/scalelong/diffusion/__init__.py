"""Noise processes, the training objective and samplers behind one contract.

process = get_process("vp")
simple_loss(net, process, x_0, t, eps).mean().backward()
for images in sample(net, 64, (3, 32, 32), process, sampler="dpm-solver-fast"): ...
"""

from scalelong.diffusion.network import Denoiser, clip_denoised, guided, simple_loss
from scalelong.diffusion.samplers import SAMPLERS, Sampler, get_sampler
from scalelong.diffusion.sampling import RangeCheck, sample, to_uint8
from scalelong.process import DDPM, PROCESSES, VPSDE, Process, StableDiffusion, get_process

__all__ = [
    "DDPM", "PROCESSES", "SAMPLERS", "VPSDE", "Denoiser", "Process", "RangeCheck", "Sampler", "StableDiffusion",
    "clip_denoised", "get_process", "get_sampler", "guided", "sample", "simple_loss", "to_uint8",
]  # fmt: skip
