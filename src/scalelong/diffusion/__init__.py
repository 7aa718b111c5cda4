"""Diffusion: the noise processes, the objective, and samplers behind one contract.

process = get_process("vp")
t, eps = process.times(uniforms), normals
simple_loss(net, process, x_0, t, eps).loss.backward()
for images in sample(net, 64, (3, 32, 32), process, sampler="dpm-solver-fast"): ...

Names are imported when they are first used: the processes and the objective need torch alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "scalelong.diffusion.guidance": ("clip_denoised", "guided"),
        "scalelong.diffusion.objective": ("SimpleLoss", "simple_loss"),
        "scalelong.process": ("DDPM", "PROCESSES", "VPSDE", "Process", "StableDiffusion", "get_process"),
        "scalelong.diffusion.samplers": ("SAMPLERS", "Sampler", "State", "get_sampler"),
        "scalelong.diffusion.sampling": ("sample",),
    },
)

if TYPE_CHECKING:
    from scalelong.diffusion.guidance import clip_denoised as clip_denoised
    from scalelong.diffusion.guidance import guided as guided
    from scalelong.diffusion.objective import SimpleLoss as SimpleLoss
    from scalelong.diffusion.objective import simple_loss as simple_loss
    from scalelong.diffusion.samplers import SAMPLERS as SAMPLERS
    from scalelong.diffusion.samplers import Sampler as Sampler
    from scalelong.diffusion.samplers import State as State
    from scalelong.diffusion.samplers import get_sampler as get_sampler
    from scalelong.diffusion.sampling import sample as sample
    from scalelong.process import DDPM as DDPM
    from scalelong.process import PROCESSES as PROCESSES
    from scalelong.process import VPSDE as VPSDE
    from scalelong.process import Process as Process
    from scalelong.process import StableDiffusion as StableDiffusion
    from scalelong.process import get_process as get_process
