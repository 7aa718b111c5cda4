"""Speed and memory, each as a ratio measured in one run: `make bench`, or

    python benchmarks/run.py [SECTION …] [--rounds 15] [--out results/bench.json] [--plot growth.png]
    python benchmarks/run.py --table results/bench.json      # print the tables of docs/performance.md

Set OMP_NUM_THREADS=1 on a shared machine. With --out, sections that were not run keep their earlier figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from baselines import DiffusersLoop, PlainLoop, PlainUViT, lucidrains_unet
from harness import Case, Figure, Spread, interleave, peak_of, table, write
from torch import Tensor, nn

import scalelong
from scalelong import ConstantScaling, LearnableScaling, NoScaling, StabilityMonitor, StackedUNet, UViT
from scalelong.diffusion import OBJECTIVES, sample
from scalelong.runs.config import Config, override
from scalelong.runs.run import build_network
from scalelong.training.examples import Examples
from scalelong.training.presets import preset
from scalelong.training.trainer import Trainer

S2: dict[str, Any] = {"img_size": 32, "patch_size": 2, "embed_dim": 512, "depth": 12, "num_heads": 8}
SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 12, "num_heads": 4}
BASELINE = "plain code"

# ------------------------------------------------------------------------------------------ training


def step(name: str, rounds: int) -> list[Figure]:
    """A whole training step of a preset beside the plain loop with the same weights, and its parts."""
    trainer = make_trainer(name)
    plain = plain_loop(trainer)
    batches = itertools.count(10)
    cases: dict[str, Case] = {
        "ours": trainer.step,
        "plain": plain.step,
        "data": lambda: trainer.batch(next(batches)),
        "plain data": plain.batch,
    }
    times = interleave(cases, rounds)
    note = f"{times.milliseconds('ours'):.0f} ms against {times.milliseconds('plain'):.0f} ms"
    return [
        Figure(name, f"{name}, training step", BASELINE, times.speedup("ours", "plain"), note=note),
        Figure(name, f"{name}, data", "our step", times.ratio("data", "ours"), 0.02, "≤"),
        Figure(name, f"{name}, data", f"data of {BASELINE}", times.speedup("data", "plain data")),
    ]


def objectives(rounds: int, name: str = "digits-uvit") -> list[Figure]:
    """A training step of every objective beside that of noise prediction."""
    trainers = {key: make_trainer(name, {"diffusion.objective": key}) for key in OBJECTIVES}
    times = interleave({key: trainer.step for key, trainer in trainers.items()}, rounds)
    return [
        Figure("objectives", f"{name}, step of objective {key}", "eps", times.ratio(key, "eps"), 1.01, "≤")
        for key in OBJECTIVES
        if key != "eps"
    ]


def unet(rounds: int, batch_size: int = 16) -> list[Figure]:
    """A step of `cifar10-tiny-unet` beside diffusers' example loop, and the network alone beside lucidrains'."""
    trainer = make_trainer("cifar10-tiny-unet", batch_size=batch_size)
    same = type(trainer.net).from_config(trainer.net.config)
    same.load_state_dict(trainer.net.state_dict())
    loop = DiffusersLoop(same.train(), trainer.examples.images.images, **loop_options(trainer.config))
    x, t = torch.randn(batch_size, 3, 32, 32), torch.rand(batch_size) * 999
    cases: dict[str, Case] = {
        "ours": trainer.step,
        "diffusers": loop.step,
        "network": backward(trainer.denoise, x, t),
    }
    other = lucidrains_unet(32, (1, 2, 2, 2))
    if other is not None:
        cases["lucidrains"] = backward(other, x, t)
    times = interleave(cases, rounds, 1)
    name, against = f"cifar10-tiny-unet, batch {batch_size}", "diffusers' example loop"
    bound = "the network is diffusers' in both"
    figures = [
        Figure("unet", f"{name}, training step", against, times.speedup("ours", "diffusers"), 1.0),
        Figure("unet", f"{name}, network alone", against, times.speedup("network", "diffusers"), note=bound),
    ]
    if other is not None:
        mine, theirs = count(trainer.net), count(other)
        faster, ratio = times.speedup("network", "lucidrains"), mine / theirs
        scaled = Spread(faster.median * ratio, faster.low * ratio, faster.high * ratio)
        note = f"{mine / 1e6:.2f}M against {theirs / 1e6:.2f}M parameters, per parameter"
        figures.append(Figure("unet", "forward + backward", "lucidrains", scaled, note=note))
    return figures


def compiled(rounds: int) -> list[Figure]:
    """What `train.compile=true` does to a `digits` step."""
    plain, compiled = make_trainer("digits-uvit"), make_trainer("digits-uvit", compile=True)
    times = interleave({"eager": plain.step, "compiled": compiled.step}, rounds, 3)
    return [Figure("compiled", "digits, compiled step", "our step", times.speedup("compiled", "eager"))]


def processes(rounds: int, steps: int = 10) -> list[Figure]:
    """Wall time of `digits` steps: one process, one with two threads, two processes with half the batch each."""
    layouts = {"1 × 1": (1, 1), "1 × 2": (1, 2), "2 × 1": (2, 1)}
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    for _ in range(rounds):
        for name, (world, threads) in layouts.items():
            seconds[name].append(wall_seconds(world, threads, steps))
    load = f"load average {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"
    figures = []
    for name, what in (("2 × 1", "2 processes × 1 thread"), ("1 × 2", "1 process × 2 threads")):
        ratios = [one / many for one, many in zip(seconds["1 × 1"], seconds[name], strict=True)]
        figures.append(Figure("processes", what, "1 × 1, wall time", Spread.of(ratios), note=load))
    return figures


def first_step() -> list[Figure]:
    """CPU seconds of a fresh interpreter from its start to the end of the first `digits` step."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r}); import run\n"
        "run.make_trainer('digits-uvit').step()\n"
        "print(time.process_time())"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
        seconds.append(float(done.stdout.split()[-1]))
    return [Figure("first", "start to first step, digits", "one CPU second", Spread.of(seconds), 10.0, "≤")]


# ------------------------------------------------------------------------------------------ scaling and monitor


def scaling(rounds: int) -> list[Figure]:
    """Forward + backward with CS and LS over the same network unscaled, in time and in peak memory."""
    targets = {"CS": (1.02, 1.02), "LS": (1.04, 1.02)}
    specs = {"none": NoScaling(), "CS": ConstantScaling(0.7), "LS": LearnableScaling()}
    figures = []
    for name, size, batch in (("U-ViT-S/2, batch 2", S2, 2), ("small U-ViT, batch 16", SMALL, 16)):
        x, t = torch.randn(batch, 3, 32, 32), torch.rand(batch) * 999
        cases = {key: backward(UViT(**size, scaling=spec), x, t) for key, spec in specs.items()}
        figures += _scaling_figures(name, cases, targets, rounds)
    x, t = torch.randn(4, 3, 32, 32), torch.rand(4) * 999
    small = {"block_out_channels": (32, 64, 64, 64), "attention_head_dim": 8}
    nets = {key: scalelong.build_unet("cifar10", scaling=spec, **small) for key, spec in specs.items()}
    cases = {key: backward(lambda x, t, net=net: net(x, t).sample, x, t, net) for key, net in nets.items()}
    return figures + _scaling_figures("small diffusers U-Net, batch 4", cases, targets, rounds)


def _scaling_figures(
    name: str, cases: dict[str, Case], targets: dict[str, tuple[float, float]], rounds: int
) -> list[Figure]:
    times = interleave(cases, rounds)
    memory = {key: peak_of(case) for key, case in cases.items()}
    figures = []
    for key, (time_target, memory_target) in targets.items():
        ratio = times.ratio(key, "none")
        figures.append(Figure("scaling", f"{name}, {key}, time", "unscaled", ratio, time_target, "≤"))
        share = memory[key] / memory["none"]
        peak = Spread(share, share, share)
        figures.append(Figure("scaling", f"{name}, {key}, memory", "unscaled", peak, memory_target, "≤"))
    return figures


def monitor(rounds: int, every: int = 10) -> list[Figure]:
    """A step with the monitor recording every 10 steps over the same step without it, on `digits` and a small U-Net.

    One network in one process; the monitor is switched off and on in turn for 2·`every` steps each. The ratio compares
    the recorded steps with their neighbours in time: 1 + extra / period.
    """
    figures = []
    for name, build in (("digits", _monitored_digits), ("small diffusers U-Net, batch 16", _monitored_unet)):
        with tempfile.TemporaryDirectory() as folder:
            ratios = _monitor_ratios(*build(Path(folder), every), rounds, every)
        figures.append(Figure("monitor", f"{name}, recorded every {every} steps", "unmonitored", ratios, 1.05, "≤"))
    return figures


def _monitor_ratios(step: Case, watch: StabilityMonitor, rounds: int, every: int) -> Spread:
    length = 2 * every
    recorded = {every - 1, length - 2, length - 1}  # steps of a period; every second snapshot takes a pair
    touched = recorded | {(k + 1) % length for k in recorded}
    ratios = []
    for round_ in range(rounds + 1):
        seconds: dict[bool, list[float]] = {}
        for on in (True, False):
            watch.every = every if on else 0
            seconds[on] = [_cpu_seconds(step) for _ in range(length)]
        if round_:  # the first round warms up
            usual = statistics.fmean(seconds[True][k] for k in range(length) if k not in touched)
            extra = sum(seconds[True][k] for k in touched - {0}) + seconds[False][0] - len(touched) * usual
            ratios.append(1 + extra / (length * usual))
    return Spread.of(ratios)


def _monitored_digits(folder: Path, every: int) -> tuple[Case, StabilityMonitor]:
    trainer = make_trainer("digits-uvit")
    trainer.monitor = StabilityMonitor(
        trainer.net, probe=(torch.randn(4, 1, 8, 8), torch.rand(4) * 999), every=every, out=folder / "stability.jsonl"
    )
    return trainer.step, trainer.monitor


def _monitored_unet(folder: Path, every: int) -> tuple[Case, StabilityMonitor]:
    net = scalelong.build_unet("cifar10", block_out_channels=(32, 64, 64, 64), attention_head_dim=8)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    x, t, eps = torch.randn(16, 3, 32, 32), torch.arange(16) * 60.0, torch.randn(16, 3, 32, 32)
    watch = StabilityMonitor(net, (x[:8], t[:8]), every=every, out=folder / "stability.jsonl")
    numbers = itertools.count(1)

    def step() -> None:
        optimizer.zero_grad()
        with watch.step(next(numbers)):
            losses = (net(x, t).sample - eps).square().flatten(1).mean(1)
            losses.mean().backward()
            watch.note(loss=losses, t=t)
        watch.note(grad_norm=torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        optimizer.step()

    return step, watch


# ------------------------------------------------------------------------------------------ sampling, memory, growth


def sampling(rounds: int, n: int = 32, steps: int = 10) -> list[Figure]:
    """Ten evaluations of the `digits` network in our sampler and in a loop as in diffusers' pipelines."""
    trainer = make_trainer("digits-uvit")
    net = trainer.ema.net.eval()
    options = {"sampler": "dpm-solver++", "steps": steps, "device": "cpu"}
    cases: dict[str, Case] = {
        "ours": lambda: list(sample(net, n, (1, 8, 8), "vp", **options)),
        "diffusers": partial(_pipeline_loop, net, n, steps),
    }
    times = interleave(cases, rounds)
    name = f"digits, {n} images, {steps} evaluations"
    return [Figure("sampling", name, "diffusers' loop", times.speedup("ours", "diffusers"), 1.0)]


@torch.no_grad()
def _pipeline_loop(net: nn.Module, n: int, steps: int) -> Tensor:
    from diffusers import DPMSolverMultistepScheduler

    scheduler, x = DPMSolverMultistepScheduler(solver_order=2), torch.randn(n, 1, 8, 8)
    with warnings.catch_warnings():  # diffusers calls np.array on a tensor, about which NumPy 2 warns
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        x = scheduler.step(net(x, t.expand(len(x))), t, x).prev_sample
    return (x / 2 + 0.5).clamp(0, 1)


def memory(batch: int = 16) -> list[Figure]:
    """Peak of live tensors in forward + backward of U-ViT-S/2 with CS, also with gradient checkpointing."""
    ours, plain = UViT(**S2, scaling=ConstantScaling(0.7)), PlainUViT(**S2, kappa=0.7)
    x, t = torch.randn(batch, 3, 32, 32), torch.rand(batch) * 999
    mine, theirs = peak_of(backward(ours, x, t)), peak_of(backward(plain, x, t))
    ours.enable_gradient_checkpointing()
    checkpointed = peak_of(backward(ours, x, t))
    name = f"U-ViT-S/2 with CS, batch {batch}, memory"
    figures = []
    for what, bytes_, target in ((name, mine, 1.02), (f"{name}, checkpointed", checkpointed, 0.45)):
        share = bytes_ / theirs
        figures.append(Figure("memory", what, BASELINE, Spread(share, share, share), target, "≤"))
    return figures


def growth(rounds: int) -> list[dict[str, Any]]:
    """Forward + backward time against depth, width, tokens, batch and number of scaled skips, with log–log slopes."""
    base: dict[str, Any] = {"img_size": 16, "patch_size": 2, "embed_dim": 128, "depth": 8, "num_heads": 4}
    axes = {"depth": (2, 4, 8, 16), "width": (64, 128, 256, 384), "tokens": (17, 65, 145, 257), "batch": (2, 4, 8, 16)}
    result = []
    for axis, sizes in axes.items():
        cases = {}
        for size in sizes:
            shape, batch = dict(base), size if axis == "batch" else 8
            if axis == "tokens":
                shape["img_size"] = 2 * math.isqrt(size - 1)
            elif axis != "batch":
                shape[{"width": "embed_dim"}.get(axis, axis)] = size
            x = torch.randn(batch, 3, shape["img_size"], shape["img_size"])
            cases[size] = backward(UViT(**shape), x, torch.rand(batch) * 999)
        result.append(_growth(axis, cases, rounds))
    x, skips = torch.randn(64, 256), {}
    for n, matrices in {
        1: 15,
        2: 9,
        4: 5,
        7: 3,
        22: 1,
    }.items():  # Eq. 3: (2N + 1)·l = 45 matrices
        net = StackedUNet(256, n, matrices, scaling=ConstantScaling(0.9), init="norm-preserving")
        skips[n] = backward(lambda x, t, net=net: net(x), x, x, net)
    return [*result, _growth("skips", skips, 4 * rounds)]


def _growth(axis: str, cases: dict[int, Case], rounds: int) -> dict[str, Any]:
    times = interleave({str(size): case for size, case in cases.items()}, rounds, 1)
    sizes = list(cases)
    ratios = [times.ratio(str(size), str(sizes[0])) for size in sizes]
    slope, _ = statistics.linear_regression([math.log(s) for s in sizes], [math.log(r.median) for r in ratios])
    return {"axis": axis, "sizes": sizes, "ratios": [vars(ratio) for ratio in ratios], "slope": slope}


def plot_growth(result: list[dict[str, Any]], path: Path) -> None:
    """One log–log panel per axis, quartiles as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(result), figsize=(3.2 * len(result), 3.0), layout="constrained")
    for panel, g in zip(panels, result, strict=True):
        medians = [r["median"] for r in g["ratios"]]
        bars = [[r["median"] - r["low"] for r in g["ratios"]], [r["high"] - r["median"] for r in g["ratios"]]]
        panel.errorbar(g["sizes"], medians, yerr=bars, marker="o", capsize=3)
        panel.set(xscale="log", yscale="log", xlabel=g["axis"], title=f"slope {g['slope']:.2f}")
        panel.set_xticks(g["sizes"], [str(size) for size in g["sizes"]])
        panel.set_xticks([], minor=True)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
    panels[0].set_ylabel("time / smallest")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------ parts


def make_trainer(name: str, settings: dict[str, Any] | None = None, **train: Any) -> Trainer:
    """A preset's trainer without a monitor."""
    own = {"monitor.every": 0, **{f"train.{key}": value for key, value in train.items()}, **(settings or {})}
    config = override(preset(name), own)
    return Trainer(config, Examples(config, config.data.split))


def plain_loop(trainer: Trainer) -> PlainLoop:
    """The plain loop with the trainer's weights and images."""
    m, examples = trainer.config.model, trainer.examples
    shape = {"img_size": examples.shapes.size, "in_chans": examples.shapes.channels, "patch_size": m.patch_size}
    shape |= {"embed_dim": m.embed_dim, "depth": m.depth, "num_heads": m.num_heads}
    net = PlainUViT(**shape, mlp_time_embed=m.mlp_time_embed)
    net.load_state_dict(build_network(trainer.config, examples.shapes).state_dict())
    return PlainLoop(net, examples.images.images, **loop_options(trainer.config))


def loop_options(config: Config) -> dict[str, Any]:
    t = config.train
    options = {"batch_size": t.batch_size, "lr": t.lr, "betas": t.betas, "weight_decay": t.weight_decay}
    return options | {"flip": config.data.flip, "clip": t.clip, "decay": config.ema.decay}


def backward(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, t: Tensor, net: nn.Module | None = None) -> Case:
    """Forward + backward of `call(x, t)`; `net` is the module whose gradients to clear, `call` itself by default."""
    module = net if net is not None else call
    assert isinstance(module, nn.Module)

    def run() -> None:
        module.zero_grad(set_to_none=True)
        call(x, t).square().mean().backward()

    return run


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def _cpu_seconds(case: Case) -> float:
    start = time.process_time()
    case()
    return time.process_time() - start


def wall_seconds(world: int, threads: int, steps: int) -> float:
    """Wall seconds of the slowest of `world` processes for `steps` steps of `digits`."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r}); import run, torch\n"
        "trainer = run.make_trainer('digits-uvit')\n"
        "for _ in range(3): trainer.step()\n"
        "start = time.perf_counter()\n"
        f"for _ in range({steps}): trainer.step()\n"
        "print('took', time.perf_counter() - start)\n"
        "if torch.distributed.is_initialized(): torch.distributed.destroy_process_group()\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(world):
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if world > 1:
            env |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-W", "ignore", "-c", code]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    lines = [process.communicate()[0] for process in started]
    return max(float(text.split("took ")[1].split()[0]) for text in lines)


SECTIONS: dict[str, Callable[[int], list[Figure]]] = {
    "digits": lambda rounds: step("digits-uvit", rounds),
    "cifar10-tiny": lambda rounds: step("cifar10-tiny", max(2, rounds // 3)),
    "unet": lambda rounds: unet(max(2, rounds // 2)),
    "objectives": lambda rounds: objectives(6 * rounds),
    "sampling": sampling,
    "compiled": compiled,
    "scaling": scaling,
    "monitor": lambda rounds: monitor(max(2, rounds // 2)),
    "memory": lambda _: memory(),
    "processes": lambda rounds: processes(max(2, rounds // 5)),
    "first": lambda _: first_step(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}, growth; default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the tables of an earlier run and exit")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text(encoding="utf-8"))))
        return
    chosen = options.sections or [*SECTIONS, "growth"]
    if unknown := set(chosen) - {*SECTIONS, "growth"}:
        parser.error(f"unknown section {sorted(unknown)[0]!r} (known: {', '.join(SECTIONS)}, growth)")
    torch.manual_seed(0)
    figures: list[Figure] = []
    for name in chosen:
        if name in SECTIONS:
            print(f"{name} …", file=sys.stderr, flush=True)
            figures += SECTIONS[name](options.rounds)
    grown = growth(max(2, options.rounds // 3)) if "growth" in chosen else []
    if options.plot and grown:
        plot_growth(grown, options.plot)
    if options.out:
        write(options.out, " ".join(["python benchmarks/run.py", *sys.argv[1:]]), figures, grown)
    rows = [{**vars(figure), "value": vars(figure.value), "holds": figure.holds} for figure in figures]
    print(table({"figures": rows, "growth": grown}))


if __name__ == "__main__":
    main()
