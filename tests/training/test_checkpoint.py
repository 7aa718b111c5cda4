"""Optimizer state that a checkpoint restores: on the device and in the layout that the optimizer's kernels expect."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scalelong.training.checkpoint import _on_host, optimizer_tensors, restore_optimizer


class Copies(TorchDispatchMode):
    """Records whether copies block."""

    def __init__(self):
        super().__init__()
        self.non_blocking = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("aten.copy_"):
            self.non_blocking.append(bool(args[2]) if len(args) > 2 else False)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("setting", "device"), [("fused", "meta"), ("capturable", "meta"), ("foreach", "cpu")], ids=lambda v: v
)
def test_the_step_counter_follows_the_parameters_where_a_kernel_reads_it(setting, device):
    """As in torch's `load_state_dict`: fused AdamW on CUDA refuses a counter on the CPU."""
    net = nn.Linear(2, 1, device="meta")
    optimizer = torch.optim.AdamW(net.parameters())
    for group in optimizer.param_groups:
        group[setting] = True
    restore_optimizer(optimizer, net, {"step/weight": torch.tensor(3.0), "exp_avg/weight": torch.zeros(1, 2)}, [])
    state = optimizer.state[net.weight]
    assert state["step"].device.type == device
    assert state["step"].dtype == torch.float32
    assert state["exp_avg"].device.type == "meta"


def channels_last():
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)


def steps(net, optimizer, numbers):
    for number in numbers:
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def test_a_channels_last_network_resumes_bit_for_bit():
    whole, optimizer = channels_last()
    steps(whole, optimizer, range(6))
    first, before = channels_last()
    steps(first, before, range(3))
    second, after = channels_last()
    second.load_state_dict(first.state_dict())
    stored = {name: value.contiguous() for name, value in optimizer_tensors(before, first).items()}  # as in a file
    restore_optimizer(after, second, stored, [])
    assert after.state[second.weight]["exp_avg"].stride() == second.weight.stride()
    steps(second, after, range(3, 6))
    assert torch.equal(second.weight, whole.weight)


def test_copies_to_the_host_block_unless_cuda_orders_them():
    with Copies() as copies:
        copied = _on_host({"weight": torch.ones(2)})
    assert copied["weight"].tolist() == [1, 1]
    assert copies.non_blocking == [False]
