"""Measure how often parts of LS are dead: κ_i that does not depend on its input, weights without gradient.

    python benchmarks/studies/dead_gates.py [--seeds 200] [--steps 300] [--fitted 50] [--json FILE]

Skips come from randomly initialized networks (diffusers U-Nets of the given widths, U-ViTs with the given tokens) on
noise, one skip per distinct width. For each seed and form of LS:

- `step 0`: the share of seeds in which at least one κ_i has a derivative of exactly zero with respect to x_i on every
  sample, and the share in which at least one weight tensor has no gradient; `weakest`, the first percentile over seeds
  of the smallest RMS derivative of a κ_i, relative to the median seed of the paper's form.
- `after`: the same after `steps` steps of Adam (1e-3) that fit κ_i to a gate that depends on the input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DModel
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import scalelong
from scalelong import LearnableScaling
from scalelong.scaling import SkipScaling
from scalelong.scaling.modules import SqueezeExcitation
from scalelong.skips import find_sites
from scalelong.skips.hooks import attach

SAMPLES = 8
NETWORKS = ("17 tokens", "257 tokens", "32,64", "64,128,256", "320,640", "128,256,256,256")


def widened(least: int) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        for parent in list(module.modules()):
            for name, se in list(parent.named_children()):
                if isinstance(se, SqueezeExcitation):
                    hidden = max(least, se.layer1.out_features)
                    setattr(
                        parent, name, SqueezeExcitation(se.layer1.in_features, hidden, se.layer2.out_features, "relu")
                    )

    return change


def activated(make: Callable[[], nn.Module]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        for se in module.modules():
            if isinstance(se, SqueezeExcitation):
                se.act = make()

    return change


FORMS: dict[str, Callable[[nn.Module], None]] = {
    "ReLU (paper)": activated(nn.ReLU),
    "ReLU, hidden >= 16": widened(16),
    "LeakyReLU 0.01": activated(nn.LeakyReLU),
    "ELU": activated(nn.ELU),
    "Mish": activated(nn.Mish),
    "GELU": activated(nn.GELU),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network and images."""
    if name.endswith("tokens"):
        side = int((int(name.split()[0]) - 1) ** 0.5)
        net: nn.Module = scalelong.UViT(img_size=2 * side, patch_size=2, embed_dim=64, depth=6, num_heads=2)
        return net, torch.randn(SAMPLES, 3, 2 * side, 2 * side)
    widths = tuple(map(int, name.split(",")))
    kinds = {"down_block_types": ("DownBlock2D",) * len(widths), "up_block_types": ("UpBlock2D",) * len(widths)}
    net = UNet2DModel(sample_size=16, block_out_channels=widths, layers_per_block=1, **kinds)
    return net, torch.randn(SAMPLES, 3, 16, 16)


class Capture:
    def __init__(self) -> None:
        self.skips: dict[int, Tensor] = {}

    def scale(self, skip: Tensor, i: int) -> Tensor:
        self.skips[i] = skip.detach()
        return skip


def capture(name: str) -> tuple[list[Tensor], list[Any]]:
    """Return the skips of one pass, and their shapes."""
    torch.manual_seed(0)
    net, x = build(name)
    sites, actor = find_sites(net), Capture()
    with torch.no_grad():
        handles = attach(net, sites, actor)
        net(x, torch.linspace(1, 999, SAMPLES))
        for handle in handles:
            handle.remove()
    first = {site.shape: i for i, site in reversed(list(enumerate(sites, start=1)))}
    return [actor.skips[i] for i in first.values()], list(first)


def pooled(skips: list[Tensor], scaler: Any) -> list[Tensor]:
    """GAP, shaped so that the module pools it again to itself."""
    gated = [
        1 if gate == "tokens" else dim % x.ndim for gate, dim, x in zip(scaler.gates, scaler.dims, skips, strict=True)
    ]
    return [x.mean([d for d in range(1, x.ndim) if d != k], True) for x, k in zip(skips, gated, strict=True)]


def health(scaler: Any, inputs: list[Tensor], parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the RMS derivative of each κ_i on each seed (seeds, N), and the gradient norm of each weight tensor."""

    def projected(own: dict[str, Tensor], xs: list[Tensor]) -> Tensor:
        terms = []
        for i, x in enumerate(xs, start=1):
            kappa = functional_call(scaler, own, (x, i))
            terms.append((kappa * directions[i - 1]).sum())
        return torch.stack(terms).sum()

    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(x.shape, generator=generator) for x in inputs]
    of_parameters, of_inputs = vmap(grad(projected, argnums=(0, 1)), in_dims=(0, None))(parameters, inputs)
    derivative = torch.stack([g.flatten(1).square().mean(1).sqrt() for g in of_inputs], 1)
    weights = torch.stack([g.flatten(1).norm(dim=1) for k, g in of_parameters.items() if k.endswith("weight")], 1)
    return derivative, weights


def fit(scaler: Any, inputs: list[Tensor], parameters: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    """Train every seed's LS with Adam to reproduce gates that depend on the input."""
    generator = torch.Generator().manual_seed(2)
    standard = [(x - x.mean(0)) / (x.std(0) + 1e-6) for x in inputs]
    targets = [torch.sigmoid(x + torch.randn(x.shape[1:], generator=generator)) for x in standard]

    def loss(own: dict[str, Tensor]) -> Tensor:
        pairs = zip(inputs, targets, strict=True)
        errors = [(functional_call(scaler, own, (x, i)) - y).square().mean() for i, (x, y) in enumerate(pairs, start=1)]
        return torch.stack(errors).mean()

    values = {k: v.detach().clone().requires_grad_() for k, v in parameters.items()}
    optimizer = torch.optim.Adam(values.values(), lr=1e-3)
    gradients = vmap(grad(loss))
    for _ in range(steps):
        for key, g in gradients(values).items():
            values[key].grad = g
        optimizer.step()
    return {k: v.detach() for k, v in values.items()}


def share(flags: Tensor) -> float:
    return round(100 * flags.double().mean().item(), 1)


def measure(name: str, seeds: int, fitted: int, steps: int) -> dict[str, Any]:
    skips, shapes = capture(name)
    rows: dict[str, Any] = {}
    reference = None
    for form, change in FORMS.items():
        scalers: list[SkipScaling] = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            scaler = LearnableScaling(activation="relu").build(shapes)
            change(scaler)
            scalers.append(scaler)
        inputs = pooled(skips, scalers[0])
        parameters, _ = stack_module_state(scalers)  # type: ignore[arg-type]
        row = {}
        for when in ("step 0", "after"):
            if when == "after":
                parameters = fit(scalers[0], inputs, {k: v[:fitted] for k, v in parameters.items()}, steps)
            derivative, weights = health(scalers[0], inputs, parameters)
            reference = derivative.median() if reference is None else reference
            weakest = derivative.min(1).values.quantile(0.01) / reference
            row[when] = {
                "κ_i without input, %": share((derivative == 0).any(1)),
                "weights without gradient, %": share((weights == 0).any(1)),
                "weakest": float(f"{weakest:.2g}"),
            }
        rows[form] = row
        print(f"{name:16} {form:20}", json.dumps(row, ensure_ascii=False), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--fitted", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {name: measure(name, options.seeds, options.fitted, options.steps) for name in NETWORKS}
    if options.json:
        command = " ".join(["python benchmarks/studies/dead_gates.py", *sys.argv[1:]])
        options.json.write_text(
            json.dumps({"command": command, "results": results}, indent=2, ensure_ascii=False) + "\n"
        )


if __name__ == "__main__":
    main()
