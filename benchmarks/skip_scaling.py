"""What scaling costs: forward + backward of U-ViT unscaled, with CS and with LS, interleaved in one run.

    python benchmarks/skip_scaling.py [--rounds 15] [--json results/skip_scaling.json]

Times are processor time, which other programs on the machine disturb least, as ratios to the unscaled network in the
same round (median over rounds, with quartiles). Memory is the peak of live tensors during a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scalelong import ConstantScaling, LearnableScaling, NoScaling, UViT

SIZES = {
    "S/2": ({"img_size": 32, "patch_size": 2, "embed_dim": 512, "depth": 12, "num_heads": 8}, 2),
    "small": ({"img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 12, "num_heads": 4}, 16),
}
SCALINGS = {"none": NoScaling(), "cs": ConstantScaling(0.7), "ls": LearnableScaling()}
TARGETS = {"cs": (1.02, 1.02), "ls": (1.04, 1.02)}  # time, memory


class PeakMemory(TorchDispatchMode):
    """The most bytes of distinct storages alive at once, of tensors made inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        if key in self._seen():
            return
        self._seen().add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, size)

    def _seen(self) -> set[int]:
        return self.__dict__.setdefault("_keys", set())

    def _freed(self, key: int, size: int) -> None:
        self._seen().discard(key)
        self.live -= size


def step(model: torch.nn.Module, x: torch.Tensor, t: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(x, t).square().mean().backward()


def measure(size: str, rounds: int) -> dict[str, dict[str, float]]:
    config, batch = SIZES[size]
    x, t = torch.randn(batch, 3, 32, 32), torch.rand(batch) * 999
    models = {}
    for name, scaling in SCALINGS.items():
        torch.manual_seed(0)
        models[name] = UViT(**config, scaling=scaling)
        step(models[name], x, t)
    memory = {}
    for name, model in models.items():
        with PeakMemory() as mode:
            step(model, x, t)
        memory[name] = mode.peak
    ratios: dict[str, list[float]] = {name: [] for name in SCALINGS}
    for k in range(rounds):
        order = list(models)[k % 3 :] + list(models)[: k % 3]
        times = {}
        for name in order:
            start = time.process_time()
            step(models[name], x, t)
            times[name] = time.process_time() - start
        for name, seconds in times.items():
            ratios[name].append(seconds / times["none"])
    result = {}
    for name in ("cs", "ls"):
        low, middle, high = statistics.quantiles(ratios[name], n=4)
        result[name] = {
            "time": middle,
            "time_quartiles": [low, high],
            "memory": memory[name] / memory["none"],
            "time_target": TARGETS[name][0],
            "memory_target": TARGETS[name][1],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {size: measure(size, options.rounds) for size in SIZES}
    threads = torch.get_num_threads()
    print(f"forward + backward, {options.rounds} rounds, {threads} thread(s): ratio to the unscaled network")
    print(f"{'network':8} {'scaling':8} {'time':>7} {'quartiles':>16} {'target':>7} {'memory':>7} {'target':>7}")
    for size, rows in results.items():
        for name, r in rows.items():
            quartiles = "{:.3f} … {:.3f}".format(*r["time_quartiles"])
            print(
                f"{size:8} {name:8} {r['time']:7.3f} {quartiles:>16} {r['time_target']:7.2f} "
                f"{r['memory']:7.3f} {r['memory_target']:7.2f}"
            )
    if options.json:
        record = {
            "command": f"python benchmarks/skip_scaling.py --rounds {options.rounds}",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "results": results,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
