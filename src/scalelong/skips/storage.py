"""Save a scaling beside a network's own folder, and put it back: a small JSON, and safetensors for LS."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalelong.errors import ScaleLongError
from scalelong.files import atomic_file, write_text
from scalelong.scaling import NoScaling, Scaling
from scalelong.skips.adapters import find_sites
from scalelong.skips.application import _root, apply, former_scaling_on_failure, remove, scaling_of
from scalelong.skips.sites import Site

JSON, WEIGHTS, FORMAT = "scaling.json", "scaling.safetensors", 1
Net = TypeVar("Net", bound=nn.Module)


def save_scaling(net: nn.Module, folder: Path | str) -> Path:
    """Write `scaling.json` (and `scaling.safetensors` where the scaling learns) into `folder`; returns it.

    The network itself is saved as always; `with unscaled(net):` keeps LS's weights out of its own file.
    """
    root, folder = _root(net, wrapped=True), Path(folder)
    scaler = scaling_of(root)
    sites = list(getattr(scaler, "sites", ()))
    state = {} if scaler is None else {key: _whole(value) for key, value in scaler.state_dict().items()}
    record = {
        "format": FORMAT,
        "network": f"{type(root).__module__}.{type(root).__qualname__}",
        "scaling": (NoScaling() if scaler is None else scaler.spec).to_dict(),
        "placement": getattr(scaler, "placement", "join"),
        "sites": [asdict(site) for site in sites],
        "own_sites": bool(sites) and sites != _found(root),
        "weights": sorted(state),
    }
    if state:
        with atomic_file(folder / WEIGHTS) as aside:
            save_file(state, aside)
    else:
        (folder / WEIGHTS).unlink(missing_ok=True)
    write_text(folder / JSON, json.dumps(record, indent=2) + "\n")
    return folder


def _whole(value: Any) -> Tensor:
    """A tensor of its own on the CPU; of one that FSDP has sharded, all of it (every process must ask)."""
    gathered: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return gathered.detach().cpu().contiguous()


def load_scaling(net: Net, folder: Path | str) -> Net:
    """Scale `net` as the network that `folder` was saved from; says what differs where it does not fit."""
    root, path = _root(net), Path(folder) / JSON
    record = _read(path)
    spec = Scaling.from_dict(record["scaling"])
    sites = [_site(values, path) for values in record["sites"]]
    if spec.is_identity:
        return remove(net)
    with former_scaling_on_failure(root):
        if spec.acts_on == "blocks":
            apply(root, spec, replace=True)
        else:
            _check_fit(root, sites, record, path)
            apply(root, spec, sites=sites, placement=record["placement"], replace=True)
        _load_weights(root, path.with_name(WEIGHTS), record["weights"])
    return net


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ScaleLongError(f"{path.parent} holds no {JSON}; save_scaling(net, folder) writes it")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ScaleLongError(f"{path} is not JSON: {error}") from error
    expected = {
        "format": int,
        "network": str,
        "scaling": dict,
        "placement": str,
        "sites": list,
        "own_sites": bool,
        "weights": list,
    }
    for key, kind in expected.items():
        if not isinstance(record, dict) or not isinstance(record.get(key), kind):
            raise ScaleLongError(f"{path} is not a scaling: {key!r} is missing or not a {kind.__name__}")
    if record["format"] != FORMAT:
        raise ScaleLongError(f"{path} has format {record['format']}; this version reads format {FORMAT}")
    return record


def _site(values: Any, path: Path) -> Site:
    known = {field.name for field in fields(Site)}
    if not isinstance(values, dict) or not set(values) <= known or "path" not in values:
        raise ScaleLongError(f"{path} is not a scaling: one of its sites is {values!r}")
    return Site(**values)


def _found(root: nn.Module) -> list[Site] | None:
    """The sites that the network's structure or adapter shows, None where it is not known."""
    try:
        return find_sites(root)
    except ScaleLongError:
        return None


def _check_fit(root: nn.Module, sites: list[Site], record: dict[str, Any], path: Path) -> None:
    """Compare the saved sites with what this network has, and say what differs."""
    here = {site.path: site for site in _found(root) or ()}
    modules = {name for name, _ in root.named_modules()}
    differences = []
    if not record["own_sites"] and len(sites) != len(here):
        differences.append(f"{len(sites)} long skips there, {len(here)} here")
    for i, there in enumerate(sites, start=1):
        if there.path not in modules:
            differences.append(f"skip {i} ends at {there.path}, which is not here")
        elif there.path not in here:
            if not record["own_sites"]:
                differences.append(f"skip {i} ends at {there.path}, where no skip ends here")
        elif (there.channels, there.tokens) != (here[there.path].channels, here[there.path].tokens):
            differences.append(f"skip {i} ({there.path}) has {_width(there)} there, {_width(here[there.path])} here")
    if differences:
        raise ScaleLongError(
            f"the scaling in {path.parent} is of a different network ({record['network']}) than this "
            f"{type(root).__name__}: {'; '.join(differences[:4])}{'; …' if len(differences) > 4 else ''}"
        )


def _width(site: Site) -> str:
    tokens = f" and {site.tokens} tokens" if site.tokens is not None else ""
    return f"{site.channels} channels{tokens}"


def _load_weights(root: nn.Module, path: Path, names: list[str]) -> None:
    scaler = scaling_of(root)
    assert scaler is not None
    expected = scaler.state_dict()
    if not expected and not names:
        return
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ScaleLongError(f"{path} cannot be read: {error}") from error
    missing, extra = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    wrong = [k for k in sorted(set(expected) & set(state)) if expected[k].shape != state[k].shape]
    if missing or extra or wrong:
        parts = {"missing": missing, "unexpected": extra, "of another shape": wrong}
        told = "; ".join(f"{what}: {', '.join(keys[:4])}" for what, keys in parts.items() if keys)
        raise ScaleLongError(f"the weights in {path} do not fit the scaling: {told}")
    with torch.no_grad():
        for name, value in expected.items():
            value.copy_(state[name])
