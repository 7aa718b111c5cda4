"""Save a scaling beside a network's own files and load it: a small JSON file, and safetensors for learned scalings."""

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalelong.errors import ScaleLongError, ScalingStateError, UnsupportedNetworkError
from scalelong.files import atomic_file, write_text
from scalelong.scaling import NoScaling, Scaling, SkipScaling
from scalelong.skips.application import Net, apply_quietly, remove, restore_on_failure, scaled_root
from scalelong.skips.conditioning import bind
from scalelong.skips.finders import find_sites
from scalelong.skips.hooks import scaling_of
from scalelong.skips.sites import ROOT, Site, declared_sites

JSON, WEIGHTS, FORMAT = "scaling.json", "scaling.safetensors", 1
_TYPES = {"format": int, "network": str, "scaling": dict, "placement": str, "sites": list, "own_sites": bool,
          "weights": list}  # fmt: skip


def save_scaling(net: nn.Module, folder: Path | str, *, timeout: float = 20.0, allow_unscaled: bool = False) -> Path:
    """Write `scaling.json` (and `scaling.safetensors` for a learned scaling) into `folder`, and return the folder.

    Save the network itself as usual; `with unscaled(net):` keeps LS weights out of its own file.

    Args:
        net: The scaled network, or a module that holds it.
        folder: The folder to write to.
        timeout: LS that FSDP has sharded is gathered, so every process must call this function. It raises an error if
            the others have not called it after this many seconds.
        allow_unscaled: Record "none" for an unscaled network instead of raising an error.

    Returns:
        The folder.

    Examples:
        >>> net = scalelong.StackedUNet(32, 3, scaling=scalelong.LearnableScaling())
        >>> folder = scalelong.save_scaling(net, "my-network")
        >>> sorted(path.name for path in folder.iterdir())
        ['scaling.json', 'scaling.safetensors']
    """
    root, folder = scaled_root(net), Path(folder)
    scaler = scaling_of(root)
    if scaler is None and not allow_unscaled:
        hint = "call scalelong.apply first, or pass the network that was scaled"
        raise ScalingStateError(f"{type(root).__name__} is not scaled, so there is nothing to save; {hint}")
    sites = list(getattr(scaler, "sites", ()))
    state = {} if scaler is None else _gathered(scaler, timeout)
    if sites and scaler is not None:
        with torch.device("meta"):
            built = scaler.spec.build([site.shape for site in sites])
            bind(root, built)
            expected = built.state_dict()
        if problems := key_problems(expected, state):  # FSDP1's flat parameters
            hint = "save within FSDP.summon_full_params(net)"
            raise ScalingStateError(f"the weights of the scaling are incomplete ({problems}); {hint}")
    record = {
        "format": FORMAT,
        "network": _class_name(root),
        "scaling": (NoScaling() if scaler is None else scaler.spec).to_dict(),
        "placement": getattr(scaler, "placement", "join"),
        "sites": [asdict(site) for site in sites],
        "own_sites": bool(sites) and sites != _found(root),
        "weights": sorted(state),
    }
    if state:
        with atomic_file(folder / WEIGHTS) as temporary:
            save_file(state, temporary)
    else:
        (folder / WEIGHTS).unlink(missing_ok=True)
    write_text(folder / JSON, json.dumps(record, indent=2) + "\n")
    return folder


def load_scaling(net: Net, folder: Path | str) -> Net:
    """Scale `net` like the network that `folder` was saved from. Raises an error that lists what does not fit.

    Args:
        net: The network, or a module that holds it: the scaled one in it, or the only one of the class that was saved.
        folder: The folder that `save_scaling` wrote.

    Returns:
        `net` itself.

    Examples:
        >>> trained = scalelong.StackedUNet(32, 3, scaling=scalelong.ConstantScaling(0.5))
        >>> folder = scalelong.save_scaling(trained, "my-scaling")
        >>> scalelong.describe(scalelong.load_scaling(scalelong.StackedUNet(32, 3), folder)).scaling
        ConstantScaling(kappa=0.5, reverse=False)
    """
    root, path = scaled_root(net, allow_wrappers=False), Path(folder) / JSON
    record = _read(path)
    if scaling_of(root) is None and _class_name(root) != record["network"]:
        held = [(name, module) for name, module in root.named_modules() if _class_name(module) == record["network"]]
        if len(held) > 1:
            paths = ", ".join(f"net.{name}" for name, _ in held)
            what = f"{type(root).__name__} holds {len(held)} networks of class {record['network']}"
            raise ScalingStateError(f"{what}; pass one of them: {paths}")
        root = held[0][1] if held else root
    spec = Scaling.from_dict(record["scaling"])
    try:
        sites = [Site(**values) for values in record["sites"]]
    except TypeError as error:  # not an object, or with unknown or missing fields
        raise ScalingStateError(f"{path} is not a scaling: invalid sites {record['sites']!r}") from error
    if spec.is_identity:
        remove(root)
        return net
    with restore_on_failure(root):
        if spec.acts_on == "blocks":
            apply_quietly(root, spec, replace=True)
        else:
            _check_fit(root, sites, record, path)
            own = None if declared_sites(root) is not None else sites
            apply_quietly(root, spec, sites=own, placement=record["placement"], replace=True)
        _load_weights(root, path.with_name(WEIGHTS), record["weights"])
    return net


def _class_name(net: nn.Module) -> str:
    cls = next(cls for cls in type(net).__mro__ if not cls.__name__.startswith("FSDP"))  # fully_shard makes a subclass
    return f"{cls.__module__}.{cls.__qualname__}"


def _gathered(scaler: SkipScaling, timeout: float) -> dict[str, Tensor]:
    """Return the state dict on the CPU. What FSDP has sharded is gathered once every process is known to take part."""
    state: dict[str, Any] = scaler.state_dict()
    sharded = [value for value in state.values() if _is_sharded(value)]
    if not sharded:
        return {key: _whole(value) for key, value in state.items()}
    from torch.distributed.distributed_c10d import _get_default_store

    ranks, rank, store = (
        sharded[0].device_mesh.mesh.flatten().tolist(),
        torch.distributed.get_rank(),
        _get_default_store(),
    )
    key = "scalelong/save_scaling/{}".format
    store.set(key(rank), "ready")
    try:
        store.wait([key(other) for other in ranks], timedelta(seconds=timeout))
        return {name: _whole(value) for name, value in state.items()}
    except torch.distributed.DistStoreError as error:
        problem = f"the weights of LS are sharded over processes {ranks}, and after {timeout:g} s not all of them"
        hint = "call it in every process, not on rank 0 alone, or pass a longer timeout"
        raise ScalingStateError(f"{problem} have called save_scaling; {hint}") from error
    finally:
        store.delete_key(key(rank))


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "full_tensor") and not all(placement.is_replicate() for placement in value.placements)


def _whole(value: Any) -> Tensor:
    if hasattr(value, "full_tensor"):
        value = value.full_tensor() if _is_sharded(value) else value.to_local()
    whole: Tensor = value.detach().cpu().contiguous()
    return whole


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ScalingStateError(f"{path.parent} contains no {JSON}; save_scaling(net, folder) writes it")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ScalingStateError(f"{path} is not valid JSON: {error}") from error
    for key, kind in _TYPES.items():
        if not isinstance(record, dict) or not isinstance(record.get(key), kind):
            raise ScalingStateError(f"{path} is not a scaling: {key!r} must be a {kind.__name__}")
    if record["format"] != FORMAT:
        raise ScalingStateError(f"{path} has format {record['format']}, but this version reads format {FORMAT}")
    return record


def _found(root: nn.Module) -> list[Site] | None:
    """Return the sites found without help, None if the network is unknown."""
    try:
        return find_sites(root)
    except ScaleLongError:
        return None


def _check_fit(root: nn.Module, sites: list[Site], record: dict[str, Any], path: Path) -> None:
    """Compare the saved sites with those of this network."""
    here = _found(root) or []
    if record["own_sites"]:  # the user listed them: only their modules must exist
        modules = {ROOT, *(name for name, _ in root.named_modules(remove_duplicate=False))}
        missing = [(i, site.path) for i, site in enumerate(sites, start=1) if not {site.path, site.called} <= modules]
        differences = [f"skip {i} ends at {consumer}, which is missing here" for i, consumer in missing]
    elif len(sites) != len(here):
        differences = [f"{len(sites)} long skips there, {len(here)} here"]
    else:
        pairs = [(_summary(there), _summary(site)) for there, site in zip(sites, here, strict=True)]
        differences = [f"skip {i} is {a} there, {b} here" for i, (a, b) in enumerate(pairs, start=1) if a != b]
    if differences:
        what = (
            f"{path.parent} holds the scaling of another network ({record['network']}) than this {type(root).__name__}"
        )
        shown = differences[:4] + ["…"] * (len(differences) > 4)
        raise UnsupportedNetworkError(f"{what}: {'; '.join(shown)}")


def _summary(site: Site) -> str:
    tokens = f" and {site.tokens} tokens" if site.tokens is not None else ""
    return f"{site.path} with {site.channels} channels{tokens}"


def _load_weights(root: nn.Module, path: Path, names: list[str]) -> None:
    expected = {} if (scaler := scaling_of(root)) is None else scaler.state_dict()
    if not expected and not names:
        return
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ScalingStateError(f"{path} cannot be read: {error}") from error
    if problems := key_problems(expected, state):
        raise ScalingStateError(f"the weights in {path} do not fit the scaling: {problems}")
    with torch.no_grad():
        for name, value in expected.items():
            value.copy_(state[name])


def key_problems(expected: dict[str, Tensor], state: dict[str, Tensor], limit: int = 4) -> str:
    """List missing and unexpected keys and wrong shapes of a state dict; an empty string if it fits."""
    wrong = [f"{k} {tuple(state[k].shape)} instead of {tuple(expected[k].shape)}"
             for k in sorted(set(expected) & set(state)) if expected[k].shape != state[k].shape]  # fmt: skip
    problems = {
        "missing": sorted(set(expected) - set(state)),
        "unexpected": sorted(set(state) - set(expected)),
        "wrong shape": wrong,
    }
    return "; ".join(f"{kind}: {', '.join(keys[:limit])}" for kind, keys in problems.items() if keys)
