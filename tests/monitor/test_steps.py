"""The monitor attached to an optimizer: a loop that knows nothing of it."""

import copy
import pickle

import torch
from accelerate import Accelerator
from torch import nn

import scalelong
from scalelong._modules import evaluating


def make():
    torch.manual_seed(0)
    net = scalelong.UViT(img_size=8, in_chans=1, embed_dim=16, depth=2, num_heads=2)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(net, optimizer, steps=4):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = (net(torch.randn(4, 1, 8, 8), torch.rand(4) * 999) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():  # sampling and validation between steps are not training
            net(torch.randn(9, 1, 8, 8), 5)
        losses.append(loss.item())
    return losses


def test_an_attached_monitor_records_what_the_with_block_records():
    attached, optimizer = make()
    watch = scalelong.StabilityMonitor(attached, every=1).attach(optimizer)
    train(attached, optimizer)
    wrapped, optimizer = make()
    other = scalelong.StabilityMonitor(wrapped, every=1)
    torch.manual_seed(1)
    for step in range(1, 5):
        optimizer.zero_grad()
        with other.step(step):
            (wrapped(torch.randn(4, 1, 8, 8), torch.rand(4) * 999) - 1).square().mean().backward()
        optimizer.step()
        torch.randn(9, 1, 8, 8)
    assert watch.last["step"] == 4
    assert watch.last["train"] == other.last["train"]
    assert watch.last["grad"]["total"] == other.last["grad"]["total"]


def test_losses_are_bit_for_bit_those_without_it_and_remove_leaves_nothing():
    net, optimizer = make()
    plain = train(net, optimizer)
    net, optimizer = make()
    watch = scalelong.StabilityMonitor(net, every=2).attach(optimizer)
    assert train(net, optimizer) == plain
    watch.remove()
    assert not net._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_copies_and_pickles_of_the_network_are_not_recorded():
    net, optimizer = make()
    watch = scalelong.StabilityMonitor(net, every=1).attach(optimizer)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other.train()(torch.randn(2, 1, 8, 8), 5)
    assert watch.last is None
    train(net, optimizer, 1)
    assert watch.last["step"] == 1


def test_a_resumed_run_counts_on():
    net, optimizer = make()
    watch = scalelong.StabilityMonitor(net, every=5).attach(optimizer, first=9)
    train(net, optimizer, 3)
    assert watch.last["step"] == 10


class Adding(nn.Module):
    """Joins its skips in its own `forward`, which no hook on a submodule shows."""

    def __init__(self):
        super().__init__()
        self.stem, self.down, self.low = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        one = self.stem(x)
        two = self.down(one).relu()
        h = nn.functional.interpolate(self.low(two), scale_factor=2.0) + two
        return self.head(nn.functional.interpolate(h.relu(), scale_factor=2.0) + one)


def adding():
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    net = scalelong.apply(Adding(), scalelong.ConstantScaling(0.5), example=(x,))
    return net, torch.optim.SGD(net.parameters(), lr=0.0), x


def test_joins_of_the_networks_own_forward_are_recorded_from_the_first_step():
    """Before and after κ_i, as within `with watch.step(…)`."""
    net, optimizer, x = adding()
    watch = scalelong.StabilityMonitor(net, every=1).attach(optimizer)
    for _ in range(2):
        net(x).mean().backward()
        optimizer.step()
    other, _, _ = adding()
    wrapped = scalelong.StabilityMonitor(other, every=1)
    with wrapped.step(1):
        other(x).mean().backward()
    assert watch.last["train"] == wrapped.last["train"]
    assert None not in watch.last["train"]["ratio"]


def test_validation_between_accumulated_batches_is_not_recorded():
    norms = []
    for validates in (False, True):
        net, optimizer, x = adding()
        watch = scalelong.StabilityMonitor(net, every=1).attach(optimizer)
        net(x).mean().backward()
        if validates:
            with torch.no_grad(), evaluating(net):
                net(100 * torch.randn(64, 3, 16, 16))
        net(x).mean().backward()
        optimizer.step()
        norms.append(watch.last["train"])
    assert norms[0] == norms[1]
    assert norms[0]["n"] == 8


def with_closure(net, optimizer, steps):
    torch.manual_seed(1)
    for _ in range(steps):
        x, t = torch.randn(4, 1, 8, 8), torch.rand(4) * 999

        def closure(x=x, t=t):
            optimizer.zero_grad()
            loss = (net(x, t) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        torch.randn(9, 1, 8, 8)  # as `train` does


def test_a_step_with_a_closure_is_recorded_as_one_without():
    entries = []
    for run in (train, with_closure):
        net, optimizer = make()
        watch = scalelong.StabilityMonitor(net, every=1).attach(optimizer)
        run(net, optimizer, 3)
        entries.append(watch.last)
    assert entries[0]["step"] == 3
    assert entries[0] == entries[1]


def test_a_line_search_is_one_step_at_the_weights_before_it():
    net, _ = make()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    before = copy.deepcopy(net)
    watch = scalelong.StabilityMonitor(net, every=1).attach(optimizer)
    with_closure(net, optimizer, 1)
    first = watch.last
    assert (first["step"], first["train"]["n"]) == (1, 4)
    wrapped = scalelong.StabilityMonitor(before, every=1)
    with wrapped.step(1):
        torch.manual_seed(1)
        (before(torch.randn(4, 1, 8, 8), torch.rand(4) * 999) - 1).square().mean().backward()
    assert first["train"] == wrapped.last["train"]
    assert first["grad"] == wrapped.last["grad"]
    with_closure(net, optimizer, 2)
    assert watch.last["step"] == 3


def test_a_compiled_network_has_its_gradients_and_probe_recorded():
    net, optimizer = make()
    x = torch.randn(2, 1, 8, 8), torch.tensor([10.0, 20.0])
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    watch = scalelong.StabilityMonitor(compiled, probe=x, every=1).attach(optimizer)
    for _ in range(2):
        compiled(*x).square().mean().backward()
        optimizer.step()
    assert (watch.last["step"], watch.last["grad"]["total"] > 0, "probe" in watch.last) == (2, True, True)


def test_an_optimizer_that_accelerate_prepared():
    net, optimizer = make()
    net, optimizer = Accelerator(cpu=True).prepare(net, optimizer)
    watch = scalelong.StabilityMonitor(net, every=1).attach(optimizer)
    train(net, optimizer, steps=2)
    assert watch.last["step"] == 2
