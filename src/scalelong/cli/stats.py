"""`scalelong data stats`: a dataset's reference statistics for FID and KID, computed once."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer


def stats(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A named dataset, an image folder or archive, .npy, .npz, or hf:NAME.")
    ],
    split: Annotated[str, typer.Option(help="Which split.")] = "train",
    n: Annotated[int | None, typer.Option("--n", "-n", help="The first so many images. Default: all.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Of the prepared data. Default: the dataset's own.")] = None,
    extractor: Annotated[str, typer.Option(help="inception (FID) or pixels (8×8 means, not FID).")] = "inception",
    weights: Annotated[Path | None, typer.Option(help="A local file of the extractor's weights.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images at a time.")] = 50,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps; by default the fastest there is.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write them here (.safetensors), for --reference.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the card as JSON.")] = False,
) -> None:
    """Compute a dataset's reference statistics, and keep them with their card in the cache.

    Interrupted, the same command goes on where it was; a longer --n starts from a shorter one's end.

    Example: scalelong data stats cifar10 --split train
    """
    from scalelong.data import CATALOG
    from scalelong.errors import ScaleLongError
    from scalelong.evaluation import build_extractor, dataset_reference, write_reference
    from scalelong.runs.generate import best_device

    if out is not None and out.suffix != ".safetensors":
        raise ScaleLongError(f"--out {out} must end in .safetensors")
    network: Any = build_extractor(extractor, weights)
    network.to(best_device(device))
    reference = dataset_reference(name, split, network, n, batch_size, image_size=image_size)
    if out is not None:
        write_reference(out, reference)
    card = reference.card
    if json:
        typer.echo(json_module.dumps(card.to_dict(), ensure_ascii=False))
        return
    assert card.image is not None
    size = "×".join(str(length) for length in card.image)
    typer.echo(f"{card.name} ({card.split}): {card.n:,} images, {size}, content {card.content[:20]}")
    typer.echo(f"  {card.extractor}, weights {str(card.weights)[:12]}, {card.resize}")
    typer.echo(f"  computed in {card.seconds:,.0f} s, {card.created}")
    named = f"{name}:{card.split}" + ("" if n is None else f":{n}") if name in CATALOG else None
    use = out or named
    typer.echo(f"  use it as --reference {use}" if use else "  give --out FILE.safetensors to use it as --reference")
