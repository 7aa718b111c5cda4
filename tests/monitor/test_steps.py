"""The monitor attached to an optimizer: a loop that knows nothing of it."""

import copy
import pickle

import torch

import scalelong


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
