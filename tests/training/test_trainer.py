"""One step: a function of (config, step), equal to a plain PyTorch loop with AdamW and an EMA by name."""

import math

import pytest
import torch
from accelerate import Accelerator

from scalelong import LearnableScaling
from scalelong.errors import InvalidValueError, NonFiniteError
from scalelong.runs.run import Run
from scalelong.training import parallel
from scalelong.training.examples import Examples
from scalelong.training.loop import train
from scalelong.training.trainer import Trainer
from scalelong.training.update import Ema
from tiny_runs import losses, tiny_config


def make_trainer(**settings):
    config = tiny_config(**settings)
    return Trainer(config, Examples(config, "train"))


def snapshot(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def unchanged(net, before):
    return all(torch.equal(before[name], value) for name, value in net.state_dict().items())


# ------------------------------------------------------------------------------------------- batches


def test_initial_weights_depend_on_the_seed_and_not_on_the_scaling():
    plain, scaled, other = make_trainer(), make_trainer(scaling=LearnableScaling()), make_trainer(seed=1)
    for name, value in plain.net.state_dict().items():
        assert torch.equal(scaled.net.state_dict()[name], value)
    assert not torch.equal(plain.net.pos_embed, other.net.pos_embed)


def test_noise_depends_on_seed_and_step_and_not_on_the_scaling():
    plain, scaled, other = make_trainer(), make_trainer(scaling=LearnableScaling()), make_trainer(seed=1)
    assert torch.equal(plain.batch(3).eps, scaled.batch(3).eps)
    assert not torch.equal(plain.batch(3).eps, plain.batch(4).eps)
    assert not torch.equal(plain.batch(3).eps, other.batch(3).eps)


def test_extra_noise_of_the_given_variance_reaches_the_network_and_not_the_target():
    plain, noisy = make_trainer(), make_trainer(data__extra_noise=0.25)
    batch = noisy.batch(3)
    assert torch.equal(batch.eps, plain.batch(3).eps)
    assert batch.extra.var().item() == pytest.approx(0.25, rel=0.2)  # 8 × 64 values
    process = noisy.examples.process
    x_t = process.add_noise(batch.x_0, batch.eps, batch.t) + batch.extra
    expected = (noisy.net(x_t, 999 * batch.t) - batch.eps).square().flatten(1).mean(1)
    torch.testing.assert_close(noisy.losses(batch), expected)
    assert plain.batch(3).extra is None
    assert noisy.examples.probe(4).extra is None  # validation and the monitor see no extra noise


def test_every_image_is_used_once_per_epoch():
    config = tiny_config(train__batch_size=100)
    examples = Examples(config, "train")
    seen = torch.cat([examples._order(start, 100) for start in range(0, 1400, 100)] + [examples._order(1400, 97)])
    assert sorted(seen.tolist()) == list(range(1497))
    across = examples._order(1490, 20)
    assert torch.equal(across[:7], examples._order(1490, 7))
    assert torch.equal(across[7:], examples._order(1497, 13))


# -------------------------------------------------------------------------------------- the optimizer


def test_a_step_equals_a_plain_pytorch_loop():
    trainer, twin = make_trainer(train__steps=3), make_trainer(train__steps=3)
    optimizer = torch.optim.AdamW(twin.net.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    for step in (1, 2, 3):
        batch = twin.examples.batch(step, 0, 8)
        alpha_bar = torch.exp(-0.1 * batch.t.double() - 0.5 * 19.9 * batch.t.double() ** 2)[:, None, None, None]
        x_t = (alpha_bar.sqrt() * batch.x_0 + (1 - alpha_bar).sqrt() * batch.eps).float()
        loss = (twin.net(x_t, 999 * batch.t) - batch.eps).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.net.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, step / 2)
        optimizer.step()
        outcome = trainer.step()
        assert outcome.loss == pytest.approx(loss.item(), rel=1e-5)
        assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_the_optimizer_follows_the_formula_of_adamw():
    """Decoupled weight decay and bias-corrected moments (Loshchilov & Hutter, Algorithm 2), in float64 by hand."""
    trainer = make_trainer(train__weight_decay=0.1, train__betas="0.9,0.95")
    gradients = {}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: p.grad.double() for name, p in trainer.net.named_parameters()})
    )
    expected = {name: p.detach().double() for name, p in trainer.net.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(1, 6):
        lr = trainer.step().lr
        for name, g in gradients.items():
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            m_hat, v_hat = first[name] / (1 - 0.9**step), second[name] / (1 - 0.95**step)
            expected[name] = expected[name] * (1 - lr * 0.1) - lr * m_hat / (v_hat.sqrt() + 1e-8)
    for name, p in trainer.net.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name], atol=2e-6, rtol=1e-4)


def test_backward_through_weights_that_a_step_has_changed_raises():
    """The optimizer's in-place updates are visible to autograd, which refuses a stale graph."""
    trainer = make_trainer()
    loss = trainer.losses(trainer.batch(1)).mean()
    loss.backward(retain_graph=True)
    trainer.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_of_the_optimizer_run_once_per_step():
    trainer, calls = make_trainer(), []
    trainer.optimizer.register_step_post_hook(lambda *_: calls.append(trainer.progress.step))
    trainer.step()
    trainer.step()
    assert calls == [0, 1]


def test_accumulated_parts_make_the_same_step(tmp_path, finished):
    train(tiny_config(train__accumulate=4), tmp_path / "parts", quiet=True)
    for (_, a, g), (_, b, h) in zip(losses(finished), losses(tmp_path / "parts"), strict=True):
        assert b == pytest.approx(a, abs=1e-5)
        assert h == pytest.approx(g, rel=1e-3)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(InvalidValueError, match="train.batch_size.*1 process.*3 accumulation.*8"):
        make_trainer(train__accumulate=3)


# ------------------------------------------------------------------------------------------------ EMA


def test_the_ema_averages_by_name_and_shares_nothing_with_the_network():
    trainer = make_trainer(scaling=LearnableScaling(), ema__decay=0.75, ema__warmup=False)
    expected = {k: v.clone().double() for k, v in trainer.net.named_parameters()}
    for _ in range(4):
        trainer.step()
        for name, value in trainer.net.named_parameters():
            expected[name] = 0.75 * expected[name] + 0.25 * value.detach().double()
    for name, value in trainer.ema.net.named_parameters():
        torch.testing.assert_close(value.double(), expected[name], atol=1e-6, rtol=1e-5)
    assert trainer.ema.net.skip_scaling is not trainer.net.skip_scaling


def test_the_ema_follows_a_network_whose_parameters_moved_to_other_memory(monkeypatch):
    """accelerate calls the device of several CPU processes cpu:0, and `.to("cpu:0")` copies."""
    monkeypatch.setattr(Accelerator, "prepare", lambda self, net, optimizer: (moved(net), optimizer))
    trainer = make_trainer(ema__decay=0.75, ema__warmup=False)
    before = snapshot(trainer.net)
    trainer.step()
    for name, value in trainer.ema.net.named_parameters():
        assert torch.allclose(value, 0.75 * before[name] + 0.25 * trainer.net.get_parameter(name), atol=1e-7)
        assert not torch.equal(value, before[name])


def moved(net):
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data = tensor.data.clone()
    return net


def test_the_ema_copies_buffers():
    net = torch.nn.BatchNorm1d(2)
    ema = Ema(net, 0.9)
    net(torch.randn(8, 2) + 5)
    ema.update(1)
    assert torch.equal(ema.net.running_mean, net.running_mean)
    assert ema.net.num_batches_tracked == 1


def test_the_warm_up_of_the_ema_depends_on_the_number_of_updates_alone():
    ema = Ema(torch.nn.Linear(1, 1), 0.99, warmup=True)
    assert [ema.decay_at(u) for u in (1, 2, 890, 10_000)] == [2 / 11, 3 / 12, 0.99, 0.99]
    assert Ema(torch.nn.Linear(1, 1), 0.99).decay_at(1) == 0.99


# ------------------------------------------------------------------------------------------ precision


def test_bf16_stays_close_to_fp32(tmp_path, finished):
    train(tiny_config(train__precision="bf16"), tmp_path / "run", quiet=True)
    for (_, a, _), (_, b, _) in zip(losses(finished), losses(tmp_path / "run"), strict=True):
        assert b == pytest.approx(a, rel=0.05)


def test_fp16_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidValueError, match="train.precision=fp16.*CUDA"):
        make_trainer(train__precision="fp16")


def test_gradient_checkpointing_does_not_change_a_loss(tmp_path, finished):
    train(tiny_config(train__gradient_checkpointing=True), tmp_path / "run", quiet=True)
    assert [a for _, a, _ in losses(tmp_path / "run")] == pytest.approx([a for _, a, _ in losses(finished)], rel=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch's own tracing
@pytest.mark.parametrize(
    ("settings", "graphs"),
    [
        ({"train__compile": "blocks"}, 2),  # a block of the encoder or the middle, and one of the decoder
        ({"train__compile": "whole"}, 1),
        ({"train__compile": "blocks", "name": "digits"}, None),  # one graph per width and kind of block
    ],
    ids=str,
)
def test_a_compiled_network_trains_as_the_eager_one_and_is_compiled_once(tmp_path, monkeypatch, settings, graphs):
    """No graph breaks, and sampling, validation and the monitor compile nothing again.

    The backend generates no C++, which would need a compiler that fits torch.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, compile_module = CompileCounterWithBackend("aot_eager"), torch.nn.Module.compile
    counts = []

    def compile_without_code(module, **options):
        assert options["fullgraph"]  # a graph break raises
        compile_module(module, backend=counter, **options)

    step = Trainer.step
    monkeypatch.setattr(torch.nn.Module, "compile", compile_without_code)
    monkeypatch.setattr(Trainer, "step", lambda self: (step(self), counts.append(counter.frame_count))[0])
    often = {"validate__every": 2, "sample__every": 2, "sample__n": 4, "sample__steps": 2, "monitor__every": 2}
    train(tiny_config(**settings, **often), tmp_path / "run", quiet=True)
    train(tiny_config(**{**settings, "train__compile": "off"}), tmp_path / "eager", quiet=True)
    assert counts[0] > 0
    assert len(set(counts)) == 1
    assert graphs is None or counts[0] == graphs
    mine, eager = ([a for _, a, _ in losses(tmp_path / name)] for name in ("run", "eager"))
    assert mine == pytest.approx(eager, rel=1e-4)


@pytest.mark.parametrize(("value", "mode"), [("true", "whole"), (True, "whole"), (False, "off"), ("blocks", "blocks")])
def test_compile_still_accepts_true_and_false(value, mode):
    assert tiny_config(train__compile=value).train.compile == mode


def test_an_automatic_precision_is_kept_when_the_run_resumes_elsewhere(tmp_path, monkeypatch):
    train(tiny_config(train__steps=2), tmp_path / "run", quiet=True)
    assert Run(tmp_path / "run").config.train.precision == "fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert parallel.choose_precision("auto") == "bf16"
    assert parallel.choose_precision("fp16") == "fp16"
    monkeypatch.undo()
    train(tiny_config(train__steps=3), tmp_path / "run", quiet=True)
    assert Run(tmp_path / "run").config.train.precision == "fp32"


# ----------------------------------------------------------------------------------------- non-finite


def poison(trainer, path="mid_block.mlp.fc2"):
    module = trainer.net.get_submodule(path)
    return module.register_forward_hook(lambda m, a, out: out * float("nan"))


def test_a_non_finite_loss_stops_names_the_module_and_keeps_the_weights():
    trainer = make_trainer()
    trainer.step()
    before = snapshot(trainer.net)
    poison(trainer)
    with pytest.raises(NonFiniteError, match=r"loss.* step 2 .*mid_block\.mlp.*timesteps in the batch: 0\.\d+ to"):
        trainer.step()
    assert unchanged(trainer.net, before)
    assert trainer.progress.step == 1


def test_a_skipped_step_advances_neither_schedule_nor_ema_nor_weights():
    trainer = make_trainer(train__nonfinite="skip")
    trainer.step()
    net, ema = snapshot(trainer.net), snapshot(trainer.ema.net)
    handle = poison(trainer)
    outcome = trainer.step()
    handle.remove()
    assert outcome.skipped
    assert math.isnan(outcome.loss)
    assert unchanged(trainer.net, net)
    assert unchanged(trainer.ema.net, ema)
    assert (trainer.progress.step, trainer.progress.updates) == (2, 1)
    assert trainer.step().lr == trainer.config.train.lr  # the second update of a warm-up of two


def test_a_run_that_becomes_non_finite_keeps_its_last_checkpoint(tmp_path):
    from safetensors.torch import load_file

    config = tiny_config(train__lr=1e30, train__clip="none", train__steps=40, checkpoint__every=1)
    with pytest.raises(NonFiniteError, match="is not finite at step"):
        train(config, tmp_path / "run", quiet=True)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        assert all(t.isfinite().all() for t in load_file(path / "model.safetensors").values())
