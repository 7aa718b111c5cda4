"""Images from a trained network with the conditions of its run. Commands, metrics and training all sample here."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from scalelong import counter
from scalelong._modules import device_of
from scalelong.counter import Stream
from scalelong.data.dataset import ImageData
from scalelong.diffusion import get_objective, sample, to_uint8
from scalelong.errors import InvalidValueError, MissingSplitError, SourceUnavailableError, invalid, unknown
from scalelong.models.registry import get_model
from scalelong.runs.config import Config, Facts


@dataclass(frozen=True)
class Request:
    """Which images to generate. Image k depends only on (seed, k) and its condition, not on the batch size."""

    n: int = 64
    sampler: str = "dpm-solver-fast"
    steps: int | None = None
    guidance: float = 1.0
    seed: int = 0
    first: int = 0
    batch_size: int = 64
    classes: Sequence[int | str] | None = None  # repeated over the images; None uses every class in turn
    prompts: Sequence[str] | None = None  # repeated; None uses captions of held-out images, or else of training images
    precision: str = "fp32"
    clip_denoised: bool | None = None  # clamp the predicted image at every step; None: the run's setting
    labels: str = "balanced"  # without classes: every class in turn, or drawn by their "frequency" in the training data
    draw_captions: bool = False  # without prompts: images in random order with one of their captions, not the first

    def clips(self, config: Config) -> bool:
        """Whether the predicted image is clamped for a run of this config."""
        wanted = config.sample.clip_denoised if self.clip_denoised is None else self.clip_denoised
        if wanted and config.data.vae:
            raise invalid("clip_denoised", "false for latents, which have no fixed range", wanted)
        return config.data.vae is None if wanted is None else wanted


def generate(
    net: nn.Module,
    config: Config,
    facts: Facts,
    request: Request,
    check: Callable[[Tensor], None] | None = None,
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield batches of images first … first + n − 1 as uint8 (B, H, W, C). Checks the request immediately.

    `check` is called with every batch of a pixel-space network before its values are clamped: see `RangeCheck`.
    """
    from scalelong.data import decode_latents, load_vae

    y = _labels(config, facts, request)
    device = device_of(net)
    context, null_context = _tokens(config, request, device)
    vae: Any = None if config.data.vae is None else load_vae(config.data.vae).to(device)
    batches = sample(
        get_model(config.model.kind).adapt(net),
        request.n,
        (facts.shapes.channels, facts.shapes.size, facts.shapes.size),
        get_objective(config.diffusion.spec()),
        sampler=request.sampler,
        steps=request.steps,
        seed=request.seed,
        first=request.first,
        batch_size=request.batch_size,
        y=y,
        context=context,
        guidance=request.guidance,
        null_y=facts.null_y,
        null_context=null_context,
        autocast=autocast_type(_precision(request, config, device)),
        clip=vae is None,
        clip_denoised=request.clips(config),
        check=check if vae is None else None,
    )
    decoded = batches if vae is None else (decode_latents(batch, vae, config.data.latent_scale) for batch in batches)
    return (to_uint8(batch).cpu().numpy() for batch in decoded)


def grid_columns(facts: Facts, request: Request) -> int | None:
    """Return a number of columns such that each shows one class or prompt, or None for a nearly square grid."""
    conditional = facts.shapes.label_rows and facts.class_names is not None
    classes = request.classes or facts.class_names or () if conditional else ()
    count = len(request.prompts or classes)
    if not 1 < count <= min(request.n, 20):
        return None
    return count * max(1, round(math.sqrt(request.n) / count))


def captions_of(config: Config, facts: Facts, request: Request) -> list[str] | None:
    """Return the prompt or the class name of every image; None for a network without conditions."""
    names = facts.class_names
    if config.data.text is not None:
        texts: Sequence[str] = _prompts(config, request)
    elif facts.shapes.label_rows and names is not None:
        texts = [names[label_of(word, names)] for word in request.classes or range(len(names))]
    else:
        return None
    return [texts[k % len(texts)] for k in range(request.first, request.first + request.n)]


def label_of(word: int | str, names: Sequence[str]) -> int:
    """Return a class by its name or its number."""
    text = str(word).strip()
    if text in names:
        return list(names).index(text)
    if text.lstrip("-").isdecimal():
        if not 0 <= int(text) < len(names):
            raise invalid("class", f"in 0 … {len(names) - 1}", int(text))
        return int(text)
    raise unknown("class", text, names)


def _labels(config: Config, facts: Facts, request: Request) -> Tensor | None:
    names = facts.class_names
    if not facts.shapes.label_rows or names is None:
        if request.classes is not None:
            raise InvalidValueError(f"this run has no classes, got classes {list(request.classes)}; leave out --class")
        return None
    if request.labels == "frequency" and request.classes is None:
        return _frequent_labels(config, len(names), request)
    labels = [label_of(word, names) for word in (range(len(names)) if request.classes is None else request.classes)]
    if request.guidance != 1.0 and facts.null_y is None:
        raise invalid("guidance", "1 for a network trained without dropped classes (diffusion.drop)", request.guidance)
    return torch.tensor([labels[k % len(labels)] for k in range(request.first, request.first + request.n)])


def _frequent_labels(config: Config, classes: int, request: Request) -> Tensor:
    """Draw labels by their frequency in the training data, as the official code does: label k depends on (seed, k)."""
    from scalelong.data import load

    labels = load(config.data.name, config.data.split, **config.data.options()).labels
    if labels is None:
        raise InvalidValueError(f"labels by frequency need the labels of {config.data.name}, which has none")
    shares = torch.bincount(torch.from_numpy(np.asarray(labels)), minlength=classes).double().cumsum(0)
    u = counter.uniform(request.seed, Stream.LABEL, 0, request.first, request.n).double()
    return torch.searchsorted(shares, u * shares[-1], right=True).clamp(max=classes - 1)


def evaluation_draws(config: Config) -> dict[str, Any]:
    """Return the arguments of `Request` that say how an evaluation draws labels and captions."""
    return {"labels": config.evaluate.labels, "draw_captions": True}


def evaluation_request(config: Config, n: int, **changed: Any) -> Request:
    """Return how a run's evaluation samples n images: its sampler, guidance, labels and captions, unless `changed`."""
    own = config.sample
    usual = {"sampler": own.sampler, "steps": own.steps, "guidance": own.guidance, "batch_size": min(n, 256)}
    return Request(n=n, **{**usual, **evaluation_draws(config), **changed})


def drawn_from(config: Config, facts: Facts, request: Request) -> str | None:
    """Return how labels or captions of a request were drawn, in words; None without conditions."""
    if config.data.text is not None:
        if request.prompts is not None:
            return f"{len(request.prompts)} given prompts in turn"
        data, way = _caption_data(config), "drawn at random" if request.draw_captions else "first ones in order"
        return f"captions of {data.name} ({data.split}), {way}"
    if not facts.shapes.label_rows or facts.class_names is None:
        return None
    chosen = f"{len(facts.class_names)} classes" if request.classes is None else f"{list(request.classes)}"
    return (
        f"{chosen} by frequency" if request.labels == "frequency" and request.classes is None else f"{chosen} in turn"
    )


def _tokens(
    config: Config, request: Request, device: torch.device
) -> tuple[Callable[[int, int], Tensor] | None, Tensor | None]:
    """Return a function for the text tokens (count, L, D) of a batch, and those of the empty prompt (L, D).

    The encoder is loaded once, on the device of the network, and encodes the prompts of a batch when it is sampled.
    """
    if config.data.text is None:
        if request.prompts is not None:
            raise InvalidValueError(f"this run has no text, got prompts {list(request.prompts)}; leave out --prompt")
        return None, None
    from scalelong.data import TextEncoder, encode_prompts, load_text_encoder

    prompts = _prompts(config, request)
    encoder = load_text_encoder(config.data.text, config.data.text_tokens)
    if isinstance(encoder, TextEncoder):
        encoder.model.to(device)

    def context(start: int, count: int) -> Tensor:
        rows = range(request.first + start, request.first + start + count)
        return encode_prompts([prompts[k % len(prompts)] for k in rows], encoder)

    return context, encode_prompts([""], encoder)[0]


def _prompts(config: Config, request: Request) -> Sequence[str]:
    """Return the prompts of a request, by default captions of held-out (else training) images; they repeat."""
    if request.prompts is not None:
        return request.prompts
    data = _caption_data(config)
    assert data.captions is not None
    last = request.first + request.n
    if not request.draw_captions:
        return [data.captions[k] for k in range(min(len(data), last))]
    # As the official code: every image once per round in random order, each time with one of its captions.
    orders = [
        counter.permutation(request.seed, Stream.CAPTION_ORDER, r, len(data)) for r in range(-(-last // len(data)))
    ]
    picks = counter.integers(request.seed, Stream.LABEL, 0, 0, last, 2**31)
    texts = [data.captions.of(int(image)) for image in torch.cat(orders)[:last]]
    return [options[int(pick) % len(options)] for options, pick in zip(texts, picks, strict=True)]


def _caption_data(config: Config) -> ImageData:
    """Return the images whose captions serve as prompts: held-out ones, or training images if there are none."""
    from scalelong.data import load

    data = config.data
    try:
        images = load(data.name, data.validation, **data.options())
    except (MissingSplitError, SourceUnavailableError):
        images = load(data.name, data.split, **data.options())
    if images.captions is None:
        raise InvalidValueError(f"{data.name} has no captions to use as prompts; give --prompt")
    return images


def _precision(request: Request, config: Config, device: torch.device) -> str:
    """Return the precision of a request: `auto` is that of training on a GPU, and fp32 elsewhere."""
    if request.precision != "auto":
        return request.precision
    return config.train.precision if device.type == "cuda" and config.train.precision != "auto" else "fp32"


def autocast_type(precision: str) -> torch.dtype | None:
    """Return the autocast type of a precision, None for float32."""
    options = {"auto": None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in options:
        raise unknown("precision", precision, options)
    return options[precision]


def best_device(name: str | None = None) -> torch.device:
    """Return the named device, or the fastest one available."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidValueError(f"device {name!r} is not available: {str(error).strip().splitlines()[0]}") from error
    return device
