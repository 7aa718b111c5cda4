"""Training is a function of (config, step): resume, kills, observers and processes do not change a loss."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from scalelong import ConstantScaling, LearnableScaling, NoScaling
from scalelong.errors import ScaleLongError
from scalelong.runs.logs import read_lines
from scalelong.runs.run import Run, load_run
from scalelong.training.ema import Ema
from scalelong.training.examples import Examples
from scalelong.training.loop import train
from scalelong.training.trainer import NonFiniteError, Trainer
from tiny_runs import tiny_config


def losses(folder):
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in read_lines(Run(folder).metrics_path)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "whole"
    train(tiny_config(), folder, quiet=True)
    return folder


def test_a_run_leaves_the_files_of_the_contract(finished):
    run = Run(finished)
    record = json.loads((finished / "config.json").read_text())
    assert record["versions"]["torch"] == torch.__version__
    assert record["data"]["n"] == 1497
    entries = read_lines(run.metrics_path)
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert all({"step", "loss", "lr", "grad_norm"} <= set(entry) for entry in entries)
    assert "val_loss" in entries[-1]
    assert sorted(p.name for p in run.checkpoints_path.iterdir()) == ["step-00000004", "step-00000006"]
    assert {p.name for p in run.model_path.iterdir()} == {
        "config.json",  # with the scaling: U-ViT stores it in its own config, once
        "diffusion_pytorch_model.safetensors",
        "step.json",
    }
    assert not list(finished.rglob("*.part"))
    assert not [p for p in finished.rglob("*") if p.suffix in (".pt", ".pth", ".pkl", ".bin")]


def test_the_learning_rate_warms_up(finished):
    assert [entry["lr"] for entry in read_lines(Run(finished).metrics_path)] == [
        0.0005,
        0.001,
        0.001,
        0.001,
        0.001,
        0.001,
    ]


def test_a_finished_run_returns_at_once_and_changes_nothing(finished):
    before = {p: p.stat().st_mtime_ns for p in (finished / "checkpoints").rglob("*")}
    result = train(tiny_config(), finished, quiet=True)
    assert result.finished
    assert before == {p: p.stat().st_mtime_ns for p in (finished / "checkpoints").rglob("*")}


@pytest.mark.parametrize("scaling", [NoScaling(), ConstantScaling(0.5), LearnableScaling()], ids=lambda s: s.kind)
def test_going_on_equals_never_having_stopped_bit_for_bit(tmp_path, scaling):
    config = tiny_config(scaling=scaling)
    train(config, tmp_path / "whole", quiet=True)
    train(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=3)), tmp_path / "parts", quiet=True)
    train(config, tmp_path / "parts", quiet=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    a, b = load_run(tmp_path / "whole").net, load_run(tmp_path / "parts").net
    assert all(torch.equal(a.state_dict()[k], b.state_dict()[k]) for k in a.state_dict())


def test_steps_after_the_checkpoint_are_not_logged_twice(tmp_path, finished):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 0.')  # torn
    train(tiny_config(), folder, quiet=True)
    assert losses(folder) == losses(finished)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_said_so(tmp_path, finished, capsys):
    for damage in ("truncate", "flip", "empty", "remove", "manifest"):
        folder = tmp_path / damage
        shutil.copytree(finished, folder)
        newest = folder / "checkpoints" / "step-00000006"
        target = newest / ("manifest.json" if damage == "manifest" else "optimizer.safetensors")
        content = bytearray(target.read_bytes())
        if damage == "truncate":
            target.write_bytes(content[:-7])
        elif damage == "flip":
            content[len(content) // 2] ^= 1
            target.write_bytes(content)
        elif damage == "empty":
            target.write_bytes(b"")
        elif damage == "remove":
            target.unlink()
        else:
            target.write_text("{")
        train(tiny_config(), folder)
        assert "step-00000006 is damaged" in capsys.readouterr().err
        assert losses(folder) == losses(finished)


def test_other_settings_are_refused_by_key(finished):
    with pytest.raises(ScaleLongError, match=r"train\.lr: 0\.001 → 0\.002"):
        train(tiny_config(train__lr=2e-3), finished, quiet=True)
    with pytest.raises(ScaleLongError, match=r"scaling\.kind"):
        train(tiny_config(scaling=ConstantScaling(0.5)), finished, quiet=True)


def test_more_steps_continue_a_finished_run(tmp_path, finished):
    folder = tmp_path / "longer"
    shutil.copytree(finished, folder)
    train(tiny_config(train__steps=8), folder, quiet=True)
    assert losses(folder)[:6] == losses(finished)
    assert [step for step, _, _ in losses(folder)] == list(range(1, 9))


def test_watching_does_not_disturb(tmp_path, finished):
    config = tiny_config(validate__every=1, sample__every=2, sample__n=4, sample__steps=3, monitor__every=2)
    train(config, tmp_path / "watched", quiet=True)
    assert losses(tmp_path / "watched") == losses(finished)
    assert sorted(p.name for p in (tmp_path / "watched" / "samples").iterdir()) == [
        f"step-{s:08d}.png" for s in (2, 4, 6)
    ]


def test_the_probe_has_as_many_images_as_are_asked_for(tmp_path, finished):
    from scalelong.monitor.log import read_stability

    train(tiny_config(monitor__every=2, monitor__samples=7), tmp_path / "run", quiet=True)
    log = read_stability(tmp_path / "run" / "stability.jsonl")
    assert log.header["probe"] == 7
    assert {entry["probe"]["n"] for entry in log.entries} == {7}
    assert losses(tmp_path / "run") == losses(finished)


def test_tensorboard_gets_the_figures_and_a_missing_tracker_is_a_sentence(tmp_path, finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny_config(tracker="tensorboard"), tmp_path / "run", quiet=True)
    events = next((tmp_path / "run").rglob("events.out.tfevents.*"))
    reader = EventAccumulator(str(events.parent))
    reader.Reload()
    assert [e.value for e in reader.Scalars("loss")] == pytest.approx([a for _, a, _ in losses(finished)])
    with pytest.raises(ImportError, match=r"scalelong\[wandb\]"):
        train(tiny_config(tracker="wandb"), tmp_path / "other", quiet=True)


def test_global_random_state_has_no_say(tmp_path, finished):
    torch.manual_seed(123)
    torch.rand(1000)
    train(tiny_config(), tmp_path / "again", quiet=True)
    assert losses(tmp_path / "again") == losses(finished)


def test_seeds_and_scalings_differ_but_initial_weights_do_not(tmp_path):
    def trainer(**options):
        config = tiny_config(**options)
        return Trainer(config, Examples(config, "train"))

    plain, scaled, other = trainer(), trainer(scaling=LearnableScaling()), trainer(seed=1)
    for name, value in plain.net.state_dict().items():
        assert torch.equal(scaled.net.state_dict()[name], value)
    assert not torch.equal(plain.net.pos_embed, other.net.pos_embed)
    assert torch.equal(plain.batch(3).eps, scaled.batch(3).eps)
    assert not torch.equal(plain.batch(3).eps, plain.batch(4).eps)
    assert not torch.equal(plain.batch(3).eps, other.batch(3).eps)


def test_accumulated_parts_make_the_same_step(tmp_path, finished):
    train(tiny_config(train__accumulate=4), tmp_path / "parts", quiet=True)
    for (_, a, g), (_, b, h) in zip(losses(finished), losses(tmp_path / "parts"), strict=True):
        assert b == pytest.approx(a, abs=1e-5)
        assert h == pytest.approx(g, rel=1e-3)


def test_every_image_is_seen_once_an_epoch():
    config = tiny_config(train__batch_size=100)
    examples = Examples(config, "train")
    seen = torch.cat([examples._order(start, 100) for start in range(0, 1400, 100)] + [examples._order(1400, 97)])
    assert sorted(seen.tolist()) == list(range(1497))
    across = examples._order(1490, 20)
    assert torch.equal(across[:7], examples._order(1490, 7))
    assert torch.equal(across[7:], examples._order(1497, 13))


# ----------------------------------------------------------------------------------------- non-finite


def poison(trainer, path="mid_block.mlp.fc2"):
    module = trainer.net.get_submodule(path)
    return module.register_forward_hook(lambda m, a, out: out * float("nan"))


def test_a_non_finite_loss_stops_names_the_module_and_keeps_the_weights():
    config = tiny_config()
    trainer = Trainer(config, Examples(config, "train"))
    trainer.step()
    before = {k: v.clone() for k, v in trainer.net.state_dict().items()}
    poison(trainer)
    with pytest.raises(
        NonFiniteError, match=r"loss is not finite at step 2 .* mid_block\.mlp.* timesteps in the batch: 0\.\d+ to"
    ):
        trainer.step()
    assert all(torch.equal(before[k], v) for k, v in trainer.net.state_dict().items())
    assert trainer.progress.step == 1


def test_a_skipped_step_advances_neither_schedule_nor_ema_nor_weights():
    config = tiny_config(train__nonfinite="skip")
    trainer = Trainer(config, Examples(config, "train"))
    trainer.step()
    before = {k: v.clone() for k, v in [*trainer.net.state_dict().items(), *trainer.ema.net.state_dict().items()]}
    handle = poison(trainer)
    outcome = trainer.step()
    handle.remove()
    assert outcome.skipped
    assert math.isnan(outcome.loss)
    after = dict([*trainer.net.state_dict().items(), *trainer.ema.net.state_dict().items()])
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert (trainer.progress.step, trainer.progress.updates) == (2, 1)
    assert trainer.step().lr == config.train.lr  # the second update of a warm-up of two


def test_a_run_that_goes_non_finite_keeps_its_last_checkpoint(tmp_path, finished):
    folder = tmp_path / "run"
    config = tiny_config(train__lr=1e30, train__clip="none", train__steps=40, checkpoint__every=1)
    with pytest.raises(NonFiniteError, match="is not finite at step"):
        train(config, folder, quiet=True)
    for path in (folder / "checkpoints").iterdir():
        from safetensors.torch import load_file

        assert all(t.isfinite().all() for t in load_file(path / "model.safetensors").values())


# --------------------------------------------------------------------------------- EMA and optimizer


def test_ema_is_the_average_by_name_and_lives_apart():
    config = tiny_config(scaling=LearnableScaling(), ema__decay=0.75, ema__warmup=False)
    trainer = Trainer(config, Examples(config, "train"))
    expected = {k: v.clone().double() for k, v in trainer.net.named_parameters()}
    for _ in range(4):
        trainer.step()
        for name, value in trainer.net.named_parameters():
            expected[name] = 0.75 * expected[name] + 0.25 * value.detach().double()
    for name, value in trainer.ema.net.named_parameters():
        torch.testing.assert_close(value.double(), expected[name], atol=1e-6, rtol=1e-5)
    assert trainer.ema.net.skip_scaling is not trainer.net.skip_scaling


def test_a_warmed_up_ema_depends_on_the_number_of_updates_alone():
    ema = Ema(torch.nn.Linear(1, 1), 0.99, warmup=True)
    assert [ema.decay_at(u) for u in (1, 2, 890, 10_000)] == [2 / 11, 3 / 12, 0.99, 0.99]
    assert Ema(torch.nn.Linear(1, 1), 0.99).decay_at(1) == 0.99


def test_a_step_equals_a_plain_loop_of_torch():
    """Forward, backward, clipping and AdamW as anybody would write them."""
    config = tiny_config(train__steps=3)
    trainer = Trainer(config, Examples(config, "train"))
    twin = Trainer(config, Examples(config, "train"))
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


@pytest.mark.parametrize("precision", ["bf16"])
def test_mixed_precision_stays_near_full_precision(tmp_path, finished, precision):
    train(tiny_config(train__precision=precision), tmp_path / "run", quiet=True)
    for (_, a, _), (_, b, _) in zip(losses(finished), losses(tmp_path / "run"), strict=True):
        assert b == pytest.approx(a, rel=0.05)


def test_fp16_without_a_gpu_is_a_sentence(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    with pytest.raises(ScaleLongError, match="needs a CUDA GPU"):
        train(tiny_config(train__precision="fp16"), tmp_path / "run", quiet=True)


def test_gradient_checkpointing_does_not_change_a_loss(tmp_path, finished):
    train(tiny_config(train__gradient_checkpointing=True), tmp_path / "run", quiet=True)
    assert [a for _, a, _ in losses(tmp_path / "run")] == pytest.approx([a for _, a, _ in losses(finished)], rel=1e-6)


# ------------------------------------------------------------------------------ processes and signals


def command(folder, *extra):
    from tiny_runs import TINY

    settings = [f"--set={key}={value}" for key, value in TINY.items() if key != "train.steps"]
    return [sys.executable, "-m", "scalelong", "train", "digits", "--out", str(folder), *settings, *extra]


def wait_for(path, needle, timeout=180):
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if path.exists() and needle in path.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not come to hold {needle!r}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_checkpoints_and_leaves_with_a_clear_line(tmp_path, number):
    folder = tmp_path / "run"
    with subprocess.Popen(command(folder, "--steps", "100000"), stderr=subprocess.PIPE, text=True) as process:
        wait_for(folder / "metrics.jsonl", '"step": 3')
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "checkpoint written after step" in err
    assert "Traceback" not in err
    last = losses(folder)[-1][0]
    assert (folder / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()


def test_a_second_process_is_kept_out_and_the_lock_dies_with_its_owner(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(command(folder, "--steps", "100000"), stderr=subprocess.DEVNULL)
    try:
        wait_for(folder / "metrics.jsonl", '"step": 1')
        with pytest.raises(ScaleLongError, match=f"in use by another process .process {process.pid}"):
            train(tiny_config(train__steps=100000), folder, quiet=True)
    finally:
        process.kill()
        process.wait()
    train(tiny_config(train__steps=losses(folder)[-1][0] + 1), folder, quiet=True)


def test_killed_at_any_moment_the_run_resumes_exactly(tmp_path):
    """A few kills here; twenty in the slow suite."""
    kill_and_resume(tmp_path, kills=2)


@pytest.mark.slow
def test_twenty_kills_resume_exactly(tmp_path):
    kill_and_resume(tmp_path, kills=20)


def last_step(folder):
    entries = losses(folder)
    return entries[-1][0] if entries else 0


def kill_and_resume(tmp_path, kills):
    steps = str(60 * kills)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(command(whole, "--steps", steps, "-q"), check=True)
    random = torch.Generator().manual_seed(7)
    for _ in range(kills):
        target = last_step(parts) + int(torch.randint(2, 12, (1,), generator=random))
        with subprocess.Popen(command(parts, "--steps", steps, "-q")) as process:
            until = time.monotonic() + 120
            while last_step(parts) < target and process.poll() is None and time.monotonic() < until:
                time.sleep(torch.rand(1, generator=random).item() * 0.02)
            assert process.poll() is None, "the run ended before it could be killed"
            process.kill()
    subprocess.run(command(parts, "--steps", steps, "-q"), check=True)
    assert losses(parts) == losses(whole)


def test_two_processes_follow_one(tmp_path):
    """1 process × 8 and 2 × 4: losses to 1e-5 for 10 steps and 1e-4 for 50."""
    one, two = tmp_path / "one", tmp_path / "two"
    subprocess.run(command(one, "--steps", "50", "-q"), check=True)
    launch = ["torchrun", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    launch[0] = os.path.join(os.path.dirname(sys.executable), "torchrun")
    answer = subprocess.run(
        [*launch, "-m", *command(two, "--steps", "50", "-q")[2:]],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert json.loads((two / "config.json").read_text())["processes"] == 2
    assert len(losses(two)) == 50
    for (step, a, _), (_, b, _) in zip(losses(one), losses(two), strict=True):
        assert b == pytest.approx(a, abs=1e-5 if step <= 10 else 1e-4)


def test_a_batch_that_cannot_be_split_is_refused(tmp_path):
    with pytest.raises(ScaleLongError, match="8 is not divisible by 1 process.* × 3"):
        train(tiny_config(train__accumulate=3), tmp_path / "run", quiet=True)


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    answer = subprocess.run(command(tmp_path / "file" / "run", "-q"), capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: ")
    assert "Traceback" not in answer.stderr
