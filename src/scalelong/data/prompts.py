"""A text encoder as a component of a diffusers pipeline: it moves, saves and loads with the pipeline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalelong.data.encoders import TextEncoder, encode_prompts, load_text_encoder
from scalelong.errors import require

require("diffusers", extra="train", purpose="a diffusers pipeline")

from diffusers import ConfigMixin, ModelMixin  # noqa: E402

COMPONENT = (__name__, "PromptEncoder")  # in model_index.json
WEIGHTS = "encoder"


class PromptEncoder(ModelMixin, ConfigMixin):
    """`encode(prompts)` returns tokens (B, L, D). `encoder` and `max_length` are those of `load_text_encoder`."""

    config_name = "config.json"

    def __init__(self, encoder: str = "minilm", max_length: int | None = None) -> None:
        super().__init__()
        self.loaded = load_text_encoder(encoder, max_length)
        self.register_to_config(encoder=encoder, max_length=self.loaded.max_length)
        self.register_buffer("marker", torch.zeros(()), persistent=False)  # has a device and a dtype, also for `words`
        if isinstance(self.loaded, TextEncoder):
            self.model = self.loaded.model

    def encode(self, prompts: Sequence[str]) -> Tensor:
        return encode_prompts(prompts, self.loaded)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the settings, and the weights and tokenizer of an encoder that has them."""
        self.save_config(save_directory)
        if isinstance(self.loaded, TextEncoder):
            self.loaded.model.save_pretrained(Path(save_directory) / WEIGHTS)
            self.loaded.tokenizer.save_pretrained(Path(save_directory) / WEIGHTS)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> "PromptEncoder":
        """Load what `save_pretrained` wrote; without weights in the folder, load the encoder by its name."""
        config, weights = cls.load_config(folder), Path(folder) / WEIGHTS
        return cls(str(weights) if weights.is_dir() else config["encoder"], config["max_length"])
