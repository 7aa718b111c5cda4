"""Devices and processes: accelerate's setup, memory layout, compilation. The networks' own files know none of it."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scalelong.errors import InvalidValueError
from scalelong.runs.config import TrainConfig


def choose_precision(precision: str) -> str:
    """Return what `auto` means here: bf16 on a GPU that computes with it, fp16 on an older one, else fp32."""
    if precision != "auto":
        return precision
    if not torch.cuda.is_available():
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def make_accelerator(t: TrainConfig) -> Any:
    """Return accelerate's object for the processes and the precision of a run."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    cuda, precision = torch.cuda.is_available(), choose_precision(t.precision)
    if precision == "fp16" and not cuda:
        raise InvalidValueError("train.precision=fp16 needs a CUDA GPU; use --set train.precision=bf16 or fp32")
    # accelerate shards on GPUs only, and casts norms to bf16: the sharding is ours, the same on CPUs and GPUs.
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    _join_again()
    AcceleratorState._reset_state()  # an earlier run in this process may have used another precision
    # accelerate joins CPU processes only if asked; otherwise each would consider itself the only one
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    # A static graph needs no search for unused parameters, but does not know `no_sync`, which accumulation uses.
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=t.accumulate == 1)
    accelerator = Accelerator(
        cpu=many and not cuda,
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_steps=t.accumulate,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[ddp],
    )
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        found = accelerator.distributed_type.value
        raise InvalidValueError(f"training supports one device, DDP or FSDP, got {found}; launch with --multi_gpu")
    if cuda:
        torch.set_float32_matmul_precision("high")  # TF32 where autocast leaves float32
    return accelerator


def _join_again() -> None:
    """After a restart by torchrun, join with keys of its own.

    torchrun keeps one store for all attempts, in which the addresses of the lost processes are still found.
    """
    attempt, elastic = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if attempt == "0" or elastic != "True" or dist.is_initialized():
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    store = dist.PrefixStore(f"attempt-{attempt}", shared)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=world)


def join_processes(device: str | None = None) -> tuple[str | None, bool]:
    """Join the other processes outside training. Returns this process's device, and whether it is the main process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return device, True
    from accelerate import PartialState

    _join_again()
    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
    atexit.register(state.destroy_process_group)
    return str(state.device), bool(state.is_main_process)


def finish(accelerator: Any) -> None:
    """Close the trackers. The processes stay joined until they exit: an evaluation or another run may follow, and a
    group that torchrun's store has seen cannot be made again."""
    for tracker in accelerator.trackers:
        tracker.finish()
    if accelerator.num_processes > 1:
        atexit.register(accelerator.state.destroy_process_group)


def is_sharded(t: TrainConfig) -> bool:
    """Whether the run shards its network: train.parallel=fsdp or `accelerate launch --use_fsdp`, and many processes."""
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    return (t.parallel == "fsdp" or launched) and int(os.environ.get("WORLD_SIZE", "1")) > 1


def fast_layout(net: nn.Module, sharded: bool = False) -> nn.Module:
    """Store the weights of convolutions as a GPU computes them: channels last for a U-Net.

    A network that is to be sharded stays as it is: `fully_shard` refuses parameters that are not contiguous.
    """
    parameter = next(net.parameters(), None)
    convolutional = sum(isinstance(module, nn.Conv2d) for module in net.modules()) > 8
    if parameter is not None and parameter.device.type == "cuda" and convolutional and not sharded:
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net


def compile_network(net: nn.Module, how: str) -> None:
    """Compile in place: `whole`, `blocks` or `off`.

    `blocks` compiles what repeats, so that equal blocks share a graph: seconds instead of minutes for a deep network.
    """
    if how == "whole":
        net.compile(fullgraph=True)
    elif how == "blocks":
        for block in repeated_blocks(net):
            block.compile(fullgraph=True, dynamic=False)
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # one per width of a U-Net


def repeated_blocks(net: nn.Module) -> list[nn.Module]:
    """Return the modules whose class occurs in a list of modules of the network, outermost first."""
    listed = {type(child) for m in net.modules() if isinstance(m, nn.ModuleList) for child in m}
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if type(child) in listed and list(child.children()):
                found.append(child)
            else:
                visit(child)

    visit(net)
    return found


class SharedSignal:
    """Agrees with the other processes on stopping after the same step.

    The exchange is between hosts (gloo): it does not wait for the device, and a step's flags are read one step later.
    """

    def __init__(self, world: int) -> None:
        self.world, self._pending = world, list[tuple[Any, torch.Tensor]]()
        # A main process that samples or validates for long must not look like a lost one.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if world > 1 else None

    def after_step(self, received: list[int], wait: bool = False) -> int | None:
        """Return the signal that any process had received after the step before, or with `wait` by now."""
        number = received[0] if received else 0
        if self.world == 1:
            return number or None
        flag = torch.tensor([number])
        self._pending.append((dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True), flag))
        return self.wait(keep=0 if wait else 1)

    def wait(self, keep: int = 0) -> int | None:
        """Complete all exchanges but the last `keep`."""
        number = 0
        while len(self._pending) > keep:
            work, flag = self._pending.pop(0)
            work.wait()
            number = max(number, *flag.numpy().tolist())
        return number or None
