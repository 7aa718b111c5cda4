"""Images encoded once by an autoencoder: the mean and standard deviation of each latent, memory-mapped."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from scalelong.data.cache import NpyWriter, build_once, damaged, open_array, read_manifest, write_manifest
from scalelong.data.catalog import CATALOG
from scalelong.data.dataset import ImageData, Indices, as_indices
from scalelong.errors import DataError, one_line, require
from scalelong.files import cache_dir, tensors_sha256
from scalelong.progress import track

FORMAT = 1


class LatentData:
    """Latents of a prepared split, with the labels and captions of the images."""

    def __init__(self, folder: Path | str, data: ImageData, scale: float) -> None:
        self.folder, self.data, self.scale = Path(folder), data, float(scale)
        self.name, self.split = data.name, data.split
        self.labels, self.captions = data.labels, data.captions
        self.class_names, self.num_classes = data.class_names, data.num_classes
        self.manifest = read_manifest(self.folder)
        try:
            count, *shape = (int(size) for size in self.manifest["shape"])
            self.channels, self.image_size, width = shape  # of one latent
            self.shift, mirror = float(self.manifest["shift"]), bool(self.manifest["mirror"])
            facts = f"{self.manifest['fingerprint']} {self.scale!r}"
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(self.folder, f"its manifest cannot be used ({error})") from None
        if count != len(data):
            raise damaged(self.folder, f"it has {count} latents for {len(data)} images")
        self.shape = (self.channels, self.image_size, width)
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()  # of images, autoencoder and scale
        self._moments = self._open("moments")
        self._mirrored = self._open("mirrored") if mirror else None

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

    def batch(self, indices: Indices, flip: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """Return latents as float32 (B, C, h, w): (mean + std · noise − shift) · scale, the mean without `noise`.

        Where `flip` (B,) is true, return the latent of the mirrored image; `encode_latents` needs `mirror=True`.
        """
        rows = as_indices(indices)
        moments = self._moments.index_select(0, rows)
        if flip is not None and bool(torch.as_tensor(flip).any()):
            if self._mirrored is None:
                raise DataError(
                    f"the latents of {self.name} have no mirrored images, so they cannot be flipped; "
                    "encode them with mirror=True or switch flips off"
                )
            mirrored = torch.as_tensor(flip, dtype=torch.bool).cpu().nonzero()[:, 0]
            moments[mirrored] = self._mirrored.index_select(0, rows[mirrored])
        mean, std = moments.view(-1, 2, *self.shape).unbind(1)
        latents = mean if noise is None else mean + std * noise
        return (latents - self.shift) * self.scale

    def label_batch(self, indices: Indices) -> Tensor:
        """Return labels as int64 (B,)."""
        return self.data.label_batch(indices)


def load_vae(vae: str | Path | nn.Module) -> Any:
    """Load diffusers' `AutoencoderKL` from a folder (its own, or a pipeline's with `vae/`) or a hub name."""
    if isinstance(vae, nn.Module):
        return vae.eval().requires_grad_(False)
    diffusers = require("diffusers", "train", "latents")
    folder = Path(vae).expanduser()
    if not folder.is_dir() and (str(vae).startswith((".", "/", "~")) or str(vae).count("/") > 1):
        raise DataError(f"autoencoder folder {vae} does not exist")
    location = str(folder) if folder.is_dir() else str(vae)
    inside = {"subfolder": "vae"} if (folder / "vae").is_dir() else {}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="huggingface_hub")  # about arguments that diffusers passes
            # Only safetensors: the older weight files are pickles.
            model = diffusers.AutoencoderKL.from_pretrained(location, use_safetensors=True, **inside)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise DataError(f"cannot load autoencoder {vae} ({one_line(error)[:300]})") from error
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
    """Encode every image of a split into the cache, or open the latents if present.

    `scale` multiplies the latents when they are read. Default: the dataset's (`coco`: 0.2301, as in U-ViT), or else
    the autoencoder's `scaling_factor`. `mirror` also encodes the mirrored images, for random flips.
    """
    model = load_vae(vae)
    factor = 2 ** (len(model.config.block_out_channels) - 1)
    if data.image_size % factor:
        raise DataError(f"the autoencoder needs images of a multiple of {factor} pixels, got {data.image_size}")
    if data.channels not in (1, model.config.in_channels):
        raise DataError(f"the autoencoder needs {model.config.in_channels} channels, got {data.channels}")
    if scale is None:
        spec = CATALOG.get(data.name)
        scale = (spec.latent_scale if spec else None) or float(model.config.scaling_factor)
    facts = f"{FORMAT} {data.fingerprint} {tensors_sha256(model.state_dict())} {mirror}"
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()
    folder = cache_dir() / "latents" / fingerprint[:24]
    build_once(folder, lambda temporary: _write(temporary, data, model.to(device), mirror, batch_size, fingerprint))
    return LatentData(folder, data, scale)


@torch.no_grad()
def decode_latents(latents: Tensor, vae: str | Path | nn.Module, scale: float | None = None) -> Tensor:
    """Decode scaled latents (B, C, h, w) to images (B, 3, H, W) in [-1, 1]."""
    model = load_vae(vae)
    latents = latents / (scale or float(model.config.scaling_factor)) + (model.config.shift_factor or 0.0)
    return model.decode(latents.to(next(model.parameters()).device)).sample.clamp(-1, 1)


@torch.no_grad()
def _write(folder: Path, data: ImageData, model: Any, mirror: bool, batch_size: int, fingerprint: str) -> None:
    side = data.image_size // 2 ** (len(model.config.block_out_channels) - 1)
    channels = model.config.latent_channels
    for name in ("moments", "mirrored") if mirror else ("moments",):
        with NpyWriter(folder / f"{name}.npy", np.float32) as file:
            for start in track(range(0, len(data), batch_size), f"encoding {data.name} ({name})"):
                rows = torch.arange(start, min(start + batch_size, len(data)))
                flip = torch.ones(len(rows), dtype=torch.bool) if name == "mirrored" else None
                images = data.batch(rows, flip).expand(-1, model.config.in_channels, -1, -1)
                latent = model.encode(images.to(next(model.parameters()).device)).latent_dist
                moments = torch.cat([latent.mean, latent.std], dim=1).float().cpu()  # (B, 2·C, h, w)
                if not bool(torch.isfinite(moments).all()):
                    raise DataError(f"the autoencoder returns non-finite values for images {start}…{int(rows[-1])}")
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
    write_manifest(folder, manifest)
