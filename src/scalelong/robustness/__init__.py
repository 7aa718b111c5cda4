"""Robustness of real networks: Lipschitz constants with Theorem 3.4's bound, and sensitivity to extra input noise."""

from scalelong.robustness.lipschitz import BlockNorms, LocalLipschitz, block_norms, local_lipschitz, spectral_norm
from scalelong.robustness.sensitivity import Sensitivity, measure_sensitivity

__all__ = [
    "BlockNorms", "LocalLipschitz", "Sensitivity", "block_norms", "local_lipschitz", "measure_sensitivity",
    "spectral_norm",
]  # fmt: skip
