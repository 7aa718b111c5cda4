"""The sections of the benchmark. Each builds two or more contestants, runs them interleaved, and returns figures."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.bench.figures import Figure
from scalelong.bench.memory import peak_of
from scalelong.bench.peak import alone, flop, products
from scalelong.bench.reference import ReferenceLoop, ReferenceUViT
from scalelong.bench.timing import Spread, interleave
from scalelong.training.config import Config, override
from scalelong.training.examples import Examples
from scalelong.training.presets import preset
from scalelong.training.trainer import Trainer

S2: dict[str, Any] = {"img_size": 32, "patch_size": 2, "embed_dim": 512, "depth": 12, "num_heads": 8}


def limit(rounds: int) -> list[Figure]:
    """U-ViT-S/2, forward + backward at batch 2, beside its own matrix products and beside the usual code."""
    from scalelong.models import UViT

    size = {"batch": 2, "tokens": 257, "width": 512, "depth": 12}
    layers = products(**size)
    total, found = flop(layers, **size), []
    ours = UViT(**S2)
    usual = _twin(ours, **S2)
    x, t = torch.randn(2, 3, 32, 32), torch.rand(2) * 999
    for name, dtype, target, faster in (("fp32", torch.float32, 0.90, 1.0), ("bf16", torch.bfloat16, 0.82, 1.15)):
        if name == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            found.append(_bf16_without_hardware(layers, max(2, rounds // 3)))
            continue
        peak, work = alone(layers, dtype)
        times = interleave(
            {"ours": _backward(ours, x, t, dtype), "usual": _backward(usual, x, t, dtype), "peak": peak}, rounds, 1
        )
        pairs = zip(times.seconds["ours"], times.seconds["peak"], strict=True)
        share = Spread.of([(total / mine) / (work / theirs) for mine, theirs in pairs])
        rate = f"{total / times.of('ours').median / 1e9:.0f} of {work / times.of('peak').median / 1e9:.0f} GFLOP/s"
        found.append(
            Figure("limit", f"S/2 forward + backward, {name}", "its matrix products alone", share, target, note=rate)
        )
        found.append(
            Figure("limit", f"S/2 forward + backward, {name}", "usual code", times.speedup("ours", "usual"), faster)
        )
    return found


def step(name: str, rounds: int, *, target: float | None = 1.5) -> list[Figure]:
    """The whole step of a preset beside the usual loop, with the same numbers in the network."""
    trainer, loop = _contestants(name)
    case: dict[str, Callable[[], Any]] = {"ours": trainer.step, "usual": loop.step}
    batches = iter(range(10, 10**9))
    case["data"] = lambda: trainer.batch(next(batches))
    case["usual data"] = loop.batch
    case["update"] = lambda: (trainer._clipped_norm(), trainer.optimizer.step(), trainer.ema.update(1))
    case["usual update"] = partial(_usual_update, loop)
    times = interleave(case, rounds)
    usual = "usual code"
    note = f"{times.of('ours').median * 1e3:.0f} ms against {times.of('usual').median * 1e3:.0f}"
    return [
        Figure("step", f"{name}, whole step", usual, times.speedup("ours", "usual"), target, note=note),
        Figure("step", f"{name}, data", "our step", times.share("data", "ours"), 0.01, "≤"),
        Figure("step", f"{name}, data", usual, times.speedup("data", "usual data")),
        Figure("step", f"{name}, clip + AdamW + EMA", "our step", times.share("update", "ours")),
        Figure("step", f"{name}, clip + AdamW + EMA", usual, times.speedup("update", "usual update")),
    ]


def unet(rounds: int) -> list[Figure]:
    """The step of `cifar10-tiny-unet` beside diffusers' example loop, and its network beside lucidrains'."""
    from scalelong.bench.peers import DiffusersLoop, lucidrains_unet

    config = _quiet("cifar10-tiny-unet", batch_size=16)
    examples = Examples(config, config.data.split)
    trainer = Trainer(config, examples)
    plain = type(trainer.net).from_config(trainer.net.config)  # type: ignore[attr-defined]
    plain.load_state_dict(trainer.net.state_dict())
    loop = DiffusersLoop(plain.train(), examples.images.images, **_loop_options(config))
    case: dict[str, Callable[[], Any]] = {"ours": trainer.step, "diffusers": loop.step}
    x, t = torch.randn(16, 3, 32, 32), torch.rand(16) * 999
    case["ours network"] = _backward(trainer.denoise, x, t)
    other = lucidrains_unet(32, (1, 2, 2, 2))
    if other is not None:
        case["lucidrains"] = _backward(other, x, t)
    times = interleave(case, rounds, 1)
    found = [
        Figure("unet", "cifar10-tiny-unet, batch 16, step", "diffusers' loop", times.speedup("ours", "diffusers"), 1.2)
    ]
    if other is not None:
        note = f"{_count(trainer.net) / 1e6:.2f}M against {_count(other) / 1e6:.2f}M parameters, time a parameter"
        ratio = _count(trainer.net) / _count(other)
        faster = times.speedup("ours network", "lucidrains")
        scaled = Spread(faster.median * ratio, faster.low * ratio, faster.high * ratio)
        found.append(Figure("unet", "forward + backward", "lucidrains", scaled, note=note))
    return found


def sampling(rounds: int) -> list[Figure]:
    """Ten evaluations of `digits`' network, in our sampler and in a loop as diffusers' pipelines have it."""
    from diffusers import DPMSolverMultistepScheduler

    from scalelong.diffusion import sample

    trainer, loop = _contestants("digits")
    ours, usual = trainer.ema.net, loop.averaged
    scheduler = DPMSolverMultistepScheduler(solver_order=2)

    @torch.no_grad()
    def pipeline(net: nn.Module) -> Tensor:
        x = torch.randn(32, 1, 8, 8)
        with warnings.catch_warnings():  # diffusers calls np.array on a tensor, of which NumPy 2 complains
            warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
            scheduler.set_timesteps(10)
        for t in scheduler.timesteps:
            x = scheduler.step(net(x, t.expand(len(x))), t, x).prev_sample
        return (x / 2 + 0.5).clamp(0, 1)

    def images() -> list[Tensor]:
        return list(sample(ours, 32, (1, 8, 8), "vp", sampler="dpm-solver++", steps=10))

    times = interleave({"ours": images, "pipeline": lambda: pipeline(ours), "usual": lambda: pipeline(usual)}, rounds)
    name = "digits, 32 images, 10 evaluations"
    return [
        Figure("sampling", name, "same network in diffusers' loop", times.speedup("ours", "pipeline"), 1.0),
        Figure("sampling", name, "usual network in diffusers' loop", times.speedup("ours", "usual"), 1.0),
    ]


def update(rounds: int) -> list[Figure]:
    """AdamW and EMA of S/2 as a share of a step at batch 16.

    Forward + backward is timed at batch 2 and counted eight times. Small batches cost more an image, so the true share
    may be somewhat larger, but never more than that of batch 2, which the note gives.
    """
    from scalelong.models import UViT
    from scalelong.training.ema import Ema

    net = UViT(**S2)
    run = _backward(net, torch.randn(2, 3, 32, 32), torch.rand(2) * 999)
    run()
    optimizer, ema = torch.optim.AdamW(net.parameters(), fused=True), Ema(net, 0.9999)
    usual = _twin(net, **S2)
    _backward(usual, torch.randn(2, 3, 32, 32), torch.rand(2) * 999)()
    plain = ReferenceLoop.__new__(ReferenceLoop)
    plain.net, plain.decay = usual, 0.9999
    plain.averaged = _twin(net, **S2).requires_grad_(False)
    plain.optimizer = torch.optim.AdamW(usual.parameters())
    times = interleave(
        {
            "pass": run,
            "update": lambda: (optimizer.step(), ema.update(1)),
            "usual": lambda: (plain.optimizer.step(), plain.average()),
        },
        rounds,
        1,
    )
    pairs = zip(times.seconds["update"], times.seconds["pass"], strict=True)
    share = Spread.of([part / (8 * whole + part) for part, whole in pairs])
    bound = f"{times.of('update').median / (times.of('pass').median + times.of('update').median):.1%} at batch 2"
    return [
        Figure("update", "S/2, AdamW + EMA at batch 16", "a step", share, 0.05, "≤", bound),
        Figure("update", "S/2, AdamW + EMA", "usual code", times.speedup("update", "usual")),
    ]


def memory(batch: int = 16) -> list[Figure]:
    """The peak of live tensors of an S/2 step, beside the usual code's and with checkpointing."""
    from scalelong.models import UViT
    from scalelong.scaling import ConstantScaling

    ours = UViT(**S2, scaling=ConstantScaling(0.7))
    usual = ReferenceUViT(**S2, kappa=0.7)
    x, t = torch.randn(batch, 3, 32, 32), torch.rand(batch) * 999
    mine = peak_of(_backward(ours, x, t))
    theirs = peak_of(_backward(usual, x, t))
    ours.enable_gradient_checkpointing()
    less = peak_of(_backward(ours, x, t))
    name = f"S/2 with CS, batch {batch}, forward + backward"
    return [
        Figure("memory", name, "usual code", _exact(mine / theirs), 1.0, "≤", f"{mine / 2**20:.0f} MiB"),
        Figure("memory", f"{name}, checkpointed", "usual code", _exact(less / theirs), 0.45, "≤"),
    ]


def first_step() -> list[Figure]:
    """Processor seconds of a fresh interpreter from its start to the end of the first step of `digits`."""
    code = (
        "import time\n"
        "from scalelong.training.config import override\n"
        "from scalelong.training.examples import Examples\n"
        "from scalelong.training.presets import preset\n"
        "from scalelong.training.trainer import Trainer\n"
        "config = override(preset('digits'), {'monitor.every': 0})\n"
        "Trainer(config, Examples(config, config.data.split)).step()\n"
        "print(time.process_time())"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
        seconds.append(float(done.stdout.split()[-1]))
    return [Figure("first", "start to first step, digits", "one processor second", Spread.of(seconds), 10.0, "≤")]


# ------------------------------------------------------------------------------------------ contestants


def _quiet(name: str, **train: Any) -> Config:
    return override(preset(name), {"monitor.every": 0, **{f"train.{k}": v for k, v in train.items()}})


def _contestants(name: str) -> tuple[Trainer, ReferenceLoop]:
    """Our trainer and the usual loop, with one set of weights, on the same images."""
    config = _quiet(name)
    examples = Examples(config, config.data.split)
    trainer, m = Trainer(config, examples), config.model
    shape = {"img_size": examples.shapes.size, "in_chans": examples.shapes.channels, "patch_size": m.patch_size}
    shape |= {"embed_dim": m.embed_dim, "depth": m.depth, "num_heads": m.num_heads}
    net = _twin(trainer.net, **shape, mlp_time_embed=m.mlp_time_embed)
    return trainer, ReferenceLoop(net, examples.images.images, **_loop_options(config))


def _loop_options(config: Config) -> dict[str, Any]:
    t = config.train
    options = {"batch_size": t.batch_size, "lr": t.lr, "betas": t.betas, "weight_decay": t.weight_decay}
    return options | {"flip": config.data.flip, "clip": t.clip, "decay": config.ema.decay}


def _twin(net: nn.Module, **shape: Any) -> ReferenceUViT:
    """The usual network with the weights of `net`."""
    twin = ReferenceUViT(**shape)
    twin.load_state_dict(net.state_dict())
    return twin


def _backward(net: nn.Module, x: Tensor, t: Tensor, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    def run() -> None:
        net.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = net(x, t).float().square().mean()
        loss.backward()

    return run


def _bf16_without_hardware(layers: list[Any], rounds: int) -> Figure:
    """Where the processor has no bf16, its products are emulated: their rate beside fp32's says what is lost."""
    half, _ = alone(layers[:1], torch.bfloat16)
    full, _ = alone(layers[:1])
    times = interleave({"bf16": half, "fp32": full}, rounds, 1)
    note = "no bf16 instructions here: its targets cannot be measured"
    return Figure("limit", "S/2 matrix products in bf16", "fp32's", times.speedup("bf16", "fp32"), note=note)


def _usual_update(loop: ReferenceLoop) -> None:
    if loop.clip is not None:
        torch.nn.utils.clip_grad_norm_(loop.net.parameters(), loop.clip)
    loop.optimizer.step()
    loop.average()


def _count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def _exact(value: float) -> Spread:
    return Spread(value, value, value)
