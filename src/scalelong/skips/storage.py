"""Save a scaling beside a network's own folder, and put it back: a small JSON, and safetensors for LS."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from scalelong.errors import ScaleLongError
from scalelong.files import atomic_file, write_text
from scalelong.scaling import BlockScaling, NoScaling, Scaling
from scalelong.skips.adapters import find_sites
from scalelong.skips.application import _root, apply, remove, scaling_of
from scalelong.skips.sites import Site

JSON, WEIGHTS, FORMAT = "scaling.json", "scaling.safetensors", 1
Net = TypeVar("Net", bound=nn.Module)


def save_scaling(net: nn.Module, folder: Path | str) -> Path:
    """Write `scaling.json` (and `scaling.safetensors` where the scaling learns) into `folder`; returns it."""
    root, folder = _root(net, wrapped=True), Path(folder)
    scaler = scaling_of(root)
    state = {} if scaler is None else {k: v.detach().cpu().contiguous() for k, v in scaler.state_dict().items()}
    record = {
        "format": FORMAT,
        "network": f"{type(root).__module__}.{type(root).__qualname__}",
        "scaling": (NoScaling() if scaler is None else scaler.spec).to_dict(),
        "placement": getattr(scaler, "placement", "join"),
        "sites": [asdict(site) for site in getattr(scaler, "sites", ())],
        "weights": sorted(state),
    }
    if state:
        with atomic_file(folder / WEIGHTS) as aside:
            save_file(state, aside)
    else:
        (folder / WEIGHTS).unlink(missing_ok=True)
    write_text(folder / JSON, json.dumps(record, indent=2) + "\n")
    return folder


def load_scaling(net: Net, folder: Path | str) -> Net:
    """Scale `net` as the network that `folder` was saved from; says what differs where it does not fit."""
    root, folder = _root(net), Path(folder)
    record = _read(folder / JSON)
    spec = Scaling.from_dict(record["scaling"])
    if isinstance(spec, NoScaling):
        return remove(net)
    if isinstance(spec, BlockScaling):
        apply(root, spec, replace=True)
    else:
        sites = [_site(values, folder / JSON) for values in record["sites"]]
        _check_fit(root, sites, folder)
        apply(root, spec, sites=sites, placement=record["placement"], replace=True)
    if record["weights"]:
        try:
            _load_weights(root, folder / WEIGHTS)
        except ScaleLongError:
            remove(root)
            raise
    return net


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ScaleLongError(f"{path.parent} holds no {JSON}; save_scaling(net, folder) writes it")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ScaleLongError(f"{path} is not JSON: {error}") from error
    expected = {"format": int, "scaling": dict, "placement": str, "sites": list, "weights": list}
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


def _check_fit(root: nn.Module, sites: list[Site], folder: Path) -> None:
    """Compare with what the network has where it is known; sites given by hand are checked by their paths."""
    try:
        present = find_sites(root)
    except ScaleLongError:
        return
    saved_places, present_places = [s.path for s in sites], [s.path for s in present]
    if set(saved_places) & set(present_places) or len(sites) != len(present):
        differences = []
        if len(sites) != len(present):
            differences.append(f"{len(sites)} long skips there, {len(present)} in {type(root).__name__}")
        for i, (there, here) in enumerate(zip(sites, present, strict=False), start=1):
            if there.path != here.path:
                differences.append(f"skip {i} ends at {there.path} there, at {here.path} here")
            elif (there.channels, there.tokens) != (here.channels, here.tokens):
                differences.append(
                    f"skip {i} has {there.channels} channels, {there.tokens} tokens there; "
                    f"{here.channels} and {here.tokens} here"
                )
        if differences:
            raise ScaleLongError(f"the scaling in {folder} is of a different network: {'; '.join(differences[:4])}")


def _load_weights(root: nn.Module, path: Path) -> None:
    scaler = scaling_of(root)
    assert scaler is not None
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ScaleLongError(f"{path} cannot be read: {error}") from error
    expected = scaler.state_dict()
    missing, extra = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    wrong = [k for k in sorted(set(expected) & set(state)) if expected[k].shape != state[k].shape]
    if missing or extra or wrong:
        raise ScaleLongError(f"{path} does not fit: missing {missing}, unexpected {extra}, other shapes {wrong}")
    with torch.no_grad():
        for name, value in expected.items():
            value.copy_(state[name])
