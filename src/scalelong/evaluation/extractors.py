"""Feature extractors: uint8 images in, float features out, with a name and a hash of the weights.

`inception` is FID's network, `inception-pytorch-fid` the same behind pytorch-fid's resize. `dinov2` and `clip` are
transformers' networks. `pixels` averages images to 8×8; its Fréchet distance costs almost nothing and is *not* FID.
`ModuleExtractor` wraps any network.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.backends import cudnn

from scalelong.errors import EvaluationError, InvalidValueError, invalid, unknown
from scalelong.evaluation.inception import (
    HEAD,
    INCEPTION,
    RESIZE,
    RESIZE_PYTORCH_FID,
    Inception,
    prepare_pytorch_fid,
    prepare_tf1,
)
from scalelong.evaluation.transformer import ClipExtractor, Dinov2Extractor
from scalelong.evaluation.weights import load_weights
from scalelong.files import tensors_sha256

# Small enough for a layer's input and output to stay in a CPU's cache: about a third faster than 50 at once.
_CPU_BATCH = 10
PIXELS = "8×8 pixels"


@runtime_checkable
class FeatureExtractor(Protocol):
    """The interface of a feature extractor."""

    name: str
    weights: str  # a hash that identifies the tensors, or "none"
    resize: str  # what happens to an image before the network, in words
    is_fid: bool  # whether its Fréchet distance may be called FID

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (B, H, W, C) → float (B, D)."""
        ...


class InceptionExtractor(nn.Module):
    """FID's Inception of 2015-12-05: TF1-style bilinear to 299, (x − 128)/128, 2048 pooled features."""

    name = INCEPTION.name
    family = "inception"
    resize = RESIZE
    is_fid = True
    prepare = staticmethod(prepare_tf1)

    def __init__(self, weights: Path | str | None = None) -> None:
        super().__init__()
        tensors = load_weights(INCEPTION, weights)
        self.head: Tensor | None = tensors.pop(HEAD, None)  # (1008, 2048), where the file has it
        self.weights = tensors_sha256(tensors)
        self.network = Inception(tensors).eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return features in full float32, whatever the caller's autocast and TF32 settings are."""
        device = _device(self)
        size = _CPU_BATCH if device.type == "cpu" else len(images)
        exact = cudnn.flags(enabled=True, allow_tf32=False) if device.type == "cuda" else nullcontext()
        with torch.autocast(device.type, enabled=False), exact:
            # A grey image becomes three equal channels, then (b, 3, 299, 299).
            parts = (self.prepare(part.to(device).expand(-1, -1, -1, 3)) for part in images.split(size))
            return torch.cat([self.network(x) for x in parts])


class PytorchFidExtractor(InceptionExtractor):
    """The same network behind pytorch-fid's resize, as the official code measures: half-pixel bilinear, 2x − 1."""

    name = "inception-pytorch-fid"
    resize = RESIZE_PYTORCH_FID
    prepare = staticmethod(prepare_pytorch_fid)


class ModuleExtractor(nn.Module):
    """Any network as an extractor. Its Fréchet distance is named after it and is not FID.

    `transform` maps uint8 (B, H, W, C) to the network's input; default: float (B, C, H, W) in [−1, 1] at the size of
    the images. The network returns (B, D), or (B, D, …), which is averaged over the dimensions after D.
    """

    is_fid = False

    def __init__(
        self,
        network: nn.Module,
        name: str | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
        resize: str | None = None,
    ) -> None:
        super().__init__()
        self.network = network.eval()
        self.name = name or type(network).__name__
        state = network.state_dict()
        self.weights = tensors_sha256(state) if state else "none"
        self.transform = transform or (lambda images: images.permute(0, 3, 1, 2).float() / 127.5 - 1)
        self.resize = resize or ("none" if transform is None else "the extractor's own transform")

    def forward(self, images: Tensor) -> Tensor:
        features = self.network(self.transform(images.to(_device(self))))
        if not isinstance(features, Tensor) or features.ndim < 2 or features.shape[0] != images.shape[0]:
            got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise EvaluationError(f"the extractor {self.name} must return (B, D), got {got} for {len(images)} images")
        return features if features.ndim == 2 else features.flatten(2).mean(dim=2)


def _pixels(weights: Path | str | None = None) -> ModuleExtractor:
    """Means over an 8×8 grid, 64 features per channel."""
    if weights is not None:
        raise InvalidValueError(f"the extractor 'pixels' has no weights, got {weights}; leave them out")
    network = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten())
    return ModuleExtractor(network, name=PIXELS, resize="averaged to 8×8")


Extractor = str | nn.Module | FeatureExtractor
Builder = Callable[[Path | str | None], FeatureExtractor]
EXTRACTORS: dict[str, Builder] = {
    "inception": InceptionExtractor,
    "inception-pytorch-fid": PytorchFidExtractor,
    "dinov2": Dinov2Extractor,
    "clip": ClipExtractor,
    "pixels": _pixels,
}
# What the `name` of each begins with. Those of transformers go on with the size of the network.
NAMES = {
    "inception": InceptionExtractor.name,
    "inception-pytorch-fid": PytorchFidExtractor.name,
    "dinov2": f"{Dinov2Extractor.family} ",
    "clip": f"{ClipExtractor.family} ",
    "pixels": PIXELS,
}


def build_extractor(extractor: Extractor = "inception", weights: Path | str | None = None) -> FeatureExtractor:
    """Return an extractor by name (a key of `EXTRACTORS`), or wrap a network. An extractor is returned as it is.

    `weights`: a local file (Inception), or a folder, checkpoint or hub name (DINOv2, CLIP) for an extractor by name.
    """
    if isinstance(extractor, str):
        if extractor not in EXTRACTORS:
            raise unknown("extractor", extractor, EXTRACTORS)
        return EXTRACTORS[extractor](weights)
    if weights is not None:
        raise InvalidValueError(f"weights belong to an extractor given by name, got {weights} with a network")
    if isinstance(extractor, FeatureExtractor):
        return extractor
    if isinstance(extractor, nn.Module):
        return ModuleExtractor(extractor)
    raise invalid("extractor", "a name, a network or a FeatureExtractor", extractor)


def _device(module: nn.Module) -> torch.device:
    return next(chain(module.parameters(), module.buffers(), [torch.empty(0)])).device
