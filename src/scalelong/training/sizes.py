"""What a config costs, without training it: parameters on the meta device, FLOP counted on one image.

That takes seconds, so for presets it is written down: `python -m scalelong.training.sizes` after a change of theirs.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from scalelong.models.registry import Shapes, get_model
from scalelong.runs.config import Config
from scalelong.runs.run import build_network

# What the paper's text and class conditions look like before any data is there.
TEXT = {"minilm": 384, "openai/clip-vit-large-patch14": 768}


def expected_shapes(config: Config) -> Shapes:
    """The shapes that the preset's data will have, from the catalogue."""
    from scalelong.data import spec_of

    d = config.data
    spec = spec_of(d.name)
    size = d.image_size or spec.image_size
    rows = None
    if d.classes:
        rows = (spec.num_classes or 0) + (1 if config.diffusion.drop > 0 else 0)
    return Shapes(
        channels=4 if d.vae else spec.channels,
        size=size // 8 if d.vae else size,
        label_rows=rows,
        text_tokens=d.text_tokens,
        text_width=TEXT[d.text] if d.text else None,
    )


def size_of(config: Config) -> dict[str, Any]:
    """Parameters, long skips, data, and FLOP of a training step (forward once, backward twice that)."""
    from torch.utils.flop_counter import FlopCounterMode

    from scalelong.skips import find_sites

    shapes = expected_shapes(config)
    with torch.device("meta"):
        net = build_network(config, shapes)
        x = torch.zeros(1, shapes.channels, shapes.size, shapes.size)
        y = torch.zeros(1, dtype=torch.long) if shapes.label_rows else None
        context = torch.zeros(1, shapes.text_tokens or 0, shapes.text_width or 0) if shapes.text_width else None
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            get_model(config.model.kind).adapt(net)(x, torch.zeros(1), y=y, context=context)
    return {
        "parameters": sum(p.numel() for p in net.parameters()),
        "skips": len(find_sites(net)),
        "data": f"{config.data.name} {shapes.channels}×{shapes.size}×{shapes.size}",
        "batch_size": config.train.batch_size,
        "steps": config.train.steps,
        "flop_per_step": 3 * counter.get_total_flops() * config.train.batch_size,
    }


if __name__ == "__main__":
    from scalelong.training.presets import PRESETS, SIZES

    SIZES.write_text(json.dumps({name: size_of(p.config) for name, p in PRESETS.items()}, indent=1) + "\n", "utf-8")
