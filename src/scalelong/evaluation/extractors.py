"""Feature extractors behind one small contract: uint8 images in, float features out, a name and a weights hash.

`inception` is FID's network; `pixels` averages images to 8×8 and gives a Fréchet distance that is *not* FID;
`ModuleExtractor` takes any network. DINOv2 or CLIP would be a `ModuleExtractor` with their own
`transform`, or one more entry of `EXTRACTORS`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.backends import cudnn

from scalelong.errors import ScaleLongError, unknown
from scalelong.evaluation import inception
from scalelong.evaluation.inception_weights import INCEPTION
from scalelong.evaluation.resize import TF1_BILINEAR, resize_tf1
from scalelong.evaluation.weights import load_weights, tensor_digest

# Small enough for a layer's input and output to stay in a CPU's cache: about a third faster than 50 at once.
_CPU_BATCH = 10
PIXELS = 8  # `pixels` averages an image to this many per side


@runtime_checkable
class FeatureExtractor(Protocol):
    """What evaluation asks of a feature extractor."""

    name: str
    weights: str  # a hash that identifies the numbers
    resize: str  # what happens to an image before the network, in words
    is_fid: bool  # whether its Fréchet distance may be called FID

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (B, H, W, C) → float (B, D)."""
        ...


class InceptionExtractor(nn.Module):
    """FID's Inception of 2015-12-05: TF1-style bilinear to 299, (x − 128)/128, 2048 pooled features."""

    name = INCEPTION.name
    resize = f"{TF1_BILINEAR} to {inception.SIZE}, from uint8"
    is_fid = True

    def __init__(self, weights: Path | str | None = None) -> None:
        super().__init__()
        loaded = load_weights(INCEPTION, weights)
        self.weights, self.source = loaded.digest, loaded.source
        self.network = inception.Inception(loaded.tensors).eval()

    def forward(self, images: Tensor) -> Tensor:
        return _in_parts(self._features, images, _device(self))

    def _features(self, images: Tensor) -> Tensor:
        x = resize_tf1(rgb(images), inception.SIZE)  # (B, 3, 299, 299)
        features: Tensor = self.network((x - 128) / 128)
        return features


class ModuleExtractor(nn.Module):
    """Any network as an extractor. Its Fréchet distance is named after it and is not FID.

    `transform` takes uint8 (B, H, W, C) to the network's input; by default float (B, C, H, W) in [−1, 1], at the
    images' own size. The network gives (B, D), or (B, D, …), which is averaged over what follows D.
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
        self.weights = tensor_digest(network.state_dict())
        self.transform = transform or _minus_one_to_one
        self.resize = resize or ("none" if transform is None else "the extractor's own transform")

    def forward(self, images: Tensor) -> Tensor:
        features = self.network(self.transform(images.to(_device(self))))
        if not isinstance(features, Tensor) or features.ndim < 2 or features.shape[0] != images.shape[0]:
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ScaleLongError(f"the extractor {self.name} gave {shape} for {len(images)} images, not (B, D)")
        return features if features.ndim == 2 else features.flatten(2).mean(dim=2)


def pixels(weights: Path | str | None = None) -> ModuleExtractor:
    """Means over an 8×8 grid, 64 numbers per channel: no network, almost free, and not FID."""
    if weights is not None:
        raise ScaleLongError(f"the extractor pixels has no weights, got {weights}; leave them out")
    network = nn.Sequential(nn.AdaptiveAvgPool2d(PIXELS), nn.Flatten())
    return ModuleExtractor(network, name=f"{PIXELS}×{PIXELS} pixels", resize=f"averaged to {PIXELS}×{PIXELS}")


EXTRACTORS: dict[str, Callable[[Path | str | None], FeatureExtractor]] = {
    "inception": InceptionExtractor,
    "pixels": pixels,
}


def build_extractor(
    extractor: str | nn.Module | FeatureExtractor = "inception", weights: Path | str | None = None
) -> FeatureExtractor:
    """An extractor by name (`inception`, `pixels`), or the user's own network or extractor."""
    if isinstance(extractor, str):
        if extractor not in EXTRACTORS:
            raise unknown("extractor", extractor, EXTRACTORS)
        return EXTRACTORS[extractor](weights)
    if weights is not None:
        raise ScaleLongError("weights go with an extractor given by name; a network brings its own")
    if isinstance(extractor, FeatureExtractor):
        return extractor
    if isinstance(extractor, nn.Module):
        return ModuleExtractor(extractor)
    raise ScaleLongError(
        f"an extractor must be a name, a network or a FeatureExtractor, got {type(extractor).__name__}"
    )


def rgb(images: Tensor) -> Tensor:
    """(B, H, W, 1 or 3) → (B, H, W, 3): networks trained on photographs see grey as three equal channels."""
    channels = images.shape[-1]
    if channels not in (1, 3):
        raise ScaleLongError(f"images of {channels} channels cannot be evaluated; 1 (grey) or 3 (RGB) can")
    return images.expand(-1, -1, -1, 3).contiguous() if channels == 1 else images


def _in_parts(features: Callable[[Tensor], Tensor], images: Tensor, device: torch.device) -> Tensor:
    """Features of a batch in full float32, whatever the caller's autocast and cuDNN's TF32 would make of them."""
    size = _CPU_BATCH if device.type == "cpu" else len(images)
    exact = cudnn.flags(enabled=True, allow_tf32=False) if device.type == "cuda" else nullcontext()
    with torch.autocast(device.type, enabled=False), exact:
        return torch.cat([features(part.to(device)) for part in images.split(size)])


def _device(module: nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def _minus_one_to_one(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1
