"""FSDP2 (torch's `fully_shard`): every process holds its share of weights, gradients, optimizer state and EMA.

The scaling is applied before, so LS is among the parameters. Optimizer, clipping and EMA work on the local shards;
only the gradient norm needs a reduction. Checkpoints hold whole tensors, so any number of processes opens them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from scalelong.training.parallel import repeated_blocks


def shard(net: nn.Module, device: torch.device) -> None:
    """Shard a network in place: each block that repeats, then the rest."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in repeated_blocks(net):
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard, which shares its memory with `tensor`; a whole tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def use_local_shards(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Let an optimizer that has no state yet update local shards. Returns (parameter, its local shard)."""
    pairs = []
    for group in optimizer.param_groups:
        shards = [nn.Parameter(local(p).detach(), p.requires_grad) for p in group["params"]]
        pairs += list(zip(group["params"], shards, strict=True))
        group["params"] = shards
    return pairs


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of the whole gradient from local shards: one reduction."""
    squared = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(squared)
    return squared.sqrt()


def whole(tensors: dict[str, Any]) -> dict[str, Any]:
    """Gather sharded tensors. Every process must call it."""
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tensors.items()}


def whole_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Gather optimizer state, whose shard is shaped as that of its parameter. Every process must call it."""
    if not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, placements, shape=shape, stride=stride).full_tensor()


def own_share(value: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's share of a whole tensor that every process has."""
    if not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


@torch.no_grad()
def load_shares(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load a whole state dict into a sharded network."""
    own = net.state_dict()
    for name, value in tensors.items():
        local(own[name]).copy_(own_share(value, own[name]))
