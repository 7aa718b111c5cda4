"""Networks of Eq. 3 over seeds, run forward and backward under the scalings that the paper compares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.process import get_process
from scalelong.scaling import ConstantScaling, FixedScaling, NoScaling, UniformScaling
from scalelong.theory.propagation import NoisyInput, draw_inputs, measure_propagation, scaled
from scalelong.theory.stacked import StackedUNet

INPUTS = 8  # noisy inputs a network


@dataclass(frozen=True)
class Shape:
    """A network of Eq. 3: width m, N long skips, l matrices a block."""

    width: int
    skips: int
    depth: int

    def build(self, init: str, seed: int) -> StackedUNet:
        return StackedUNet(self.width, self.skips, self.depth, init=init, seed=seed)

    def matrix_name(self, row: int, column: int) -> str:
        """The name of W in this row and column of `Propagation.gradients`, such as "a_1 W_2"."""
        n = self.skips
        block = f"a_{row + 1}" if row < n else f"f_{n}" if row == n else f"b_{row - n}"
        return f"{block} W_{column + 1}"


@dataclass(frozen=True)
class Samples:
    """What `measure_propagation` gives, over networks of different seeds.

    features: (seeds, INPUTS, N+1).    gradients: (seeds, INPUTS, 2N+1, l).    noise_ratio: mean of ‖ε‖²/‖x_t‖².
    """

    features: Tensor
    gradients: Tensor
    noise_ratio: float


def four_scalings(kappa: float) -> dict[str, FixedScaling]:
    """The scalings that the paper compares."""
    return {
        "standard": NoScaling(),
        "1/√2": UniformScaling(),
        f"CS {kappa:g}": ConstantScaling(kappa),
        f"reversed CS {kappa:g}": ConstantScaling(kappa, reverse=True),
    }


def ddpm_inputs(count: int, width: int, seed: int) -> NoisyInput:
    """Noisy samples under DDPM's schedule."""
    return draw_inputs(count, width, get_process("ddpm").alpha_bar(torch.arange(1, 1001)), seed)


def sample_networks(init: str, shape: Shape, scalings: dict[str, FixedScaling], seeds: int) -> dict[str, Samples]:
    """One network and INPUTS noisy inputs a seed, the same for every scaling."""
    features: dict[str, list[Tensor]] = {name: [] for name in scalings}
    gradients: dict[str, list[Tensor]] = {name: [] for name in scalings}
    ratios = []
    for seed in range(seeds):
        net, noisy = shape.build(init, seed), ddpm_inputs(INPUTS, shape.width, seed)
        ratios.append(noisy.eps.square().sum(1) / noisy.x_t.square().sum(1))
        for name, spec in scalings.items():
            with scaled(net, spec):
                found = measure_propagation(net, noisy.x_t, noisy.eps)
            features[name].append(found.features)
            gradients[name].append(found.gradients)
    noise_ratio = float(torch.stack(ratios).mean())
    return {
        name: Samples(torch.stack(features[name]).double(), torch.stack(gradients[name]).double(), noise_ratio)
        for name in scalings
    }
