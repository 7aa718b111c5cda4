"""κ for the data and the network of a config: the range of κ, and `--scaling auto` resolved."""

from dataclasses import replace

import torch

from scalelong.kappa import KappaEstimate, estimate_kappa
from scalelong.models.registry import get_model
from scalelong.runs.config import Config
from scalelong.runs.run import build_network
from scalelong.scaling import ConstantScaling, NoScaling
from scalelong.skips import find_sites
from scalelong.skips.auto import AutoKappa, auto_kappa
from scalelong.training.examples import Examples

IMAGES = 2000  # of which the data's ratio is measured
PROBE = 8  # noisy images on which the network runs


def data_range(config: Config, examples: Examples, skips: int) -> KappaEstimate:
    """Return what the training images recommend for a network with this number of long skips."""
    images = examples.source.batch(torch.arange(min(len(examples), IMAGES)))
    latents = config.data.vae is not None
    return estimate_kappa(images, skips, samples=10_000, latents=latents, objective=examples.objective)


def resolve_kappa(config: Config, examples: Examples | None = None) -> tuple[Config, AutoKappa]:
    """Return the config with the kappa that `auto` chooses, and why.

    It depends on data and architecture, not on the seed: runs with different seeds get the same.
    """
    examples = examples or Examples(config, config.data.split)
    net = build_network(replace(config, scaling=NoScaling(), seed=0), examples.shapes)
    sites, batch = find_sites(net), examples.probe(PROBE)
    x_t = examples.process.add_noise(batch.x_0, batch.eps, batch.t)
    x, t = examples.objective.network_inputs(x_t, batch.t)
    denoise, ratio = get_model(config.model.kind).adapt(net), data_range(config, examples, len(sites)).mean_ratio
    call = lambda: denoise(x, t, y=batch.y, context=batch.context)  # noqa: E731
    chosen = auto_kappa(net, sites, config.placement, call, ratio)
    return replace(config, scaling=ConstantScaling(chosen.kappa), kappa=chosen.kappa), chosen
