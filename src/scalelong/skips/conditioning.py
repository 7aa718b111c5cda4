"""Self-conditioning: the pooled features of one block reach later blocks through the network's own conditioning.

Our U-ViT calls `enter_block` and `leave_block` in `forward`; diffusers' U-Nets get hooks.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from scalelong._modules import first_tensor, parameters_of
from scalelong.errors import InvalidValueError, UnsupportedNetworkError, unknown
from scalelong.scaling import SkipScaling
from scalelong.skips.blocks import blocks_of, pooled
from scalelong.skips.hooks import Argument, scaling_of
from scalelong.skips.joins import SkipHook

EMBEDDING = "temb"  # the argument of diffusers' blocks that holds the time embedding


def enter_block(net: nn.Module, path: str, x: Tensor) -> Tensor:
    """Return tokens (B, L, D) at the input of a block, with the time token conditioned. Call it in `forward`."""
    scaler = scaling_of(net)
    for part in () if scaler is None else scaler.conditioners:
        x = part.enter(path, x)
    return x


def leave_block(net: nn.Module, path: str, x: Tensor) -> Tensor:
    """Keep the features of a block's output (B, L, D) if they condition later blocks, and return it."""
    scaler = scaling_of(net)
    for part in () if scaler is None else scaler.conditioners:
        if path == part.spec.block:
            part.features = pooled(x, net.extras)  # type: ignore[arg-type]
    return x


def bind(root: nn.Module, scaler: SkipScaling) -> None:
    """Give self-conditioning its projection, which depends on widths of the network."""
    for part in scaler.conditioners:
        part.bind(*_path(root, part.spec.block))


def attach_conditioning(root: nn.Module, scaler: SkipScaling) -> None:
    """Register the hooks of a network that does not call `enter_block` itself."""
    for part in scaler.conditioners:
        if part.token is None:
            root.get_submodule(part.spec.block).register_forward_hook(LeaveHook(scaler, part))
            for path in part.targets:
                module = root.get_submodule(path)
                hook = EnterHook(scaler, part, path, Argument.of(module, EMBEDDING))
                module.register_forward_pre_hook(hook, with_kwargs=True)


@dataclass(eq=False)
class LeaveHook(SkipHook):
    """A forward hook that keeps the pooled output of the block."""

    part: Any

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        x = first_tensor(output)
        assert x is not None
        self.part.features = pooled(x)


@dataclass(eq=False)
class EnterHook(SkipHook):
    """A forward pre-hook that conditions the time embedding of a block."""

    part: Any
    path: str
    argument: Argument

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        embedding = self.argument.get(args, kwargs)
        if not isinstance(embedding, Tensor):
            raise UnsupportedNetworkError(
                f"{self.path} was called without a time embedding, which {self.part.spec} needs"
            )
        return self.argument.put(args, kwargs, self.part.enter(self.path, embedding))


def _path(net: nn.Module, block: str) -> tuple[tuple[str, ...], int, int, int | None]:
    """Return the blocks to condition, the widths of features and conditioning, and the position of a time token."""
    blocks, name = blocks_of(net), type(net).__name__
    supported = "self-conditioning supports U-ViT (a time token) and diffusers' U-Nets (a time embedding)"
    if not blocks:
        raise UnsupportedNetworkError(f"{name} has no conditioning that is known; {supported}")
    if block not in blocks:
        raise unknown(f"block of {name}", block, blocks)
    later = blocks[blocks.index(block) + 1 :]
    token: Any = getattr(net, "time_token", None)
    if token is not None:
        width = features = int(net.pos_embed.shape[-1])  # type: ignore[index]
        targets = [path for path in later if path.startswith("out_blocks.")]
    else:
        accepts = lambda path: EMBEDDING in parameters_of(net.get_submodule(path))  # noqa: E731
        targets = [path for path in later if accepts(path)]
        width = getattr(getattr(getattr(net, "time_embedding", None), "linear_2", None), "out_features", 0)
        resnets: Any = getattr(net.get_submodule(block), "resnets", None)
        features = getattr(resnets[-1], "out_channels", 0) if resnets else 0
        if not width or not features or not any(map(accepts, blocks)):
            raise UnsupportedNetworkError(f"{name} has no conditioning that is known; {supported}")
    if not targets:
        usable = ", ".join(path for path in blocks if path != blocks[-1])
        raise InvalidValueError(f"block must be followed by a block that it can condition ({usable}), got {block!r}")
    return tuple(targets), features, width, token
