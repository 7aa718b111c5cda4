"""The number and the order of the long skips, against a count that knows nothing of scalelong."""

import pytest
import torch
from joins import JoinWatch
from skip_networks import NETWORKS, VARIANTS, example, make, run

import scalelong
from scalelong import ExplicitScaling


def watch(net, name, disturb=None):
    network = (NETWORKS | VARIANTS)[name]
    example(name)  # cached: made within the watch, its tensors would be counted in the first pass only
    with JoinWatch(net, network.middle, network.axis, disturb) as seen:
        output = run(net, name)
    return output, seen.joined


@pytest.mark.parametrize("name", NETWORKS | VARIANTS)
@torch.no_grad()
def test_as_many_skips_as_old_tensors_are_joined_and_the_last_made_first(name):
    net = make(name)
    _, joined = watch(net, name)
    assert len(joined) == (NETWORKS | VARIANTS)[name].skips == len(scalelong.describe(net).rows)
    assert joined == sorted(joined, reverse=True)  # so the k-th join from the end is skip k


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_kappa_of_zero_cuts_the_skips_that_it_names_and_no_other(name):
    """With κ_i = 0 the output must not depend on what skip i brings, and must on what every other skip brings.

    The sets of cut skips are the binary digits of i, so that no two skips are cut in the same sets.
    """

    def felt(net):
        plain, _ = watch(net, name)
        return [i for i, made in skips.items() if not torch.equal(watch(net, name, disturb=made)[0], plain)]

    net, network = make(name), NETWORKS[name]
    joined = watch(net, name)[1]
    skips = {i: joined[-i] for i in range(1, network.skips + 1)}  # the tensor that skip i brings
    for digit in range(network.skips.bit_length()):
        cut = [i for i in skips if i >> digit & 1]
        scalelong.apply(net, ExplicitScaling([0.0 if i in cut else 0.5 for i in skips]), replace=True)
        assert felt(net) == [i for i in skips if i not in cut]


NORMS_AND_SHORTCUTS = {  # in the order of the forward pass, innermost first
    **dict.fromkeys(
        ("UNet2DModel", "UNet2DConditionModel", "SDXL", "UNet3DConditionModel", "UNetMotionModel"),
        lambda net: [(r.norm1, r.conv_shortcut) for block in net.up_blocks for r in block.resnets],
    ),
    "UNetSpatioTemporalConditionModel": lambda net: [
        (r.spatial_res_block.norm1, r.spatial_res_block.conv_shortcut) for block in net.up_blocks for r in block.resnets
    ],
    "MONAI DiffusionModelUNet": lambda net: [
        (r.norm1, r.skip_connection.conv) for block in net.up_blocks for r in block.resnets
    ],
    "guided-diffusion": lambda net: [(block[0].in_layers[0], block[0].skip_connection) for block in net.output_blocks],
    "HunyuanDiT2DModel": lambda net: [(block.skip_norm, None) for block in net.blocks[5:]],
}


@pytest.mark.parametrize("name", NORMS_AND_SHORTCUTS)
@torch.no_grad()
def test_behind_the_norm_kappa_equals_kappa_folded_into_the_weights(name):
    """κ_i on a norm's output is κ_i on its weight and bias; on a shortcut's input it is κ_i on its input weights."""
    net, network = make(name), NETWORKS[name]
    kappas = [0.9, 0.3, 1.4, 0.6][: network.skips]
    with JoinWatch(net, network.middle, network.axis) as watch:
        unscaled = run(net, name)
    consumers = NORMS_AND_SHORTCUTS[name](net)
    for kappa, made, (norm, shortcut) in zip(reversed(kappas), watch.joined, consumers, strict=True):
        channels = watch.made[made].shape[network.axis]
        norm.weight[-channels:] *= kappa
        norm.bias[-channels:] *= kappa
        if shortcut is not None:
            shortcut.weight[:, -channels:] *= kappa
    folded = run(net, name)
    hooked = run(scalelong.apply(make(name), ExplicitScaling(kappas), placement="after_norm"), name)
    assert not torch.allclose(folded, unscaled, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(hooked, folded, rtol=1e-4, atol=1e-5)
