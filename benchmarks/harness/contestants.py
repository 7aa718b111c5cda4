"""Who takes part: each function builds the cases of one process, by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from scalelong.bench.peak import products, together
from scalelong.bench.reference import ReferenceLoop, ReferenceUViT
from scalelong.native import keep_memory
from torch import Tensor, nn

from scalelong.models import UViT
from scalelong.runs.config import Config, override
from scalelong.runs.network import build_network
from scalelong.training.examples import Examples
from scalelong.training.presets import preset
from scalelong.training.trainer import Trainer

Cases = dict[str, Callable[[], Any]]
S2: dict[str, Any] = {"img_size": 32, "patch_size": 2, "embed_dim": 512, "depth": 12, "num_heads": 8}


def ours(name: str, **train: Any) -> Cases:
    """Our trainer: a whole step, its data alone, and what follows the gradient."""
    config = quiet(name, **train)
    trainer = Trainer(config, Examples(config, config.data.split))
    batches = iter(range(10, 10**9))
    trainer.step()  # there are gradients now
    return {
        "step": trainer.step,
        "data": lambda: trainer.batch(next(batches)),
        "update": lambda: (trainer._clipped_norm(), trainer.optimizer.step(), trainer.ema.update(1)),
    }


def usual(name: str) -> Cases:
    """The usual loop with our initial weights."""
    config = quiet(name)
    examples = Examples(config, config.data.split)
    loop = usual_loop(config, examples, build_network(config, examples.shapes))
    loop.step()
    return {"step": loop.step, "data": loop.batch, "update": partial(usual_update, loop)}


def floor(name: str) -> Cases:
    """The matrix products of a preset's step, forward and backward, on ready operands: nothing else."""
    config = quiet(name)
    shapes, m = Examples(config, config.data.split).shapes, config.model
    tokens = 1 + (shapes.size // m.patch_size) ** 2
    layers = products(batch=config.train.batch_size, tokens=tokens, width=m.embed_dim, depth=m.depth)
    return {"products": together(layers)}


def our_s2() -> Cases:
    """Our U-ViT-S/2, forward + backward at batch 2, its memory kept as in training."""
    keep_memory()
    return _forward_and_backward(UViT(**S2))


def usual_s2() -> Cases:
    """The usual U-ViT-S/2 with the weights of ours."""
    return _forward_and_backward(twin(UViT(**S2), **S2))


def _forward_and_backward(net: nn.Module) -> Cases:
    x, t = torch.randn(2, 3, 32, 32), torch.rand(2) * 999
    return {"fp32": backward(net, x, t), "bf16": backward(net, x, t, torch.bfloat16)}


def our_unet(batch_size: int) -> Cases:
    """The step of `cifar10-tiny-unet`, and its network alone."""
    config = quiet("cifar10-tiny-unet", batch_size=batch_size)
    trainer = Trainer(config, Examples(config, config.data.split))
    x, t = torch.randn(batch_size, 3, 32, 32), torch.rand(batch_size) * 999
    return {"step": trainer.step, "network": backward(trainer.denoise, x, t)}


def diffusers_unet(batch_size: int) -> Cases:
    """The same network in diffusers' example loop."""
    from scalelong.bench.peers import DiffusersLoop

    config = quiet("cifar10-tiny-unet", batch_size=batch_size)
    examples = Examples(config, config.data.split)
    net = build_network(config, examples.shapes)
    plain = type(net).from_config(net.config)  # type: ignore[attr-defined]
    plain.load_state_dict(net.state_dict())
    loop = DiffusersLoop(plain.train(), examples.images.images, **_loop_options(config))
    return {"step": loop.step}


def lucidrains_unet(batch_size: int) -> Cases:
    """lucidrains' U-Net of about that size, forward and backward; nothing where the package is not installed."""
    from scalelong.bench.peers import lucidrains_unet as build

    net = build(32, (1, 2, 2, 2))
    x, t = torch.randn(batch_size, 3, 32, 32), torch.rand(batch_size) * 999
    return {} if net is None else {f"network {count(net)}": backward(net, x, t)}


def sampling(kind: str, n: int = 32, steps: int = 10) -> Cases:
    """`steps` evaluations of `digits`' network: in our sampler (ours, compiled, bf16), or in diffusers' loop."""
    from scalelong.diffusion import sample

    config = quiet("digits")
    examples = Examples(config, config.data.split)
    net: Any = build_network(config, examples.shapes).eval()
    if kind == "usual":
        net = usual_loop(config, examples, net).averaged
    if kind in ("usual", "pipeline"):
        return {"sample": partial(_pipeline, net, n, steps)}
    keep_memory()  # as `scalelong sample` does
    dtype = torch.bfloat16 if kind == "bf16" else None
    if kind == "compiled":
        from torch._inductor import config as inductor

        inductor.freezing = inductor.cpp_wrapper = True  # weights may be laid out anew: they do not change
        net = torch.compile(net)
    return {
        "sample": lambda: list(
            sample(net, n, (1, 8, 8), "vp", sampler="dpm-solver++", steps=steps, device="cpu", autocast=dtype)
        )
    }


@torch.no_grad()
def _pipeline(net: nn.Module, n: int, steps: int) -> Tensor:
    """A loop as diffusers' pipelines have it; the scheduler is made once before."""
    from diffusers import DPMSolverMultistepScheduler

    scheduler = _SCHEDULERS.setdefault("dpm", DPMSolverMultistepScheduler(solver_order=2))
    x = torch.randn(n, 1, 8, 8)
    with warnings.catch_warnings():  # diffusers calls np.array on a tensor, of which NumPy 2 complains
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        x = scheduler.step(net(x, t.expand(len(x))), t, x).prev_sample
    return (x / 2 + 0.5).clamp(0, 1)


_SCHEDULERS: dict[str, Any] = {}


# ------------------------------------------------------------------------------------------ their parts


def pair(name: str) -> tuple[Trainer, ReferenceLoop]:
    """Our trainer and the usual loop in one process, with one set of weights, on the same images."""
    config = quiet(name)
    examples = Examples(config, config.data.split)
    trainer = Trainer(config, examples)
    return trainer, usual_loop(config, examples, trainer.net)


def quiet(name: str, **train: Any) -> Config:
    return override(preset(name), {"monitor.every": 0, **{f"train.{k}": v for k, v in train.items()}})


def usual_loop(config: Config, examples: Examples, net: nn.Module) -> ReferenceLoop:
    m = config.model
    shape = {"img_size": examples.shapes.size, "in_chans": examples.shapes.channels, "patch_size": m.patch_size}
    shape |= {"embed_dim": m.embed_dim, "depth": m.depth, "num_heads": m.num_heads}
    same = twin(net, **shape, mlp_time_embed=m.mlp_time_embed)
    return ReferenceLoop(same, examples.images.images, **_loop_options(config))


def usual_update(loop: ReferenceLoop) -> None:
    if loop.clip is not None:
        torch.nn.utils.clip_grad_norm_(loop.net.parameters(), loop.clip)
    loop.optimizer.step()
    loop.average()


def twin(net: nn.Module, **shape: Any) -> ReferenceUViT:
    """The usual network with the weights of `net`."""
    same = ReferenceUViT(**shape)
    same.load_state_dict(net.state_dict())
    return same


def backward(net: nn.Module, x: Tensor, t: Tensor, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    def run() -> None:
        net.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = net(x, t).float().square().mean()
        loss.backward()

    return run


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def _loop_options(config: Config) -> dict[str, Any]:
    t = config.train
    options = {"batch_size": t.batch_size, "lr": t.lr, "betas": t.betas, "weight_decay": t.weight_decay}
    return options | {"flip": config.data.flip, "clip": t.clip, "decay": config.ema.decay}
