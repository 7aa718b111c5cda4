"""Every setting with its type, default, allowed values and meaning, and configs as YAML or JSON files.

The meaning of a setting is the comment behind its field in `config.py`. From it come docs/settings.md
(`python -m scalelong.runs.settings > docs/settings.md`), the comments of `scalelong presets NAME --yaml`, and the
suggestions for a misspelt setting.
"""

import dataclasses
import difflib
import inspect
import json
import re
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scalelong.errors import DataError, InvalidValueError, UnknownNameError, invalid, one_line, require
from scalelong.runs import config as configs
from scalelong.runs.config import Config
from scalelong.scaling import specs

HEADER = """# Settings

Set any of them with `--set KEY=VALUE` (repeatable), with `--config FILE`, or (those of the scaling excepted) with
`override(config, {KEY: VALUE})` in Python. The defaults below are those of a config; every preset changes some of them.
`scalelong presets NAME --yaml` prints a complete, commented file to start from.

This page is generated from `src/scalelong/runs/config.py`: `python -m scalelong.runs.settings > docs/settings.md`."""
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Setting:
    """One key of `--set` and `override`."""

    key: str
    kind: str  # its type in words
    default: str
    allowed: str  # "" if any value of the type is
    meaning: str


@cache
def all_settings() -> tuple[Setting, ...]:
    """Return every setting in the order of the config."""
    found: list[Setting] = []
    for field in dataclasses.fields(Config):
        section = typing.get_type_hints(Config)[field.name]
        if dataclasses.is_dataclass(section) and section is not specs.Scaling:
            found += _fields(section, f"{field.name}.")  # type: ignore[arg-type]
    return (*(setting for setting in _fields(Config, "") if setting.key != "preset"), *found)


def _fields(cls: type, prefix: str) -> list[Setting]:
    source = inspect.getsource(configs).partition(f"\nclass {cls.__name__}:")[2].partition("\n\n\n")[0]
    meanings = dict(re.findall(r"^    (\w+): [^#\n]+  # (.+)$", source, flags=re.M))
    hints, found = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and hint is not specs.Scaling:
            continue
        key = f"{prefix}{field.name}"
        kind = "a scaling" if hint is specs.Scaling else configs.description(hint)
        default = getattr(cls(), field.name)
        shown = default.kind if isinstance(default, specs.Scaling) else _text(default)
        found.append(Setting(key, kind, shown, configs.allowed(key), meanings.get(field.name, "")))
    return found


def _text(value: Any) -> str:
    """Return a value as `--set` takes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def unknown_setting(key: str) -> UnknownNameError:
    """Build the error for a setting that does not exist, with the three that are nearest in name or meaning."""
    words, last = set(re.split(r"[^a-z]+", key.lower())), key.rpartition(".")[2].lower()

    def nearness(setting: Setting) -> float:
        name = setting.key.rpartition(".")[2]
        described = bool(last) and set(re.split(r"[^a-z]+", last)) <= set(re.split(r"[^a-z]+", setting.meaning.lower()))
        ratios = [difflib.SequenceMatcher(None, *pair).ratio() for pair in ((key, setting.key), (last, name))]
        return max(*ratios, 0.9 * described) + 0.01 * len(words & set(setting.key.split(".")))

    first, second, third = sorted(all_settings(), key=nearness, reverse=True)[:3]
    names = f"{first.key!r}, {second.key!r} or {third.key!r}"
    hint = "scalelong presets NAME --yaml prints all settings"
    return UnknownNameError(f"unknown setting {key!r}; did you mean {names}? ({hint})")


# -------------------------------------------------------------------------------------------- config files


def to_yaml(config: Config) -> str:
    """Return the config as YAML with the meaning of every setting; `--config` reads it back."""
    meanings, lines = {setting.key: setting for setting in all_settings()}, []

    def line(indent: str, key: str, name: str, value: Any) -> str:
        setting = meanings.get(key)
        limits = f" ({setting.allowed})" if setting and setting.allowed else ""
        meaning = setting.meaning + limits if setting else "the preset that this config started from"
        return f"{indent}{name}: {_yaml(value)}  # {meaning}"

    for name, value in config.to_dict().items():
        if isinstance(value, dict) and name != "scaling":
            lines += ["", f"{name}:", *(line("  ", f"{name}.{key}", key, inner) for key, inner in value.items())]
        else:
            lines.append(line("", name, name, value))
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    yaml = require("yaml", "train", "configs in YAML")
    plain = json.loads(json.dumps(value))  # tuples are lists
    text: str = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("...\n").strip()


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file of settings, nested or with dotted keys, or the config.json of a run."""
    if path.suffix.lower() not in SUFFIXES:
        raise invalid("--config", f"a file ending in {', '.join(SUFFIXES)}", str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; convert it first") from None
    try:
        if path.suffix.lower() == ".json":
            values = json.loads(text)
        else:
            values = require("yaml", "train", "configs in YAML").safe_load(text)
    except Exception as error:  # PyYAML's errors have no common base with JSON's
        raise InvalidValueError(f"{path} must be valid {path.suffix[1:].upper()}: {one_line(error)[:200]}") from None
    if isinstance(values, dict) and isinstance(values.get("config"), dict):
        values = values["config"]  # of a run
    if not isinstance(values, dict):
        raise invalid(str(path), "settings such as `train: {lr: 0.001}`", values)
    return {str(key): value for key, value in values.items()}


def dotted(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted keys. A scaling and a network's own options stay objects."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key != "scaling":
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


# ------------------------------------------------------------------------------------------ docs/settings.md


def page() -> str:
    """Return docs/settings.md."""
    from scalelong.data.catalog import CATALOG
    from scalelong.diffusion.samplers import SAMPLERS
    from scalelong.evaluation.extractors import EXTRACTORS
    from scalelong.models.registry import MODELS
    from scalelong.models.unet import UNETS

    choices: dict[str, Any] = {
        "data.name": [*CATALOG, "a path", "hf:NAME"], "model.kind": MODELS, "model.unet": UNETS,
        "sample.sampler": [*SAMPLERS, "a scheduler of diffusers"], "evaluate.extractor": EXTRACTORS,
    }  # fmt: skip
    lines = [HEADER]
    section = None
    for setting in all_settings():
        name = setting.key.rpartition(".")[0]
        if name != section:
            section = name
            about = inspect.getdoc(typing.get_type_hints(Config)[name]) if name else None
            lines += ["", f"## {name or 'The run'}", ""] + ([about, ""] if about else [])
            lines += ["| key | type | default | allowed | meaning |", "|---|---|---|---|---|"]
        names = choices.get(setting.key)
        allowed = ", ".join(f"`{choice}`" for choice in names) if names else setting.allowed
        cells = (f"`{setting.key}`", setting.kind, f"`{setting.default}`", allowed, setting.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += [
        "", "## scaling", "", "Fields of the scaling that `--scaling` (or the key `scaling`) selects.", "",
        "| scaling | key | default |", "|---|---|---|",
    ]  # fmt: skip
    for kind, (spec, _) in specs._REGISTRY.items():
        if kind != spec.kind:  # an alias
            continue
        own = [field for field in dataclasses.fields(spec) if field.init]
        lines += [f"| `{kind}` | `scaling.{field.name}` | {_default(field)} |" for field in own]
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    return "required" if field.default is dataclasses.MISSING else f"`{_text(field.default)}`"


if __name__ == "__main__":
    print(page(), end="")
