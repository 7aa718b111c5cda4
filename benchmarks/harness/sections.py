"""The sections of the benchmark. Each builds two or more contestants, runs them interleaved, and returns figures."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from scalelong.bench.contestants import S2, backward, count, quiet, twin
from scalelong.bench.figures import Figure
from scalelong.bench.memory import peak_of
from scalelong.bench.peak import alone, flop, products
from scalelong.bench.reference import ReferenceLoop, ReferenceUViT
from scalelong.bench.remote import remotes
from scalelong.bench.timing import Case, Spread, interleave

from scalelong.runs.network import build_network
from scalelong.training.examples import Examples

_WHO = "scalelong.bench.contestants"


def limit(rounds: int) -> list[Figure]:
    """U-ViT-S/2, forward + backward at batch 2, beside its own matrix products and beside the usual code."""
    size = {"batch": 2, "tokens": 257, "width": 512, "depth": 12}
    layers = products(**size)
    total, found = flop(layers, **size), []
    with remotes(ours=(f"{_WHO}:our_s2", {}), usual=(f"{_WHO}:usual_s2", {})) as who:
        for name, dtype, target, faster in (("fp32", torch.float32, 0.90, 1.0), ("bf16", torch.bfloat16, 0.82, 1.15)):
            if name == "bf16" and not _bf16():
                found.append(_bf16_without_hardware(layers, max(2, rounds // 3)))
                continue
            peak, work = alone(layers, dtype)
            cases: dict[str, Case] = {key: remote.case(name) for key, remote in who.items()} | {"peak": peak}
            if name == "bf16":
                cases["usual fp32"] = who["usual"].case("fp32")
            times = interleave(cases, rounds, 1)
            pairs = zip(times.seconds["ours"], times.seconds["peak"], strict=True)
            share = Spread.of([(total / mine) / (work / theirs) for mine, theirs in pairs])
            rate = f"{total / times.of('ours').median / 1e9:.0f} of {work / times.of('peak').median / 1e9:.0f} GFLOP/s"
            what = f"S/2 forward + backward, {name}"
            found.append(Figure("limit", what, "its matrix products alone", share, target, note=rate))
            found.append(Figure("limit", what, "usual code", times.speedup("ours", "usual"), faster))
            if name == "bf16":
                gain = times.speedup("ours", "usual fp32")
                found.append(Figure("limit", what, "usual code in fp32", gain, 1.9))
    return found


def step(name: str, rounds: int, *, target: float | None = 1.5) -> list[Figure]:
    """The whole step of a preset beside the usual loop, each in a process of its own, and beside its products alone."""
    here = {"name": name}
    with remotes(ours=(f"{_WHO}:ours", here), usual=(f"{_WHO}:usual", here), floor=(f"{_WHO}:floor", here)) as who:
        case: dict[str, Case] = {"ours": who["ours"].case("step"), "usual": who["usual"].case("step")}
        for part in ("data", "update"):
            case[part], case[f"usual {part}"] = who["ours"].case(part), who["usual"].case(part)
        case["products"] = who["floor"].case("products")
        times = interleave(case, rounds)
    usual = "usual code"
    note = f"{times.of('ours').median * 1e3:.0f} ms against {times.of('usual').median * 1e3:.0f}"
    bound = "what would be left if all else cost nothing: no step with these products can be more times faster"
    return [
        Figure(name, f"{name}, whole step", usual, times.speedup("ours", "usual"), target, note=note),
        Figure(name, f"{name}, matrix products alone", usual, times.speedup("products", "usual"), note=bound),
        Figure(name, f"{name}, matrix products alone", "our step", times.share("products", "ours")),
        Figure(name, f"{name}, data", "our step", times.share("data", "ours"), 0.01, "≤"),
        Figure(name, f"{name}, data", usual, times.speedup("data", "usual data")),
        Figure(name, f"{name}, clip + AdamW + EMA", "our step", times.share("update", "ours")),
        Figure(name, f"{name}, clip + AdamW + EMA", usual, times.speedup("update", "usual update")),
    ]


def unet(rounds: int, batch: int = 16) -> list[Figure]:
    """The step of `cifar10-tiny-unet` beside diffusers' example loop, and its network beside lucidrains'."""
    size = {"batch_size": batch}
    with remotes(
        ours=(f"{_WHO}:our_unet", size),
        diffusers=(f"{_WHO}:diffusers_unet", size),
        lucidrains=(f"{_WHO}:lucidrains_unet", size),
    ) as who:
        case: dict[str, Case] = {"ours": who["ours"].case("step"), "diffusers": who["diffusers"].case("step")}
        case["network"] = who["ours"].case("network")
        other = who["lucidrains"].cases
        if other:
            case["lucidrains"] = who["lucidrains"].case(other[0])
        times = interleave(case, rounds, 1)
    loop, name = "diffusers' loop", f"cifar10-tiny-unet, batch {batch}"
    bound = "the network is diffusers' own in both: no loop around it can be more times faster"
    found = [
        Figure("unet", f"{name}, step", loop, times.speedup("ours", "diffusers"), 1.2),
        Figure("unet", f"{name}, network alone", loop, times.speedup("network", "diffusers"), note=bound),
    ]
    if other:
        mine, theirs = _unet_size(), int(other[0].split()[1])
        faster, ratio = times.speedup("network", "lucidrains"), mine / theirs
        scaled = Spread(faster.median * ratio, faster.low * ratio, faster.high * ratio)
        note = f"{mine / 1e6:.2f}M against {theirs / 1e6:.2f}M parameters, time a parameter"
        found.append(Figure("unet", "forward + backward", "lucidrains", scaled, note=note))
    return found


def sampling(rounds: int) -> list[Figure]:
    """Ten evaluations of `digits`' network, in our sampler and in a loop as diffusers' pipelines have it."""
    kinds = ["ours", "pipeline", "usual"] + (["bf16"] if _bf16() else [])
    with remotes(**{kind: (f"{_WHO}:sampling", {"kind": kind}) for kind in kinds}) as who:
        times = interleave({kind: remote.case("sample") for kind, remote in who.items()}, rounds)
    name, loop = "digits, 32 images, 10 evaluations", "same network in diffusers' loop"
    found = [
        Figure("sampling", name, loop, times.speedup("ours", "pipeline"), 1.0),
        Figure("sampling", name, "usual network in diffusers' loop", times.speedup("ours", "usual"), 1.0),
    ]
    if "bf16" in kinds:
        found.append(Figure("sampling", f"{name}, bf16", loop, times.speedup("bf16", "pipeline"), 1.5))
    return found


def compiled(rounds: int) -> list[Figure]:
    """What `torch.compile` buys: a step with `train.compile=true`, and sampling with frozen weights."""
    step, kinds = {"name": "digits"}, ("compiled", "ours", "pipeline", "usual")
    with remotes(
        compiled=(f"{_WHO}:ours", {**step, "compile": True}),
        ours=(f"{_WHO}:ours", step),
        usual=(f"{_WHO}:usual", step),
    ) as who:
        times = interleave({name: remote.case("step") for name, remote in who.items()}, rounds)
    with remotes(**{kind: (f"{_WHO}:sampling", {"kind": kind}) for kind in kinds}) as who:
        drawn = interleave({kind: remote.case("sample") for kind, remote in who.items()}, rounds)
    name = "digits, sampling, compiled and frozen"
    return [
        Figure("compiled", "digits, whole step, compiled", "usual code", times.speedup("compiled", "usual"), 1.5),
        Figure("compiled", "digits, whole step, compiled", "our step", times.speedup("compiled", "ours")),
        Figure("compiled", name, "same network in diffusers' loop", drawn.speedup("compiled", "pipeline"), 1.5),
        Figure("compiled", name, "usual network in diffusers' loop", drawn.speedup("compiled", "usual"), 1.5),
        Figure("compiled", name, "our sampler", drawn.speedup("compiled", "ours")),
    ]


def update(rounds: int) -> list[Figure]:
    """AdamW and EMA of S/2 as a share of a step at batch 16.

    Forward + backward is timed at batch 2 and counted eight times. Small batches cost more an image, so the true share
    may be somewhat larger, but never more than that of batch 2, which the note gives.
    """
    from scalelong.native import AdamW

    from scalelong.models import UViT
    from scalelong.training.ema import Ema

    net = UViT(**S2)
    run = backward(net, torch.randn(2, 3, 32, 32), torch.rand(2) * 999)
    run()
    optimizer, ema = AdamW(net.parameters(), fused=True), Ema(net, 0.9999)
    usual = twin(net, **S2)
    backward(usual, torch.randn(2, 3, 32, 32), torch.rand(2) * 999)()
    plain = ReferenceLoop.__new__(ReferenceLoop)
    plain.net, plain.decay = usual, 0.9999
    plain.averaged = twin(net, **S2).requires_grad_(False)
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
    mine = peak_of(backward(ours, x, t))
    theirs = peak_of(backward(usual, x, t))
    ours.enable_gradient_checkpointing()
    less = peak_of(backward(ours, x, t))
    name = f"S/2 with CS, batch {batch}, forward + backward"
    return [
        Figure("memory", name, "usual code", _exact(mine / theirs), 1.0, "≤", f"{mine / 2**20:.0f} MiB"),
        Figure("memory", f"{name}, checkpointed", "usual code", _exact(less / theirs), 0.45, "≤"),
    ]


def first_step() -> list[Figure]:
    """Processor seconds of a fresh interpreter from its start to the end of the first step of `digits`."""
    code = (
        "import time\n"
        "from scalelong.runs.config import override\n"
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


# ------------------------------------------------------------------------------------------ parts


def _bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _bf16_without_hardware(layers: list[Any], rounds: int) -> Figure:
    """Where the processor has no bf16, its products are emulated: their rate beside fp32's says what is lost."""
    half, _ = alone(layers[:1], torch.bfloat16)
    full, _ = alone(layers[:1])
    times = interleave({"bf16": half, "fp32": full}, rounds, 1)
    note = "no bf16 instructions here: its targets cannot be measured"
    return Figure("limit", "S/2 matrix products in bf16", "fp32's", times.speedup("bf16", "fp32"), note=note)


def _unet_size() -> int:
    config = quiet("cifar10-tiny-unet")
    return count(build_network(config, Examples(config, config.data.split).shapes))


def _exact(value: float) -> Spread:
    return Spread(value, value, value)
