"""Images encoded once by an autoencoder: the mean and standard deviation of each latent, memory-mapped."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from scalelong.data.cache import MANIFEST, build_once
from scalelong.data.captions import Captions
from scalelong.data.catalog import CATALOG
from scalelong.data.dataset import ImageData, Indices, as_indices, damaged, open_array
from scalelong.data.writer import NpyAppender
from scalelong.errors import ScaleLongError, require
from scalelong.files import cache_dir, tensors_sha256
from scalelong.progress import track

FORMAT = 1


class LatentData:
    """Latents of a prepared split, with the images' own labels and captions."""

    def __init__(self, folder: Path | str, data: ImageData, scale: float) -> None:
        self.folder, self.data, self.scale = Path(folder), data, float(scale)
        try:
            self.manifest = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            count, channels, height, width = self.manifest["shape"]
            self.shift = float(self.manifest["shift"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(self.folder, f"its manifest cannot be read ({error})") from None
        if count != len(data):
            raise damaged(self.folder, f"it has {count} latents for {len(data)} images")
        self.shape = (int(channels), int(height), int(width))  # of one latent
        self._moments = self._open("moments")
        self._mirrored = self._open("mirrored") if self.manifest["mirror"] else None

    def _open(self, name: str) -> Tensor:
        channels, height, width = self.shape
        stored = open_array(self.folder, name, np.float32, (len(self.data), 2 * channels, height, width))
        return torch.from_numpy(stored).flatten(1)  # (n, 2·C·h·w): the mean, then the standard deviation

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"LatentData({self.name!r}, {self.split}: {len(self):,} latents, {'×'.join(map(str, self.shape))})"

    def __reduce__(self) -> tuple[type[LatentData], tuple[Path, ImageData, float]]:
        return LatentData, (self.folder, self.data, self.scale)

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def split(self) -> str:
        return self.data.split

    @property
    def image_size(self) -> int:
        """The latents' height and width."""
        return self.shape[1]

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        return self.data.labels

    @property
    def captions(self) -> Captions | None:
        return self.data.captions

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.data.class_names

    @property
    def num_classes(self) -> int | None:
        return self.data.num_classes

    @property
    def fingerprint(self) -> str:
        """A hash of images, autoencoder and scale."""
        return hashlib.sha256(f"{self.manifest['fingerprint']} {self.scale!r}".encode()).hexdigest()

    def batch(self, indices: Indices, flip: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """Latents as float32 (B, C, h, w): (mean + std · noise − shift) · scale, the mean alone without `noise`.

        Where `flip` (B,) is true it is the latent of the mirrored image, if those were encoded too.
        """
        rows = as_indices(indices)
        moments = self._moments.index_select(0, rows)
        if flip is not None and bool(torch.as_tensor(flip).any()):
            if self._mirrored is None:
                raise ScaleLongError(
                    f"the latents of {self.name} were encoded without mirrored images, so none can be flipped; "
                    "encode them with mirror=True, or switch flips off"
                )
            mirrored = torch.as_tensor(flip, dtype=torch.bool).cpu().nonzero()[:, 0]
            moments[mirrored] = self._mirrored.index_select(0, rows[mirrored])
        mean, std = moments.view(-1, 2, *self.shape).unbind(1)
        latents = mean if noise is None else mean + std * noise
        return (latents - self.shift) * self.scale

    def label_batch(self, indices: Indices) -> Tensor:
        """Labels as int64 (B,)."""
        return self.data.label_batch(indices)


def load_vae(vae: str | Path | nn.Module) -> Any:
    """diffusers' `AutoencoderKL` from a folder (its own, or a pipeline's with `vae/`) or a hub name."""
    if isinstance(vae, nn.Module):
        return vae.eval().requires_grad_(False)
    diffusers = require("diffusers", "train", "latents")
    place = Path(vae).expanduser()
    if not place.is_dir() and (str(vae).startswith((".", "/", "~")) or str(vae).count("/") > 1):
        raise ScaleLongError(f"there is no folder {vae} with an autoencoder")
    within = {"subfolder": "vae"} if (place / "vae").is_dir() else {}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="huggingface_hub")  # about arguments that diffusers passes
            # Only safetensors: the older weight files are pickles.
            model = diffusers.AutoencoderKL.from_pretrained(
                str(place) if place.is_dir() else str(vae), use_safetensors=True, **within
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ScaleLongError(
            f"the autoencoder {vae} cannot be loaded ({' '.join(str(error).split())[:300]})"
        ) from error
    return model.float().eval().requires_grad_(False)


def encode_latents(
    data: ImageData,
    vae: str | Path | nn.Module,
    *,
    scale: float | None = None,
    mirror: bool = False,
    batch_size: int = 16,
    device: str | torch.device = "cpu",
) -> LatentData:
    """Encode every image of a split into the cache, or open what is there.

    `scale` multiplies the latents when they are read; by default it is the dataset's (`coco`: 0.2301, as U-ViT has it)
    and else the autoencoder's own `scaling_factor`. `mirror` encodes the mirrored images too, for random flips.
    """
    model = load_vae(vae)
    _check(data, model)
    if scale is None:
        spec = CATALOG.get(data.name)
        scale = (spec.latent_scale if spec else None) or float(model.config.scaling_factor)
    facts = f"{FORMAT} {data.fingerprint} {tensors_sha256(model.state_dict())} {mirror}"
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()
    folder = cache_dir() / "latents" / fingerprint[:24]

    def write(aside: Path) -> None:
        _write(aside, data, model.to(device), mirror, batch_size, fingerprint)

    build_once(folder, write)
    return LatentData(folder, data, scale)


@torch.no_grad()
def decode_latents(latents: Tensor, vae: str | Path | nn.Module, scale: float | None = None) -> Tensor:
    """Scaled latents (B, C, h, w) back to images (B, 3, H, W) in [-1, 1]."""
    model = load_vae(vae)
    latents = latents / (scale or float(model.config.scaling_factor)) + (model.config.shift_factor or 0.0)
    return model.decode(latents.to(next(model.parameters()).device)).sample.clamp(-1, 1)


def _check(data: ImageData, model: Any) -> None:
    factor = 2 ** (len(model.config.block_out_channels) - 1)
    if data.image_size % factor:
        raise ScaleLongError(
            f"{data.name} has images of {data.image_size} pixels; the autoencoder needs a multiple of {factor}"
        )
    if data.channels not in (1, model.config.in_channels):
        raise ScaleLongError(
            f"{data.name} has {data.channels} channels; the autoencoder takes {model.config.in_channels}"
        )


@torch.no_grad()
def _write(folder: Path, data: ImageData, model: Any, mirror: bool, batch_size: int, fingerprint: str) -> None:
    factor = 2 ** (len(model.config.block_out_channels) - 1)
    side, channels = data.image_size // factor, model.config.latent_channels
    for name in ("moments", "mirrored") if mirror else ("moments",):
        with NpyAppender(folder / f"{name}.npy", np.float32, (2 * channels, side, side)) as file:
            for start in track(range(0, len(data), batch_size), f"encoding {data.name} ({name})"):
                rows = torch.arange(start, min(start + batch_size, len(data)))
                flip = torch.ones(len(rows), dtype=torch.bool) if name == "mirrored" else None
                images = data.batch(rows, flip).expand(-1, model.config.in_channels, -1, -1)
                latent = model.encode(images.to(next(model.parameters()).device)).latent_dist
                moments = torch.cat([latent.mean, latent.std], dim=1).float().cpu()  # (B, 2·C, h, w)
                if not bool(torch.isfinite(moments).all()):
                    raise ScaleLongError(f"the autoencoder gives values that are not finite from image {start} on")
                file.append(moments.numpy())
    manifest = {
        "format": FORMAT,
        "name": data.name,
        "split": data.split,
        "data": data.fingerprint,
        "shape": [len(data), channels, side, side],
        "shift": float(model.config.shift_factor or 0.0),
        "mirror": mirror,
        "fingerprint": fingerprint,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
