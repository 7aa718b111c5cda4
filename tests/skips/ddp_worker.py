"""Two gloo processes that train scaled networks side by side, held against one process with both batches."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

STEPS = 3


def run_two_processes(names: list[str], folder: Path, scaling: Any = None) -> None:
    """Train every network on two processes with a batch each, and shard one; fails where a process does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = Path(__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]), "OMP_NUM_THREADS": "1"}
    if scaling is not None:  # instead of LS
        environment["SCALING"] = json.dumps(scaling.to_dict())
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    logs = [folder / f"rank{rank}.log" for rank in (0, 1)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            command = [sys.executable, __file__, *names, str(folder)]
            processes.append(
                subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=file, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)


def _scaling() -> Any:
    import scalelong

    return json.loads(os.environ.get("SCALING", "null")) or scalelong.LearnableScaling(activation="elu")


def _train(net: nn.Module, name: str, ranks: list[int]) -> list[torch.Tensor]:
    """A few steps of SGD on the mean loss of the batches of `ranks`: the example, moved a little for each."""
    from skip_networks import example

    call = example(name)
    first, *others = call.args
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            output = net(first + rank, *others, **call.kwargs)
            while not isinstance(output, torch.Tensor):
                output = output[0]
            (output.square().mean() / len(ranks)).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def _check(name: str, rank: int) -> None:
    from skip_networks import make
    from torch.nn.parallel import DistributedDataParallel

    import scalelong

    torch.manual_seed(0)
    net, alone = (scalelong.apply(make(name).train(), _scaling()) for _ in range(2))
    alone.load_state_dict(net.state_dict())
    for module in (*net.modules(), *alone.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the processes draw masks of their own
    start = [p.detach().clone() for p in scalelong.parameters(net)]

    wrapped = DistributedDataParallel(net)
    together = _train(wrapped, name, [rank])
    whole = _train(alone, name, [0, 1])
    for a, b in zip(together, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=lambda text: f"{name}: {text}")
    for parameter, before in zip(scalelong.parameters(wrapped), start, strict=True):
        assert not torch.equal(parameter, before), "LS did not train"
        other = [torch.empty_like(parameter.data) for _ in range(2)]
        torch.distributed.all_gather(other, parameter.data)
        assert torch.equal(*other), "the processes' LS weights drifted apart"


def _check_sharded(name: str, decoder: str, folder: str) -> None:
    """FSDP: each decoder block is a unit of its own, the scaling belongs to the root's."""
    from skip_networks import make, run
    from torch.distributed.fsdp import fully_shard

    import scalelong

    net, alone = (scalelong.apply(make(name).train(), _scaling()) for _ in range(2))
    alone.load_state_dict(net.state_dict())
    run(alone, name).square().mean().backward()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for block in net.get_submodule(decoder):
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    run(net, name).square().mean().backward()
    for sharded, whole in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, rtol=1e-3, atol=1e-5)
    with pytest.raises(scalelong.ScaleLongError, match="wrapped by FSDP"):
        scalelong.remove(net)
    if torch.distributed.get_rank() == 0:  # alone: an error, not a hang
        with pytest.raises(scalelong.ScaleLongError, match="not on rank 0 alone"):
            scalelong.save_scaling(net, folder, timeout=1.0)
    torch.distributed.barrier()
    scalelong.save_scaling(net, folder)
    again = scalelong.load_scaling(make(name), folder)
    torch.testing.assert_close(run(again, name), run(alone, name))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    *names, out = sys.argv[1:]
    for each in names:
        _check(each, torch.distributed.get_rank())
    _check_sharded("guided-diffusion", "output_blocks", f"{out}/rank{torch.distributed.get_rank()}")
    torch.distributed.destroy_process_group()
