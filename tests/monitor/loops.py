"""Small training loops with a monitor, shared by its tests."""

import torch
from torch import nn

from scalelong import StabilityMonitor, UViT


def small_uvit(scaling=None, seed=0, **sizes):
    torch.manual_seed(seed)
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 6, "num_heads": 2, "init_std": 0.1, **sizes}
    return UViT(**sizes, in_chans=1, scaling=scaling)


def batch(step, n=6, size=8):
    """Return (x_t, t, eps), a function of the step."""
    g = torch.Generator().manual_seed(1000 + step)
    t = torch.rand(n, generator=g) * 999
    return torch.randn(n, 1, size, size, generator=g), t, torch.randn(n, 1, size, size, generator=g)


def call(net, x, t):
    out = net(x, t)
    return out if isinstance(out, torch.Tensor) else out[0]


def train(net, steps, monitor=None, lr=1e-2, start=1, call=call, after=None, clip=1.0):
    """Train with SGD and return the losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr)
    losses = []
    for step in range(start, start + steps):
        x, t, eps = batch(step)
        optimizer.zero_grad()
        with monitor.step(step) if monitor else torch.enable_grad():
            each = (call(net, x, t) - eps).square().flatten(1).mean(1)
            each.mean().backward()
            if monitor:
                monitor.note(loss=each, t=t)
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
        if monitor:
            monitor.note(grad_norm=norm)
        if after:
            after(step, each.detach().clone(), norm)
        optimizer.step()
        losses.append(each.mean().item())
    return losses


def monitored_run(net, steps, every=2, **options):
    """Return (monitor, losses) of a run whose window holds all snapshots."""
    options = {"probe": batch(0, n=8)[:2], "window": 500, **options}
    monitor = StabilityMonitor(net, every=every, **options)
    return monitor, train(net, steps, monitor)


def hooks_on(net):
    """Return the number of hooks by module."""
    return {
        name: [len(h) for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)]
        for name, m in net.named_modules()
        if any((m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks))
    }
