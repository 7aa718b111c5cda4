"""The monitor does not change the run by a bit, leaves nothing behind and does not synchronize between snapshots."""

import copy
import warnings

import pytest
import torch
from loops import batch, hooks_on, small_uvit, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from scalelong import ConstantScaling, LearnableScaling, StabilityMonitor
from scalelong.errors import ScalingStateError
from scalelong.monitor.log import read_stability


class Disturbable(nn.Module):
    """Everything that a careless monitor would change: dropout, batch norm, a buffer, its own noise."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.drop = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.3)
        self.leave = nn.Linear(32, 64)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, x, t):
        h = self.drop(torch.relu(self.norm(self.enter(x.flatten(1)))))
        h = h + 0.01 * torch.randn_like(h)
        return self.leave(self.frozen(h)).view_as(x)


NETWORKS = {
    "dropout and batch norm": Disturbable,
    "U-ViT, CS": lambda: small_uvit(ConstantScaling(0.7)),
    "U-ViT, LS": lambda: small_uvit(LearnableScaling()),
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
def test_losses_weights_buffers_and_random_numbers_are_bit_for_bit_the_same(build, every):
    results = []
    for monitored in (False, True):
        torch.manual_seed(0)
        net = build()
        modes = {name: m.training for name, m in net.named_modules()}
        torch.manual_seed(1)
        monitor = StabilityMonitor(net, batch(0)[:2], every=every, ema=net) if monitored else None
        losses = train(net, 8, monitor)
        assert {name: m.training for name, m in net.named_modules()} == modes
        results.append((losses, net.state_dict(), torch.get_rng_state(), [p.grad for p in net.parameters()]))
    (losses, state, rng, grads), (losses_w, state_w, rng_w, grads_w) = results
    assert losses == losses_w
    assert all(torch.equal(state[k], state_w[k]) for k in state)
    assert torch.equal(rng, rng_w)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_w, strict=True))


def test_taking_the_first_batch_as_probe_does_not_change_losses():
    losses = []
    for monitored in (False, True):
        torch.manual_seed(0)
        net = Disturbable()
        losses.append(train(net, 6, StabilityMonitor(net, every=2) if monitored else None))
    assert losses[0] == losses[1]


def test_the_probe_uses_the_same_noise_in_every_snapshot():
    torch.manual_seed(0)
    net = Disturbable()
    monitor = StabilityMonitor(net, batch(0)[:2], every=1)
    train(net, 6, monitor, lr=0.0)
    net.norm.momentum = 0.0
    before = monitor.last["probe"]["blocks"]
    train(net, 1, monitor, lr=0.0, start=7)
    assert monitor.last["probe"]["blocks"] == pytest.approx(before, rel=0.2)
    train(net, 1, monitor, lr=0.0, start=8)
    assert monitor.last["jump"]["probe"]["blocks"] == [0.0] * 4


def test_a_network_in_eval_mode_stays_in_eval_mode():
    net = small_uvit().eval()
    monitor = StabilityMonitor(net, batch(0)[:2], every=1)
    train(net, 3, monitor)
    assert not any(m.training for m in net.modules())
    assert monitor.last["probe"]["backbone"][0] > 0


@pytest.mark.parametrize("scaling", [None, LearnableScaling()])
def test_hooks_are_attached_only_during_snapshots_and_gone_after_remove(scaling):
    net = small_uvit(scaling)
    before = hooks_on(net)
    attributes = set(vars(net))
    monitor = StabilityMonitor(net, batch(0)[:2], every=10)
    assert hooks_on(net) == before
    for step in range(1, 25):
        with monitor.step(step):
            recorded = step in (10, 19, 20)
            assert (hooks_on(net) != before) == recorded
            net(*batch(step)[:2]).square().mean().backward()
        assert hooks_on(net) == before
    monitor.remove()
    assert hooks_on(net) == before
    assert set(vars(net)) == attributes
    with monitor.step(30):
        assert hooks_on(net) == before


def test_an_error_in_the_loop_propagates_and_leaves_no_hook():
    net = small_uvit()
    monitor = StabilityMonitor(net, batch(0)[:2], every=1)
    with pytest.raises(RuntimeError, match="mine"):
        with monitor.step(1):
            raise RuntimeError("mine")
    assert hooks_on(net) == {}
    assert monitor.last is None
    train(net, 2, monitor, start=2)
    assert monitor.last["step"] == 3


class Waits(TorchDispatchMode):
    """Count operations that synchronize with a device: reading a number, or copying to the CPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        if name in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal"):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_steps_between_snapshots_neither_synchronize_nor_run_extra_operations():
    class Operations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def one(monitor, net, step):
        x, t, eps = batch(step)
        net.zero_grad()
        with monitor.step(step):
            each = (net(x, t) - eps).square().flatten(1).mean(1)
            each.mean().backward()
            monitor.note(loss=each, t=t)
        monitor.note(grad_norm=nn.utils.clip_grad_norm_(net.parameters(), 1.0))

    net = small_uvit()
    watching, off = StabilityMonitor(net, batch(0)[:2], every=10), StabilityMonitor(net, every=0)
    for step in range(1, 13):
        with Waits() as waits, Operations() as monitored:
            one(watching, net, step)
        with Operations() as plain:
            one(off, net, step)
        if step == 10:
            assert len(monitored.names) > len(plain.names)
            continue
        assert waits.count == 0
        extra = [n for n in monitored.names if "detach" not in n and "reshape" not in n and "view" not in n]
        assert extra == [n for n in plain.names if "detach" not in n and "reshape" not in n and "view" not in n]


# -------------------------------------------------------------------------- compile, checkpointing, DDP


def test_a_compiled_network_is_compiled_once_and_its_losses_do_not_change():
    from torch._dynamo.testing import CompileCounter

    losses = []
    for monitored in (False, True):
        torch._dynamo.reset()
        counter = CompileCounter()
        net = small_uvit(ConstantScaling(0.7))
        net.compile(backend=counter, fullgraph=True)
        monitor = StabilityMonitor(net, batch(0)[:2], every=2) if monitored else None
        losses.append(train(net, 8, monitor))
        assert counter.frame_count == 1
    assert losses[0] == losses[1]
    assert "train" not in monitor.last  # hooks do not see a compiled pass, and no batch was given
    assert monitor.last["probe"]["backbone"][0] > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("wrap", ["module", "function"])
def test_a_compiled_network_records_its_training_batch_if_it_is_passed(wrap):
    torch._dynamo.reset()
    plain, net = small_uvit(), small_uvit()
    if wrap == "module":
        compiled = torch.compile(net, backend="eager")
        monitor = StabilityMonitor(compiled, batch(0)[:2], every=1)
    else:  # the monitor is given the plain network, and does not know
        monitor = StabilityMonitor(net, batch(0)[:2], every=1)
        compiled = torch.compile(net, backend="eager")
    reference = StabilityMonitor(plain, batch(0)[:2], every=1)
    for step in (1, 2, 3):
        x, t, eps = batch(step)
        for each, watch in ((compiled, monitor), (plain, reference)):
            with watch.step(step, batch=(x, t)):
                (each(x, t) - eps).square().mean().backward()
    for part in ("probe", "train", "grad"):
        assert monitor.last[part] == reference.last[part]
    assert hooks_on(net) == {}
    torch._dynamo.reset()


def test_a_compiled_network_without_a_probe_raises():
    net = torch.compile(small_uvit(), backend="eager")
    monitor = StabilityMonitor(net, every=1)
    with pytest.raises(ScalingStateError, match="compiled"):
        with monitor.step(1):
            pass


def test_gradient_checkpointing_counts_no_block_twice_and_changes_no_loss():
    entries, losses = [], []
    for checkpointed in (False, True):
        net = small_uvit(LearnableScaling())
        if checkpointed:
            net.enable_gradient_checkpointing()
        monitor = StabilityMonitor(net, batch(0)[:2], every=1)
        losses.append(train(net, 3, monitor))
        entries.append(monitor.last)
    assert losses[0] == losses[1]
    assert entries[0] == entries[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_both_kinds_of_checkpointing_record_the_same(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x, t, on=False):
            h = self.first(x.flatten(1))
            h = checkpoint(self.second, h, use_reentrant=reentrant) if on else self.second(h)
            return h.view_as(x)

    torch.manual_seed(0)
    net = Net()
    entries = []
    for on in (False, True):
        monitor = StabilityMonitor(net, batch(0)[:2], every=1)
        train(net, 1, monitor, lr=0.0, call=lambda net, x, t, on=on: net(x, t, on))
        entries.append(monitor.last)
    assert entries[0]["train"] == entries[1]["train"]


def test_a_network_can_be_copied_during_a_snapshot():
    net = small_uvit()
    x, t, eps = batch(1)
    monitor = StabilityMonitor(net, batch(0)[:2], every=1)
    with monitor.step(1):
        (net(x, t) - eps).square().mean().backward()
        twin = copy.deepcopy(net)
        block = copy.deepcopy(net.mid_block)
        assert torch.equal(twin(x, t), net.eval()(x, t))
        block(torch.randn(2, 5, block.norm1.weight.shape[0]))
    assert monitor.last["train"]["n"] == 2 * len(x)  # its own two passes, not the copy's
    seen = copy.deepcopy(monitor.last)
    twin(x, t)
    assert monitor.last == seen


def test_two_monitors_ignore_each_other():
    net = small_uvit()
    x, t, eps = batch(1)
    monitors = [StabilityMonitor(net, batch(0)[:2], every=1) for _ in range(2)]
    with monitors[0].step(1), monitors[1].step(1):
        (net(x, t) - eps).square().mean().backward()
    assert monitors[0].last == monitors[1].last
    assert monitors[0].last["train"]["n"] == len(x)


def test_accumulated_parts_count_as_one_batch():
    net = small_uvit()
    x, t, eps = batch(1, n=8)
    entries = []
    for parts in (1, 4):
        net.zero_grad()
        monitor = StabilityMonitor(net, batch(0)[:2], every=1)
        with monitor.step(1):
            for x_k, t_k, e_k in zip(x.chunk(parts), t.chunk(parts), eps.chunk(parts), strict=True):
                each = (net(x_k, t_k) - e_k).square().flatten(1).mean(1)
                (each.mean() / parts).backward()
                monitor.note(loss=each, t=t_k)
        entries.append(monitor.last)
    assert entries[1]["train"]["backbone"] == pytest.approx(entries[0]["train"]["backbone"], rel=1e-4)
    assert entries[1]["grad"]["total"] == pytest.approx(entries[0]["grad"]["total"], rel=1e-4)
    assert entries[1]["train"]["n"] == entries[0]["train"]["n"] == 8
    assert entries[1]["loss"]["mean"] == pytest.approx(entries[0]["loss"]["mean"], rel=1e-4)
    assert entries[1]["loss"]["steps"] == 1


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_is_unwrapped(process_group):
    plain, net = small_uvit(), small_uvit()
    wrapped = nn.parallel.DistributedDataParallel(net)
    probe = batch(0)[:2]
    reference, monitor = StabilityMonitor(plain, probe, every=1), StabilityMonitor(wrapped, probe, every=1)
    assert train(wrapped, 3, monitor) == train(plain, 3, reference)
    assert monitor.points == reference.points
    assert monitor.last == reference.last
    assert hooks_on(net) == {}


def test_only_the_first_process_records(process_group, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *a: 1)
    net = small_uvit()
    monitor = StabilityMonitor(net, batch(0)[:2], every=1, out=tmp_path / "s.jsonl")
    train(net, 3, monitor)
    assert monitor.last is None
    assert not (tmp_path / "s.jsonl").exists()


def test_data_parallel_is_unwrapped():
    plain, net = small_uvit(), small_uvit()
    probe = batch(0)[:2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = nn.DataParallel(net)
    reference, monitor = StabilityMonitor(plain, probe, every=1), StabilityMonitor(wrapped, probe, every=1)
    train(plain, 2, reference)
    train(wrapped, 2, monitor)
    assert monitor.last == reference.last


def test_fsdp_raises():
    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(ScalingStateError, match="FSDP"):
        StabilityMonitor(FullyShardedDataParallel())


# ---------------------------------------------------------------------------------------- mixed precision


def test_the_probe_uses_training_s_mixed_precision_and_leaves_its_cache_clean():
    """A snapshot inside an autocast region must not leave weights without gradients in its cache."""
    results = []
    for monitored in (False, True):
        net = small_uvit()
        monitor = StabilityMonitor(net, batch(0)[:2], every=1 if monitored else 0)
        grads = []
        with torch.autocast("cpu", torch.bfloat16):
            for step in (1, 2):  # without leaving the region
                x, t, eps = batch(step)
                net.zero_grad()
                with monitor.step(step):
                    (net(x, t) - eps).float().square().mean().backward()
                    torch.clear_autocast_cache()  # so that the snapshot would be the first to fill it
                grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        results.append(grads)
    for plain, seen in zip(*results, strict=True):
        assert len(plain) == len(seen) > 0
        assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    full = StabilityMonitor(copy.deepcopy(net), batch(0)[:2], every=1)
    train(full.root, 1, full, start=2, lr=0.0)
    assert monitor.last["probe"]["backbone"] == pytest.approx(full.last["probe"]["backbone"], rel=0.02)
    assert monitor.last["probe"]["backbone"] != full.last["probe"]["backbone"]  # bfloat16 was in force


def test_autocast_around_the_call_alone_is_used_for_the_probe():
    net = small_uvit()
    monitor = StabilityMonitor(net, batch(0)[:2], every=1)

    def cast(net, x, t):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x, t).float()

    train(net, 1, monitor, call=cast, lr=0.0)
    plain = StabilityMonitor(net, batch(0)[:2], every=1)
    train(net, 1, plain, lr=0.0)
    assert monitor.last["probe"]["skip"] != plain.last["probe"]["skip"]
    assert monitor.last["probe"]["skip"] == pytest.approx(plain.last["probe"]["skip"], rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_networks_of_other_precisions_are_recorded(dtype):
    net = small_uvit().to(dtype)
    x, t, eps = batch(1)
    monitor = StabilityMonitor(net, (x.to(dtype), t), every=1)
    with monitor.step(1):
        (net(x.to(dtype), t) - eps.to(dtype)).square().mean().backward()
    assert monitor.last["probe"]["backbone"][0] > 0
    assert monitor.last["grad"]["total"] > 0


# --------------------------------------------------------------------------------- through `train` itself


def tiny(**settings):
    from scalelong.runs.config import override
    from scalelong.training.presets import preset

    small = {
        "model.embed_dim": 16, "model.depth": 4, "model.num_heads": 2, "train.batch_size": 8, "train.steps": 8,
        "train.warmup": 2, "train.log_every": 1, "checkpoint.every": 4, "validate.every": 0, "validate.n": 16,
        "sample.n": 0, "monitor.every": 2,
    }  # fmt: skip
    return override(
        preset("digits-uvit"), {**small, **{key.replace("__", "."): value for key, value in settings.items()}}
    )


def metrics(folder):
    import json

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.mark.parametrize("settings", [{}, {"train__precision": "bf16"}, {"train__accumulate": 2}], ids=str)
def test_train_gives_the_same_metrics_with_and_without_the_monitor(tmp_path, settings):
    from scalelong.training.loop import train as run

    run(tiny(**settings, monitor__every=0), tmp_path / "plain", quiet=True)
    run(tiny(**settings), tmp_path / "monitored", quiet=True)
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "monitored")
    assert not (tmp_path / "plain" / "stability.jsonl").exists()
    log = read_stability(tmp_path / "monitored" / "stability.jsonl")
    assert [e["step"] for e in log.entries] == [2, 4, 6, 8]
    seen = {line["step"]: line for line in metrics(tmp_path / "monitored")}
    for entry in log.entries:
        assert entry["grad"]["total"] == pytest.approx(seen[entry["step"]]["grad_norm"], rel=2e-4)
    mean = sum(seen[s]["loss"] for s in (7, 8)) / 2
    assert log.entries[-1]["loss"]["mean"] == pytest.approx(mean, rel=2e-4)
    assert log.entries[-1]["drift"]["total"] > 0
    assert log.header["times"] == [0.0, 0.25, 0.5, 0.75, 1.0]  # the process's own time


def test_a_resumed_run_writes_the_same_snapshots(tmp_path):
    from scalelong.training.loop import train as run

    run(tiny(), tmp_path / "whole", quiet=True)
    run(tiny(train__steps=4), tmp_path / "parts", quiet=True)
    run(tiny(), tmp_path / "parts", quiet=True)
    whole, parts = ((tmp_path / name / "stability.jsonl").read_text() for name in ("whole", "parts"))
    assert whole == parts


def test_a_compiled_run_is_recorded(tmp_path, monkeypatch):
    torch._dynamo.reset()
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **k: compiled(self, **{**k, "backend": "eager"}))
    from scalelong.training.loop import train as run

    few = 4  # so that the monitor runs the whole batch again
    run(tiny(train__compile=True, train__batch_size=few), tmp_path / "compiled", quiet=True)
    run(tiny(train__batch_size=few), tmp_path / "eager", quiet=True)
    seen, plain = (read_stability(tmp_path / n / "stability.jsonl").entries[-1] for n in ("compiled", "eager"))
    assert seen["probe"]["backbone"] == pytest.approx(plain["probe"]["backbone"], rel=1e-3)
    assert seen["train"]["n"] == plain["train"]["n"] == few
    assert seen["train"]["backbone"] == pytest.approx(plain["train"]["backbone"], rel=1e-3)
    torch._dynamo.reset()
