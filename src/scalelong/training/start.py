"""The config that a command starts from: a preset, a file of settings, or what the data itself asks for."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalelong.errors import InvalidValueError
from scalelong.runs.config import Config, change_objective, check_read, flatten, known_keys, parse_settings
from scalelong.runs.settings import dotted, read_config, unknown_setting
from scalelong.scaling import parse_scaling
from scalelong.training.presets import AUTO, preset

DEFAULT = "digits"


@dataclass(frozen=True)
class Start:
    """A config before the command's own scaling, steps and seed, and what was decided on the way."""

    config: Config
    picked: tuple[str, ...] = ()  # settings that follow from the data and not from the user
    notes: tuple[str, ...] = ()

    def resumed(self, stored: Config) -> Config:
        """Return the config with what was picked when the run of `stored` began, so that the same command resumes."""
        if not _same_path(stored.data.name, self.config.data.name):
            return self.config
        before = flatten(stored.to_dict())
        return _changed(self.config, {key: before.get(key) for key in ("data.name", *self.picked)})


def start_from(
    name: str | None = None,
    file: Path | None = None,
    options: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
) -> Start:
    """Return preset `name` (default: `digits`), changed by a file and by `options` with dotted keys.

    Data of the user's own decides what nobody set: image size, channels, background, and without a preset also the
    network. `settings` (`--set`) count as set; `choose` applies them.
    """
    values = dotted(read_config(file)) if file is not None else {}
    own = values.pop("preset", None)
    if name is not None and own not in (None, name):
        raise InvalidValueError(f"{file} starts from preset {own!r}, got preset {name!r}; leave one of them out")
    name = name or (None if own == AUTO else own)
    values |= {key: value for key, value in (options or {}).items() if value is not None}
    for key in values:
        if key not in (*known_keys(), "scaling") and not key.startswith("model.options."):
            raise unknown_setting(key)
    typed = {**values, **parse_settings(list(settings))}
    given = {key for key, value in typed.items() if value is not None}
    stated = {key.removeprefix("data."): value for key, value in typed.items() if key.startswith("data.")}
    about = Config.from_dict({"data": stated}).data
    base = preset(name or DEFAULT)
    if "data.name" not in given or (name is None and about.name == base.data.name):
        return Start(_changed(base, values))

    from scalelong.data import CATALOG
    from scalelong.data.prepare import absolute_name
    from scalelong.training import own_data

    if about.name not in CATALOG:
        values["data.name"] = absolute_name(about.name)
        about = replace(about, name=values["data.name"])
    elif name is not None:
        return Start(_changed(base, values))
    seen = own_data.look(about, given)
    if name is None:
        base = replace(base, preset=AUTO)
    fit = own_data.pick(seen, about, base, given) if name is None else own_data.adapt(seen, about, base)
    picked = {key: value for key, value in fit.settings.items() if key not in given}
    chosen = {key: value for key, value in values.items() if value is not None or key not in picked}
    return Start(_changed(base, {**picked, **chosen}), tuple(picked), fit.notes)


def _changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Replace dotted keys. A file lists all of them, so those that the network does not read may keep their values."""
    values = config.to_dict()
    change_objective(values, settings)
    before = flatten(values)
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if name.startswith("options."):
            values["model"]["options"] = {**values["model"]["options"], name.removeprefix("options."): value}
        elif name:
            values[section][name] = value
        else:
            values[key] = value
    if isinstance(word := values["scaling"], str) and word.strip().lower() in ("cs", "cs-reverse"):
        values["scaling"] = parse_scaling(word, kappa=values["kappa"])
    changed = Config.from_dict(values)
    after = flatten(changed.to_dict())
    check_read(changed, [key for key in settings if key in before and after.get(key) != before[key]])
    return changed


def _same_path(one: str, other: str) -> bool:
    return os.path.abspath(Path(one).expanduser()) == os.path.abspath(Path(other).expanduser())
