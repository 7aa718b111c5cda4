"""The Inception-v3 of FID (TensorFlow's graph of 2015-12-05), folded and rearranged to run fast.

Same function as the published graph, other arrangement: BatchNorm is folded into the convolutions, the 1×1
convolutions that read one input are one convolution, and the average pool before a 1×1 convolution comes after it,
on fewer channels (both are linear, and the pool's weights add to one, so the bias passes too). Activations stay
channels last throughout. Names of layers are torchvision's, as in pytorch-fid's file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.evaluation.convolution import FoldedConv, fold
from scalelong.evaluation.inception_weights import PARTS

WIDTH = 2048  # of the pooled features
SIZE = 299


class _Layers:
    """Folded convolutions by name; several names make one convolution with their outputs side by side."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __call__(
        self, *names: str, stride: int = 1, padding: int | tuple[int, int] = 0, relu: bool = True
    ) -> FoldedConv:
        folded = [self._fold(name) for name in names]
        weight, bias = (torch.cat(parts) for parts in zip(*folded, strict=True))
        return FoldedConv(weight, bias, stride, padding, activation="relu" if relu else "none")

    def _fold(self, name: str) -> tuple[Tensor, Tensor]:
        weight, shift, mean, var = (self._tensors[f"{name}.{part}"] for part in PARTS.values())
        return fold(weight, shift, mean, var)


class _BlockA(nn.Module):
    def __init__(self, layers: _Layers, name: str) -> None:
        super().__init__()
        self.head = layers(f"{name}.branch1x1", f"{name}.branch5x5_1", f"{name}.branch3x3dbl_1")
        self.five = layers(f"{name}.branch5x5_2", padding=2)
        self.deep = nn.Sequential(
            layers(f"{name}.branch3x3dbl_2", padding=1), layers(f"{name}.branch3x3dbl_3", padding=1)
        )
        self.pool = layers(f"{name}.branch_pool", relu=False)

    def forward(self, x: Tensor) -> Tensor:
        one, five, deep = self.head(x).split((64, 48, 64), dim=1)
        return torch.cat([one, self.five(five), self.deep(deep), _pooled(self.pool(x))], dim=1)


class _BlockB(nn.Module):
    def __init__(self, layers: _Layers, name: str) -> None:
        super().__init__()
        self.three = layers(f"{name}.branch3x3", stride=2)
        self.deep = nn.Sequential(
            layers(f"{name}.branch3x3dbl_1"),
            layers(f"{name}.branch3x3dbl_2", padding=1),
            layers(f"{name}.branch3x3dbl_3", stride=2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.three(x), self.deep(x), F.max_pool2d(x, 3, 2)], dim=1)


class _BlockC(nn.Module):
    def __init__(self, layers: _Layers, name: str, width: int) -> None:
        super().__init__()
        across, down = (0, 3), (3, 0)  # 1×7 and 7×1
        self.split = (192, width, width)
        self.head = layers(f"{name}.branch1x1", f"{name}.branch7x7_1", f"{name}.branch7x7dbl_1")
        self.seven = nn.Sequential(
            layers(f"{name}.branch7x7_2", padding=across), layers(f"{name}.branch7x7_3", padding=down)
        )
        self.deep = nn.Sequential(
            *(
                layers(f"{name}.branch7x7dbl_{k}", padding=padding)
                for k, padding in enumerate((down, across, down, across), start=2)
            )
        )
        self.pool = layers(f"{name}.branch_pool", relu=False)

    def forward(self, x: Tensor) -> Tensor:
        one, seven, deep = self.head(x).split(self.split, dim=1)
        return torch.cat([one, self.seven(seven), self.deep(deep), _pooled(self.pool(x))], dim=1)


class _BlockD(nn.Module):
    def __init__(self, layers: _Layers, name: str) -> None:
        super().__init__()
        self.head = layers(f"{name}.branch3x3_1", f"{name}.branch7x7x3_1")
        self.three = layers(f"{name}.branch3x3_2", stride=2)
        self.seven = nn.Sequential(
            layers(f"{name}.branch7x7x3_2", padding=(0, 3)),
            layers(f"{name}.branch7x7x3_3", padding=(3, 0)),
            layers(f"{name}.branch7x7x3_4", stride=2),
        )

    def forward(self, x: Tensor) -> Tensor:
        three, seven = self.head(x).split(192, dim=1)
        return torch.cat([self.three(three), self.seven(seven), F.max_pool2d(x, 3, 2)], dim=1)


class _BlockE(nn.Module):
    """The last two blocks. The graph has a max pool in the last one, where an average pool was probably meant."""

    def __init__(self, layers: _Layers, name: str, max_pool: bool) -> None:
        super().__init__()
        across, down = (0, 1), (1, 0)  # 1×3 and 3×1
        self.max_pool = max_pool
        self.head = layers(f"{name}.branch1x1", f"{name}.branch3x3_1", f"{name}.branch3x3dbl_1")
        self.three_a = layers(f"{name}.branch3x3_2a", padding=across)
        self.three_b = layers(f"{name}.branch3x3_2b", padding=down)
        self.deep = layers(f"{name}.branch3x3dbl_2", padding=1)
        self.deep_a = layers(f"{name}.branch3x3dbl_3a", padding=across)
        self.deep_b = layers(f"{name}.branch3x3dbl_3b", padding=down)
        self.pool = layers(f"{name}.branch_pool", relu=max_pool)

    def forward(self, x: Tensor) -> Tensor:
        one, three, deep = self.head(x).split((320, 384, 448), dim=1)
        deep = self.deep(deep)
        pool = self.pool(F.max_pool2d(x, 3, 1, 1)) if self.max_pool else _pooled(self.pool(x))
        branches = [one, self.three_a(three), self.three_b(three), self.deep_a(deep), self.deep_b(deep), pool]
        return torch.cat(branches, dim=1)


def _pooled(x: Tensor) -> Tensor:
    """TensorFlow's average pool leaves the padding out of the average."""
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
            _BlockA(layers, "Mixed_5b"),  # (B, 256, 35, 35)
            _BlockA(layers, "Mixed_5c"),  # (B, 288, 35, 35)
            _BlockA(layers, "Mixed_5d"),  # (B, 288, 35, 35)
            _BlockB(layers, "Mixed_6a"),  # (B, 768, 17, 17)
            _BlockC(layers, "Mixed_6b", 128),
            _BlockC(layers, "Mixed_6c", 160),
            _BlockC(layers, "Mixed_6d", 160),
            _BlockC(layers, "Mixed_6e", 192),
            _BlockD(layers, "Mixed_7a"),  # (B, 1280, 8, 8)
            _BlockE(layers, "Mixed_7b", max_pool=False),  # (B, 2048, 8, 8)
            _BlockE(layers, "Mixed_7c", max_pool=True),  # (B, 2048, 8, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x).mean(dim=(2, 3))
        return features
