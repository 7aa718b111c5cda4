"""Images from a trained network with the conditions of its run: the generator that commands and metrics share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from scalelong.diffusion import sample, to_uint8
from scalelong.errors import ScaleLongError, unknown
from scalelong.models.registry import get_model
from scalelong.runs.config import Config, Facts


@dataclass(frozen=True)
class Request:
    """What is asked for. Image k depends on (seed, k) and its condition only, never on the batch size."""

    n: int = 64
    sampler: str = "dpm-solver-fast"
    steps: int | None = None
    guidance: float = 1.0
    seed: int = 0
    first: int = 0
    batch_size: int = 64
    classes: Sequence[int | str] | None = None  # cycled over the images; None: every class in turn
    prompts: Sequence[str] | None = None  # cycled; None: captions of held-out images
    precision: str = "fp32"


def generate(net: nn.Module, config: Config, facts: Facts, request: Request) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield uint8 (B, H, W, C) batches of images first … first + n − 1."""
    y = _labels(facts, request)
    context, empty = _tokens(config, request)
    latent = config.data.vae is not None
    batches = sample(
        get_model(config.model.kind).adapt(net),
        request.n,
        (facts.shapes.channels, facts.shapes.size, facts.shapes.size),
        config.diffusion.process,
        sampler=request.sampler,
        steps=request.steps,
        seed=request.seed,
        first=request.first,
        batch_size=request.batch_size,
        y=y,
        context=context,
        guidance=request.guidance,
        null_y=facts.null_y,
        null_context=empty,
        autocast=autocast_type(request.precision),
        clip=not latent,
    )
    return (to_uint8(_decoded(batch, config) if latent else batch).cpu().numpy() for batch in batches)


def grid_columns(facts: Facts, request: Request) -> int | None:
    """A column a class or a prompt, where they take turns and there is room for them; None: as square as it comes."""
    conditional = facts.shapes.label_rows and facts.class_names is not None
    classes = request.classes or facts.class_names or () if conditional else ()
    turns = len(request.prompts or classes)
    return turns if 1 < turns <= min(request.n, 20) else None


def label_of(word: int | str, names: Sequence[str]) -> int:
    """A class by number or by name."""
    text = str(word).strip()
    if text in names:
        return list(names).index(text)
    if text.lstrip("-").isdecimal():
        if not 0 <= int(text) < len(names):
            raise ScaleLongError(f"class {text} is not in 0 … {len(names) - 1}")
        return int(text)
    raise unknown("class", text, names)


def _labels(facts: Facts, request: Request) -> Tensor | None:
    names = facts.class_names
    if not facts.shapes.label_rows or names is None:
        if request.classes is not None:
            raise ScaleLongError("this run has no classes; leave out --class")
        return None
    words = list(range(len(names))) if request.classes is None else list(request.classes)
    labels = [label_of(word, names) for word in words]
    if request.guidance != 1.0 and facts.null_y is None:
        raise ScaleLongError(
            f"guidance {request.guidance:g} needs a network trained with dropped classes (diffusion.drop > 0)"
        )
    return torch.tensor([labels[k % len(labels)] for k in range(request.first, request.first + request.n)])


def _tokens(config: Config, request: Request) -> tuple[Tensor | None, Tensor | None]:
    """Text tokens (n, L, D) and those of the empty prompt (L, D)."""
    if config.data.text is None:
        if request.prompts is not None:
            raise ScaleLongError("this run has no text; leave out --prompt")
        return None, None
    from scalelong.data import encode_prompts, load

    prompts = request.prompts
    if prompts is None:
        captions = load(config.data.name, split=config.data.validation, image_size=config.data.image_size).captions
        if captions is None:
            raise ScaleLongError(f"{config.data.name} has no captions to take prompts from; give --prompt")
        prompts = [captions[k] for k in range(min(len(captions), request.first + request.n))]
    distinct = list(dict.fromkeys([*prompts, ""]))
    encoded = encode_prompts(distinct, encoder=config.data.text, max_length=config.data.text_tokens)
    place = {prompt: k for k, prompt in enumerate(distinct)}
    order = [place[prompts[k % len(prompts)]] for k in range(request.first, request.first + request.n)]
    return encoded[order], encoded[place[""]]


def _decoded(latents: Tensor, config: Config) -> Tensor:
    from scalelong.data import decode_latents

    assert config.data.vae is not None
    return decode_latents(latents, config.data.vae, config.data.latent_scale)


def autocast_type(precision: str) -> torch.dtype | None:
    """What the network is run in; None: float32 throughout."""
    options = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in options:
        raise unknown("precision", precision, options)
    return options[precision]


def best_device(asked: str | None = None) -> torch.device:
    """The device asked for, or the fastest one here."""
    if asked is None:
        asked = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ScaleLongError(f"device {asked!r} cannot be used here: {reason}") from error
    return device
