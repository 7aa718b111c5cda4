"""`scalelong data`: which datasets there are, preparing them, and what was prepared."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="List, prepare and inspect datasets.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A named dataset, an image folder or archive, .npy, .npz, or hf:NAME.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_command(json: Json = False) -> None:
    """Show the named datasets, where each is looked for, and what is prepared.

    Example: scalelong data list
    """
    from scalelong.data import CATALOG, prepared

    here = prepared()
    rows = [
        {
            "name": spec.name,
            "summary": spec.summary,
            "images": {split: counts[0] for split, counts in spec.counts.items()},
            "image_size": spec.image_size,
            "channels": spec.channels,
            "classes": spec.num_classes,
            "captions": spec.captions,
            "sources": spec.source_titles(),
            "licence": spec.licence,
            "prepared": [_brief(entry) for entry in here if entry["name"] == spec.name],
        }
        for spec in CATALOG.values()
    ]
    others = [_brief(entry) for entry in here if entry["name"] not in CATALOG]
    if json:
        typer.echo(json_module.dumps({"datasets": rows, "others": others}))
        return
    _print_list(rows, others)


@app.command()
def prepare(
    name: Name,
    split: Annotated[
        list[str] | None,
        typer.Option(help="Which split; may be repeated. Default: all of a named dataset, else train."),
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Centre-crop and resize to this many pixels a side.")] = None,
    channels: Annotated[
        int | None, typer.Option(help="1 for grey, 3 for colour. Default: the dataset's, else 3.")
    ] = None,
    background: Annotated[str | None, typer.Option(help="The colour under transparent images, such as white.")] = None,
    holdout: Annotated[float, typer.Option(help="The share of train that is kept for validation.")] = 0.0,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad files out, and list them.")] = False,
    source: Annotated[
        Path | None, typer.Option("--from", help="A local copy of a named dataset's published files.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="The configuration of a Hugging Face dataset.")] = None,
    image_column: Annotated[str | None, typer.Option(help="Its column of images.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Its column of labels.")] = None,
    caption_column: Annotated[str | None, typer.Option(help="Its column of captions.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Prepare again what is prepared.")] = False,
    json: Json = False,
) -> None:
    """Find a dataset, check it, and write it once into the cache ($SCALELONG_CACHE).

    Example: scalelong data prepare cifar10
    Example: scalelong data prepare photos/ --image-size 64 --skip-bad
    """
    from scalelong.data import CATALOG, load

    named = CATALOG.get(name)
    splits = split or (list(named.counts) if named else ["train", "validation"] if holdout else ["train"])
    results = []
    for part in splits:
        data = load(
            name,
            part,
            image_size=image_size,
            channels=channels,
            background=background,
            holdout=holdout,
            skip_bad=skip_bad,
            source=source,
            config=config,
            image_column=image_column,
            label_column=label_column,
            caption_column=caption_column,
            force=force,
        )
        results.append({**data.manifest, "folder": str(data.folder)})
        if not json:
            _print_prepared(results[-1])
    if json:
        typer.echo(json_module.dumps([_brief(result) | {"skipped_files": result["skipped"]} for result in results]))


@app.command()
def info(
    name: Name,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its hash.")] = False,
    grid: Annotated[Path | None, typer.Option(help="Write a sheet of images of the first split as PNG.")] = None,
    json: Json = False,
) -> None:
    """Show what a dataset is and what of it is prepared.

    Example: scalelong data info cifar10 --verify --grid cifar10.png
    """
    from scalelong.data import CATALOG, ImageData, prepared
    from scalelong.data.prepare import resolve
    from scalelong.errors import ScaleLongError
    from scalelong.files import check_target

    if grid is not None:
        check_target(grid, suffixes=(".png",))
    origin = resolve(name)
    entries = [entry for entry in prepared() if entry["name"] == origin.name]
    opened = [ImageData(entry["folder"]) for entry in entries]
    if (verify or grid) and not opened:
        raise ScaleLongError(f"{name} is not prepared: scalelong data prepare {name}")
    for data in opened if verify else ():
        data.verify()
    if grid is not None:
        _write_grid(opened[0], grid)
    spec = CATALOG.get(origin.name)
    if json:
        facts = [{**_brief(entry), "verified": verify, "skipped_files": entry["skipped"]} for entry in entries]
        typer.echo(json_module.dumps({"name": origin.name, "prepared": facts}))
        return
    if spec is not None:
        classes = f", {spec.num_classes} classes" if spec.num_classes else ""
        typer.echo(f"{spec.name}: {spec.summary}")
        typer.echo(
            f"  {spec.image_size}×{spec.image_size}×{spec.channels}{classes}{', captions' if spec.captions else ''}"
        )
        typer.echo(f"  licence: {spec.licence}")
        typer.echo(f"  sources, in order: {'; '.join(spec.source_titles())}")
    if not entries:
        typer.echo(f"not prepared: scalelong data prepare {name}")
    for entry in entries:
        _print_prepared(entry)
    if verify:
        typer.echo("every file has the hash in its manifest")
    if grid is not None:
        typer.echo(f"sheet: {grid}")


def _brief(manifest: dict[str, Any]) -> dict[str, Any]:
    keys = ("name", "split", "source", "shape", "fingerprint", "content_sha256", "folder")
    classes = manifest["class_names"]
    return {
        **{key: manifest.get(key) for key in keys},
        "classes": None if classes is None else len(classes),
        "captions": "captions" in manifest["hashes"],
        "skipped": len(manifest["skipped"]),
    }


def _print_prepared(manifest: dict[str, Any], listed: int = 20) -> None:
    count, height, width, channels = manifest["shape"]
    classes = f", {len(manifest['class_names'])} classes" if manifest["class_names"] is not None else ""
    captions = ", captions" if "captions" in manifest["hashes"] else ""
    typer.echo(
        f"{manifest['name']} ({manifest['split']}): {count:,} images, {width}×{height}×{channels}{classes}{captions}"
    )
    typer.echo(f"  from {manifest['source']}")
    typer.echo(f"  in {manifest['folder']}")
    if manifest.get("ignored_files"):
        typer.echo(f"  {manifest['ignored_files']:,} files are not images and were passed over")
    skipped = manifest["skipped"]
    if skipped:
        typer.echo(f"  skipped {len(skipped):,} bad files:")
        for name, reason in skipped[:listed]:
            typer.echo(f"    {name} {reason}")
        if len(skipped) > listed:
            typer.echo(f"    … and {len(skipped) - listed:,} more, listed in {manifest['folder']}/manifest.json")


def _write_grid(data: Any, path: Path, count: int = 144) -> None:
    import numpy as np

    from scalelong.data.grid import save_grid

    rows = np.linspace(0, len(data) - 1, min(count, len(data))).astype(int)
    save_grid(np.stack([data.images[row] for row in rows]), path)


def _ready(entry: dict[str, Any], usual: int) -> str:
    size = entry["shape"][1]
    return str(entry["split"]) if size == usual else f"{entry['split']} at {size}"


def _print_list(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Datasets", title_justify="left")
    for column in ("name", "images", "size", "classes", "prepared"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        ready = [_ready(entry, row["image_size"]) for entry in row["prepared"]]
        table.add_row(
            row["name"],
            "\n".join(f"{count:,} {split}" for split, count in row["images"].items()),
            f"{row['image_size']}×{row['image_size']}×{row['channels']}",
            ", ".join(filter(None, (str(row["classes"] or ""), "captions" if row["captions"] else ""))) or "-",
            "\n".join(ready) or "no",
        )
    sources = Table(title="Sources, in the order in which they are tried", title_justify="left")
    for column in ("name", "sources"):
        sources.add_column(column)
    for row in rows:
        sources.add_row(row["name"], escape(" → ".join(row["sources"])))
    console = Console()
    console.print(table, sources)
    for entry in others:
        count, height, width, channels = entry["shape"]
        about = f"{entry['name']} ({entry['split']}): {count:,} images, {width}×{height}×{channels}"
        console.print(escape(about), highlight=False)
    typer.echo("Any image folder or archive, .npy, .npz and hf:NAME can be given in place of a name.")
