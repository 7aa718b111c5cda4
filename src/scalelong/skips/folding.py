"""Fold κ into the weights that consume the skips, so that the network needs this package no longer."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scalelong._modules import evaluating, first_tensor
from scalelong.errors import ScalingStateError, UnsupportedNetworkError
from scalelong.scaling import SkipScaling
from scalelong.skips.application import Net, remove, restore_on_failure, scaled_root
from scalelong.skips.hooks import Handle, attach, scaling_of
from scalelong.skips.sites import ROOT, Site

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # of max |output|


def fold(net: Net, *example: Any, **kwargs: Any) -> Net:
    """Multiply κ_i into the weights that consume long skip i, remove the scaling, and return the network.

    The folded network computes the same and loads without this package. It raises an error that gives the reason for
    each skip, before anything is changed, where folding is not exact: LS depends on the input, and a norm that follows
    the join directly divides κ_i out again (`placement="after_norm"` can be folded).

    Args:
        net: A network scaled with constants (CS, uniform, explicit, learned scalars).
        *example: The arguments of one call of the network. With them, convolutions and linear layers that take the
            skip, or start or end with it, are found by running the network, and the result is compared.
        **kwargs: The keyword arguments of that call.

    Returns:
        `net` itself.

    Examples:
        >>> x = torch.randn(2, 3, 8, 8)
        >>> net = scalelong.UViT(8, 4, embed_dim=16, depth=4, num_heads=2, scaling=scalelong.ConstantScaling(0.5))
        >>> before = net(x, 500)
        >>> folded = scalelong.fold(net, x, 500)
        >>> torch.allclose(folded(x, 500), before, atol=1e-5), scalelong.describe(folded).scaling
        (True, NoScaling())
    """
    root = scaled_root(net, allow_wrappers=False)
    scaler = scaling_of(root)
    if scaler is None:
        raise ScalingStateError(f"{type(root).__name__} is not scaled, so there is nothing to fold")
    if any(parameter.is_meta for parameter in root.parameters()):
        raise UnsupportedNetworkError(f"{type(root).__name__} is on the meta device; load its weights before folding")
    call = partial(net, *example, **kwargs) if example or kwargs else None
    with torch.no_grad(), evaluating(net), restore_on_failure(root):
        plan = _plan(root, scaler, _coefficients(scaler), call)
        expected = None if call is None else _output(call)
        backup = [(parameter, parameter.clone()) for module in plan for parameter in module.parameters(recurse=False)]
        for module, factors in plan.items():
            _multiply(module, factors)
        remove(root)
        if call is not None and expected is not None:
            error = _difference(_output(call), expected)
            if error > TOLERANCE.get(expected.dtype, 1e-5):
                for parameter, former in backup:
                    parameter.copy_(former)
                problem = f"folding changes the output of {type(root).__name__} by {error:.2g} of its largest value"
                raise UnsupportedNetworkError(f"{problem}, so a skip is also used elsewhere; nothing was changed")
    return net


def _coefficients(scaler: SkipScaling) -> tuple[float, ...]:
    kappas = scaler.scalars() if scaler.acts_on == "skips" else None
    if scaler.conditioners:
        problem = "it conditions blocks on features, which are not weights"
        raise UnsupportedNetworkError(f"{scaler.spec} cannot be folded: {problem}; save it with scalelong.save_scaling")
    if kappas is None:
        what = "computes κ_i from the input" if scaler.acts_on == "skips" else "scales the outputs of blocks"
        what = what if scaler.is_factor else "is not a factor on the skip"
        raise UnsupportedNetworkError(f"{scaler.spec} cannot be folded: it {what}; save it with scalelong.save_scaling")
    return kappas


@dataclass(frozen=True)
class _Consumer:
    """A layer that takes a skip: alone (`at` is None), or in its first or last channels."""

    path: str
    at: str | None  # "first", "last" or None


def _plan(
    root: nn.Module, scaler: SkipScaling, kappas: tuple[float, ...], call: Callable[[], Any] | None
) -> dict[nn.Module, Tensor]:
    """Return the factor of each channel of each layer to change. Raises an error with the reasons of all skips."""
    found = {} if call is None else _traced(root, scaler, kappas, call)
    owners = Counter(id(p) for module in set(root.modules()) for p in module._parameters.values() if p is not None)
    plan: dict[nn.Module, Tensor] = {}
    reasons = []
    for i, (site, kappa) in enumerate(zip(scaler.sites, kappas, strict=True), start=1):
        if kappa == 1.0:
            continue
        known = _known_consumers(root, site, scaler.placement)
        reason, consumers = (known, []) if isinstance(known, str) else (None, known or found.get(i, []))
        if not reason and not consumers:
            reason = _unknown(call)
        for consumer in consumers:
            path, module = _first_layer(root, consumer.path)
            factors = _factors(module, site.channels, consumer.at, kappa)
            reason = f"{path} consumes several skips" if module in plan else None
            reason = reason or _unfoldable(module, path, factors, scaler.placement, owners)
            if reason:
                break
            plan[module] = factors
        if reason:
            reasons.append(f"long skip {i} ({site.path}): {reason}")
    if reasons:
        raise UnsupportedNetworkError(f"{type(root).__name__} cannot be folded exactly: {'; '.join(reasons)}")
    return plan


def _unknown(call: Callable[[], Any] | None) -> str:
    if call is None:
        return "which layers consume it is only known when the network runs: call fold(net, *example)"
    return "no convolution or linear layer takes it as it is"


def _known_consumers(root: nn.Module, site: Site, placement: str) -> list[_Consumer] | str:
    """Return the consumers that the site itself tells, a reason why there can be none, or an empty list."""
    at = "first" if site.leading else "last"
    if placement == "after_norm":
        return [_Consumer(path, at) for path in (site.norm, site.shortcut) if path is not None]
    if site.norm is not None:
        return f'{site.norm} normalizes it together with the backbone; apply it with placement="after_norm"'
    if site.path == ROOT or site.join is not None or site.item is not None:
        return []
    path, module = _first_layer(root, site.path)
    if isinstance(module, LAYERS):
        return [_Consumer(path, at if site.trailing or site.leading else None)]
    linear = getattr(module, "skip_linear", None)
    if isinstance(linear, nn.Linear) and not (site.trailing or site.leading) and _ends_with_skip(module, linear, site):
        return [_Consumer(f"{path}.skip_linear", "last")]
    return []


def _first_layer(root: nn.Module, path: str) -> tuple[str, nn.Module]:
    """Return the module at `path`, or the first one in it if it is a sequence."""
    module = root.get_submodule(path)
    while isinstance(module, nn.Sequential) and len(module):
        name, module = next(iter(module.named_children()))
        path = f"{path}.{name}"
    return path, module


def _ends_with_skip(block: nn.Module, linear: nn.Linear, site: Site) -> bool:
    """Whether a U-ViT block, called as `block(x, skip)`, feeds [x, skip] to its `skip_linear`."""
    generator, like, seen = torch.Generator().manual_seed(0), linear.weight, list[Tensor]()
    shape = (1, site.tokens or 4, linear.in_features // 2)
    x, skip = (torch.randn(shape, generator=generator).to(like) for _ in range(2))
    handle = linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        block.forward(x, skip)
    except Exception:
        return False
    finally:
        handle.remove()
    return len(seen) == 1 and torch.equal(seen[0][..., shape[-1] :], skip)


def _unfoldable(module: nn.Module, path: str, factors: Tensor, placement: str, owners: Counter[int]) -> str | None:
    """Say why the factors cannot be multiplied into a layer, or return None."""
    if isinstance(module, NORMS) and placement != "after_norm":
        return f"{path}, a {type(module).__name__}, normalizes it"
    if not isinstance(module, (*LAYERS, *NORMS)):
        return f"{path} is a {type(module).__name__}, not a convolution, linear layer or norm"
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if module._parameters.get("weight") is None:
        return f"{path} has no weight of its own"
    if any(hasattr(p, "full_tensor") or not p.is_floating_point() for p in own):
        return f"the weights of {path} are sharded or quantized"
    if any(owners[id(parameter)] > 1 for parameter in own):
        return f"{path} shares its weights with another layer"
    return None if _folds(module, factors) else f"{path}, a {type(module).__name__}, is not linear in its weights"


def _folds(module: nn.Module, factors: Tensor) -> bool:
    """Whether a copy of the layer with multiplied weights does what the factors do; weight standardization fails."""
    twin: Any = copy.deepcopy(module).float()
    x = torch.randn(_input_shape(twin), generator=torch.Generator().manual_seed(0)).to(twin.weight.device)
    norm = isinstance(twin, NORMS)
    scale = factors.to(x).view([-1] if isinstance(twin, (nn.Linear, nn.LayerNorm)) else [-1, *[1] * (x.ndim - 2)])
    try:
        expected = twin.forward(x) * scale if norm else twin.forward(x * scale)
        _multiply(twin, factors)
        return _difference(twin.forward(x), expected) < 1e-5
    except Exception:
        return False


def _input_shape(module: Any) -> tuple[int, ...]:
    if isinstance(module, nn.Linear):
        return (2, module.in_features)
    if isinstance(module, nn.LayerNorm):
        return (2, 4, *module.normalized_shape)
    if isinstance(module, NORMS):
        dims = next((int(c.__name__[-2]) for c in type(module).__mro__ if c.__name__[-2:] in ("1d", "2d", "3d")), 2)
        return (2, len(module.weight), *[4] * dims)
    sizes = (max(8, d * (k - 1) + 1) for k, d in zip(module.kernel_size, module.dilation, strict=True))
    return (2, module.in_channels, *sizes)


def _factors(module: nn.Module, channels: int | None, at: str | None, kappa: float) -> Tensor:
    """Return one factor per input channel of a layer, or per channel of a norm."""
    weight = module._parameters.get("weight")
    width = getattr(module, "in_channels", None) or getattr(module, "in_features", None)
    width = width or (0 if weight is None else len(weight))
    factors = torch.full((width,), kappa, dtype=torch.float64)
    if at is not None:
        assert channels is not None
        backbone = factors[channels:] if at == "first" else factors[: width - channels]
        backbone.fill_(1.0)
    return factors


def _multiply(module: Any, factors: Tensor) -> None:
    """Multiply the input channels of a layer, or the gain and offset of a norm, in double precision."""
    weight, factors = module.weight, factors.to(module.weight.device)
    exact = torch.float64 if weight.device.type != "mps" else torch.float32
    factors = factors.to(exact)
    if isinstance(module, NORMS):
        for parameter in (module.weight, module.bias):
            if parameter is not None:
                parameter.copy_(parameter.to(exact) * factors)
        return
    groups = getattr(module, "groups", 1)
    if isinstance(module, TRANSPOSED):  # (in, out / groups, …)
        scale = factors.view(-1, *[1] * (weight.ndim - 1))
    else:  # (out, in / groups, …): the rows of a group see its own channels
        rows = factors.view(groups, -1).repeat_interleave(weight.shape[0] // groups, dim=0)
        scale = rows.view(*rows.shape, *[1] * (weight.ndim - 2))
    weight.copy_(weight.to(exact) * scale)


@dataclass
class _Skips:
    """Keeps the skips of one pass, as they are after scaling."""

    tensors: dict[int, Tensor] = field(default_factory=dict)

    def scale(self, skip: Tensor, i: int) -> Tensor:
        self.tensors[i] = skip
        return skip


def _traced(
    root: nn.Module, scaler: SkipScaling, kappas: tuple[float, ...], call: Callable[[], Any]
) -> dict[int, list[_Consumer]]:
    """Run the network and find the layers whose input is a scaled skip, or starts or ends with one."""
    if scaler.placement != "join":
        return {}
    skips, found, handles = _Skips(), dict[int, list[_Consumer]](), list[Handle]()

    def look(path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            return
        dim = -1 if isinstance(module, (nn.Linear, nn.LayerNorm)) else 1
        for i, skip in skips.tensors.items():
            if kappas[i - 1] == 1.0 or skip.ndim != x.ndim or skip.shape[dim] > x.shape[dim] or skip.dtype != x.dtype:
                continue
            places = ("first", "last") if skip.shape[dim] < x.shape[dim] else (None,)
            for at in places:
                part = x.narrow(dim, 0 if at != "last" else x.shape[dim] - skip.shape[dim], skip.shape[dim])
                if part.shape == skip.shape and torch.equal(part, skip):
                    found.setdefault(i, []).append(_Consumer(path, at))

    try:
        handles += attach(root, list(scaler.sites), skips)
        for path, module in root.named_modules():
            if isinstance(module, (*LAYERS, *NORMS)):
                handles.append(module.register_forward_pre_hook(partial(look, path)))
        call()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _output(call: Callable[[], Any]) -> Tensor | None:
    output = call()
    return first_tensor(list(output.values()) if hasattr(output, "keys") else output)


def _difference(after: Tensor | None, before: Tensor) -> float:
    if after is None:
        return float("inf")
    return float((after.double() - before.double()).abs().max() / before.double().abs().max().clamp(min=1e-30))
