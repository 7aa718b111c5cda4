"""Devices and layouts: decisions for CUDA and MPS, on tensors without data."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scalelong.errors import InvalidValueError
from scalelong.training import parallel
from scalelong.training.examples import Batch, Examples
from scalelong.training.trainer import Trainer
from tiny_runs import tiny_config


@pytest.mark.parametrize(("sharded", "layout"), [(False, torch.channels_last), (True, torch.contiguous_format)])
def test_a_u_net_on_cuda_is_channels_last_unless_it_is_sharded(sharded, layout):
    """`fully_shard` refuses parameters that are not contiguous."""

    class OnCuda(nn.Sequential):
        def parameters(self, recurse=True):
            yield SimpleNamespace(device=torch.device("cuda"))

    net = parallel.fast_layout(OnCuda(*[nn.Conv2d(4, 4, 3) for _ in range(9)]), sharded)
    assert all(module.weight.is_contiguous(memory_format=layout) for module in net)


def test_a_sharded_network_is_not_compiled_as_one_graph(monkeypatch):
    monkeypatch.setattr(parallel, "is_sharded", lambda train: True)
    config = tiny_config(train__compile="whole", train__parallel="fsdp")
    with pytest.raises(InvalidValueError, match=r"train\.compile must be blocks or off with FSDP.*'whole'"):
        Trainer(config, Examples(config, "train"))


@pytest.mark.parametrize(("device", "non_blocking"), [("cuda", True), ("mps", False), ("cpu", False)])
def test_only_cuda_receives_a_batch_without_blocking(device, non_blocking):
    class Sent:
        def to(self, device, non_blocking=False):
            return device.type, non_blocking

    batch = Batch(x_0=Sent(), t=Sent(), eps=Sent()).to(torch.device(device))
    assert {batch.x_0, batch.t, batch.eps} == {(device, non_blocking)}
    assert batch.y is None


def test_the_validation_loss_needs_no_float64_on_the_device(monkeypatch):
    class OnMps(torch.Tensor):
        def double(self):
            raise TypeError("MPS has no float64")

        def cpu(self):
            return self.as_subclass(torch.Tensor)

    config = tiny_config()
    trainer, held_out = Trainer(config, Examples(config, "train")), Examples(config, "validation")
    expected, losses = trainer.validation_loss(held_out, 16), trainer.losses
    monkeypatch.setattr(trainer, "losses", lambda *args: losses(*args).as_subclass(OnMps))
    assert trainer.validation_loss(held_out, 16) == expected
