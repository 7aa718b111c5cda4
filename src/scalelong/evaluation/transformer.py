"""DINOv2 and CLIP as feature extractors, through transformers' classes.

Weights come from a folder that `save_pretrained` wrote, from Meta's own DINOv2 checkpoint (.pth), or from the hub by
name. Each image is resized by Pillow's bicubic filter to the network's square input, as FD-DINOv2 and CMMD do.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from scalelong.errors import EvaluationError, one_line, require
from scalelong.evaluation.weights import read_state_dict
from scalelong.files import tensors_sha256

Normalization = tuple[tuple[float, float, float], tuple[float, float, float]]  # mean and standard deviation
IMAGENET: Normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
OPENAI: Normalization = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def prepare(images: Tensor, size: int, normalization: Normalization) -> Tensor:
    """uint8 (B, H, W, 1 or 3) → float32 (B, 3, size, size): Pillow's antialiased bicubic, then normalised."""
    from PIL import Image

    pictures = [Image.fromarray(image).convert("RGB") for image in images.cpu().expand(-1, -1, -1, 3).numpy()]
    resized = np.stack([np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)) for image in pictures])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in normalization)
    return (torch.from_numpy(resized).permute(0, 3, 1, 2).float() / 255 - mean) / std


class TransformerExtractor(nn.Module):
    """What both have in common: where the weights come from, the resize, and features per image."""

    is_fid = False
    family: ClassVar[str]
    default: ClassVar[str]  # on the hub
    option: ClassVar[str]  # of the command line
    normalization: ClassVar[Normalization]
    size: int  # of the network's input, in pixels

    def __init__(self, weights: Path | str | None = None) -> None:
        super().__init__()
        variable = f"SCALELONG_{self.family.upper()}"
        source = str(weights or os.environ.get(variable) or self.default)
        try:
            self.network = self.load(Path(source).expanduser() if Path(source).expanduser().exists() else source).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise EvaluationError(
                f"could not load {self.family} from {source} ({one_line(error)[:200]}). Pass a folder with config.json "
                f"and model.safetensors, a checkpoint, or a name on the hub with {self.option} or {variable}"
            ) from error
        self.weights = tensors_sha256(self.network.state_dict())
        self.resize = f"Pillow bicubic to {self.size}"
        self.name = f"{self.family} {self.title()}"

    def load(self, source: Path | str) -> nn.Module:
        raise NotImplementedError

    def title(self) -> str:
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        device = next(self.network.parameters()).device
        with torch.autocast(device.type, enabled=False):
            return self.embed(prepare(images, self.size, self.normalization).to(device))

    def embed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Dinov2Extractor(TransformerExtractor):
    """DINOv2 (ViT-S, B or L with patches of 14): the class token behind the last norm, at 224 pixels."""

    family = "dinov2"
    default = "facebook/dinov2-large"
    option = "--dinov2"
    normalization = IMAGENET
    size = 224

    def load(self, source: Path | str) -> nn.Module:
        transformers = require("transformers", extra="train", purpose="DINOv2")
        if isinstance(source, Path) and source.is_file():
            return from_meta(read_state_dict(source))
        network: nn.Module = transformers.Dinov2Model.from_pretrained(source)
        return network

    def title(self) -> str:
        config: Any = self.network.config
        letter = {384: "S", 768: "B", 1024: "L", 1536: "G"}.get(config.hidden_size, str(config.hidden_size))
        return f"ViT-{letter}/{config.patch_size}"

    def embed(self, x: Tensor) -> Tensor:
        features: Tensor = self.network(pixel_values=x).last_hidden_state[:, 0]
        return features  # (B, D)


class ClipExtractor(TransformerExtractor):
    """CLIP's joint embedding of images and captions, of length one; CMMD uses ViT-L/14 at 336 pixels."""

    family = "clip"
    default = "openai/clip-vit-large-patch14-336"
    option = "--clip-model"
    normalization = OPENAI

    def load(self, source: Path | str) -> nn.Module:
        transformers = require("transformers", extra="train", purpose="CLIP")
        network: Any = transformers.CLIPModel.from_pretrained(source)
        self.size, self.source = int(network.config.vision_config.image_size), source
        loaded: nn.Module = network
        return loaded

    def title(self) -> str:
        vision: Any = self.network.config.vision_config  # type: ignore[union-attr]
        return f"{vision.hidden_size}-wide, /{vision.patch_size} at {vision.image_size}"

    def embed(self, x: Tensor) -> Tensor:
        network: Any = self.network
        pooled = network.vision_model(pixel_values=x).pooler_output
        return nn.functional.normalize(network.visual_projection(pooled), dim=1)  # (B, D)

    @torch.inference_mode()
    def embed_text(self, captions: Sequence[str], batch_size: int = 64) -> Tensor:
        """Return the embeddings of captions, (n, D), of length one; longer ones are cut as CLIP does."""
        from transformers import AutoTokenizer

        network: Any = self.network
        tokenizer, device = AutoTokenizer.from_pretrained(self.source), next(network.parameters()).device
        length = network.config.text_config.max_position_embeddings
        parts = []
        for start in range(0, len(captions), batch_size):
            batch = list(captions[start : start + batch_size])
            tokens = tokenizer(batch, padding=True, truncation=True, max_length=length, return_tensors="pt").to(device)
            pooled = network.text_model(**tokens).pooler_output
            parts.append(nn.functional.normalize(network.text_projection(pooled), dim=1))
        return torch.cat(parts).cpu()


def from_meta(state: dict[str, Tensor]) -> nn.Module:
    """Build transformers' DINOv2 from Meta's checkpoint, such as dinov2_vits14_pretrain.pth."""
    transformers = require("transformers", extra="train", purpose="DINOv2")
    position, kernel = state["pos_embed"], state["patch_embed.proj.weight"]  # (1, 1 + tokens, D), (D, 3, p, p)
    width, patch = position.shape[2], kernel.shape[2]
    config = transformers.Dinov2Config(
        hidden_size=width,
        num_hidden_layers=1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks.")),
        num_attention_heads=max(1, width // 64),
        mlp_ratio=state["blocks.0.mlp.fc1.weight"].shape[0] // width,
        patch_size=patch,
        image_size=round((position.shape[1] - 1) ** 0.5) * patch,
    )
    names = {  # as on the hub; transformers itself renames them to those of its version
        "cls_token": "embeddings.cls_token", "mask_token": "embeddings.mask_token",
        "pos_embed": "embeddings.position_embeddings", "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm", "attn.proj": "attention.output.dense", "ls1.gamma": "layer_scale1.lambda1",
        "ls2.gamma": "layer_scale2.lambda1",
    }  # fmt: skip
    converted: dict[str, Tensor] = {}
    for key, value in state.items():
        prefix, rest = "", key
        if key.startswith("blocks."):
            number, rest = key.removeprefix("blocks.").split(".", 1)
            prefix = f"encoder.layer.{number}."
        stem, _, kind = rest.rpartition(".")
        if stem == "attn.qkv":
            for part, name in zip(value.chunk(3), ("query", "key", "value"), strict=True):
                converted[f"{prefix}attention.attention.{name}.{kind}"] = part
        elif rest in names:
            converted[prefix + names[rest]] = value
        else:
            converted[f"{prefix}{names.get(stem, stem)}.{kind}"] = value
    if "mask_token" in state:
        converted["embeddings.mask_token"] = state["mask_token"].reshape(1, width)
    load = transformers.Dinov2Model.from_pretrained
    network, report = load(None, config=config, state_dict=converted, output_loading_info=True)
    if problems := [*report["missing_keys"], *report["unexpected_keys"]]:
        raise ValueError(f"not a checkpoint of DINOv2: {len(problems)} tensors missing or unexpected, as {problems[0]}")
    built: nn.Module = network
    return built
