"""Runs in processes of their own: fresh ones, several at once, and ones that are signalled or killed."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from scalelong.errors import RunError
from scalelong.runs.run import load_run
from scalelong.training.loop import train
from tiny_runs import losses, read_lines, tiny_command, tiny_config


def run_fresh(*command, **options):
    answer = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, **options)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return answer


def wait_for(path, needle, timeout=180):
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if path.exists() and needle in path.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} never contained {needle!r}")


# ------------------------------------------------------------------- first use in a process of its own


def test_evaluate_works_in_a_fresh_process(tmp_path, finished):
    command = ("evaluate", finished, "--extractor=pixels", "--n=4", "--steps=1", "--device=cpu", "--json")
    environment = {**os.environ, "SCALELONG_CACHE": str(tmp_path)}
    answer = run_fresh("-m", "scalelong", *command, env=environment)
    assert json.loads(answer.stdout)["card"]["n"] == 4


def test_inference_mode_works_in_a_fresh_process():
    run_fresh(
        "-c",
        "import torch, scalelong\n"
        "net = scalelong.UViT(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, scaling='ls')\n"
        "with torch.inference_mode():\n"
        "    assert net(torch.zeros(1, 3, 8, 8), torch.zeros(1)).shape == (1, 3, 8, 8)\n",
    )


def test_gradient_checkpointing_works_in_a_fresh_process(tmp_path):
    options = ("--steps=1", "--set=train.gradient_checkpointing=true", "-q")
    run_fresh(*tiny_command(tmp_path / "run", *options)[1:])
    assert len(losses(tmp_path / "run")) == 1


# ------------------------------------------------------------------------------------ signals and locks


def test_sigterm_writes_a_checkpoint_and_the_lock_keeps_others_out_until_then(tmp_path):
    folder = tmp_path / "run"
    with subprocess.Popen(tiny_command(folder, "--steps=100000"), stderr=subprocess.PIPE, text=True) as process:
        wait_for(folder / "metrics.jsonl", '"step": 3')
        with pytest.raises(RunError, match=f"in use.*process {process.pid}"):
            train(tiny_config(train__steps=100000), folder, quiet=True)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "checkpoint after step" in err
    assert "Traceback" not in err
    last = losses(folder)[-1][0]
    assert (folder / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()
    assert train(tiny_config(train__steps=last + 1), folder, quiet=True).finished


@pytest.mark.slow
def test_sigint_writes_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    with subprocess.Popen(tiny_command(folder, "--steps=100000"), stderr=subprocess.PIPE, text=True) as process:
        wait_for(folder / "metrics.jsonl", '"step": 3')
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "checkpoint after step" in err


@pytest.mark.slow
def test_a_killed_process_frees_the_lock(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(tiny_command(folder, "--steps=100000"), stderr=subprocess.DEVNULL)
    try:
        wait_for(folder / "metrics.jsonl", '"step": 1')
    finally:
        process.kill()
        process.wait()
    train(tiny_config(train__steps=losses(folder)[-1][0] + 1), folder, quiet=True)


@pytest.mark.slow
def test_twenty_kills_resume_exactly(tmp_path):
    """tests/faults/test_kills.py kills runs at chosen calls, in the fast suite too."""
    kills, whole, parts = 20, tmp_path / "whole", tmp_path / "parts"
    steps = f"--steps={60 * kills}"
    subprocess.run(tiny_command(whole, steps, "-q"), check=True)
    random = torch.Generator().manual_seed(7)
    for _ in range(kills):
        target = _last_step(parts) + int(torch.randint(2, 12, (1,), generator=random))
        with subprocess.Popen(tiny_command(parts, steps, "-q")) as process:
            until = time.monotonic() + 120
            while _last_step(parts) < target and process.poll() is None and time.monotonic() < until:
                time.sleep(torch.rand(1, generator=random).item() * 0.02)
            assert process.poll() is None, "the run ended before it could be killed"
            process.kill()
    subprocess.run(tiny_command(parts, steps, "-q"), check=True)
    assert losses(parts) == losses(whole)


def _last_step(folder):
    entries = losses(folder)
    return entries[-1][0] if entries else 0


# -------------------------------------------------------------------------------------- two processes


DISTILLED = [
    f"--set={setting}"
    for setting in ("distillation.weight=0.1", "distillation.stride=2", "self_conditioning.block=mid_block")
]


def launch(world, folder, *options):
    torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
    start = [
        torchrun,
        f"--nproc-per-node={world}",
        "--master-port=0",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    command = [*start, "-m", *tiny_command(folder, *options)[2:]] if world > 1 else tiny_command(folder, *options)
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("both", "second"),
    [([], []), ([], ["--set=train.parallel=fsdp"]), (DISTILLED, [])],
    ids=["ddp", "fsdp", "distilled"],
)
def test_two_processes_follow_one(tmp_path, both, second):
    """1 process × 8 and 2 × 4: losses equal to 1e-5 for 10 steps and 1e-4 for 50."""
    one, two = tmp_path / "one", tmp_path / "two"
    launch(1, one, "--steps=50", "-q", *both)
    launch(2, two, "--steps=50", "-q", *both, *second)
    assert json.loads((two / "config.json").read_text())["processes"] == 2
    assert len(losses(two)) == 50
    for (step, a, _), (_, b, _) in zip(losses(one), losses(two), strict=True):
        assert b == pytest.approx(a, abs=1e-5 if step <= 10 else 1e-4)
    averages = [load_file(folder / "model" / "diffusion_pytorch_model.safetensors") for folder in (one, two)]
    assert all(torch.allclose(value, averages[1][name], atol=2e-3) for name, value in averages[0].items())


def test_a_sharded_run_follows_one_process_and_resumes_on_any_number(tmp_path):
    """FSDP2 over gloo with LS: sharded weights, EMA and optimizer; a checkpoint of two processes opens in one."""
    one, two = tmp_path / "one", tmp_path / "two"
    often = ("--scaling=ls", "--set=sample.n=3", "--set=sample.steps=2", "-q")
    often += ("--set=monitor.every=3", "--set=validate.every=6", "--set=validate.n=15")
    launch(1, one, "--steps=12", *often)
    launch(2, two, "--steps=6", *often, "--set=train.parallel=fsdp")
    launch(1, two, "--steps=9", *often)  # fewer processes
    launch(2, two, "--steps=12", *often, "--set=train.parallel=fsdp")  # and more
    assert [step for step, _, _ in losses(two)] == list(range(1, 13))
    for (_, a, g), (_, b, h) in zip(losses(one), losses(two), strict=True):
        assert b == pytest.approx(a, abs=1e-5)
        assert h == pytest.approx(g, rel=1e-3)
    a, b = (load_run(folder).net.state_dict() for folder in (one, two))
    assert "skip_scaling" in " ".join(a)
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, atol=2e-4, rtol=1e-3)
    assert json.loads((two / "config.json").read_text())["config"]["train"]["parallel"] == "fsdp"
    for name in ("val_loss", "val_loss_ema"):  # of 7 and 8 images by two processes
        logged = [{e["step"]: e.get(name) for e in read_lines(folder / "metrics.jsonl")} for folder in (one, two)]
        assert [logged[1][step] for step in (6, 12)] == pytest.approx([logged[0][step] for step in (6, 12)], abs=1e-5)
    grids = [np.asarray(Image.open(folder / "samples" / "step-00000012.png"), int) for folder in (one, two)]
    assert abs(grids[0] - grids[1]).max() <= 1  # rounding to 8 bits
    logs = [[e for e in read_lines(folder / "stability.jsonl") if "grad" in e] for folder in (one, two)]
    assert [entry["step"] for entry in logs[1]] == [entry["step"] for entry in logs[0]] == [3, 6, 9, 12]
    for a, b in zip(*logs, strict=True):  # of the whole network, from shards
        for part in ("probe", "grad"):
            assert flat(b[part]) == pytest.approx(flat(a[part]), rel=2e-3, abs=1e-4)
        assert flat(b["drift"]) == pytest.approx(flat(a["drift"]), rel=1e-2, abs=1e-5)


def flat(value):
    if isinstance(value, dict):
        return [x for key in sorted(value) for x in flat(value[key])]
    return [x for v in value for x in flat(v)] if isinstance(value, list) else [-1.0 if value is None else value]


@pytest.mark.slow
def test_an_overflow_in_one_shard_of_fp16_is_a_skipped_step_of_all_processes(tmp_path):
    here = os.path.dirname(__file__)
    torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node=2", os.path.join(here, "sharded_scaler.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(here)}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["skipped"] == [False, True, False, False]
    assert first["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert first["updates"] == 3
    assert first["losses"][:2] == pytest.approx(first["unscaled"][:2], abs=1e-6)
    assert first["losses"][2] != pytest.approx(first["unscaled"][2], abs=1e-6)  # a step behind


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--set=train.parallel=fsdp"]], ids=["ddp", "fsdp"])
def test_a_killed_worker_restarts_and_the_run_resumes_with_fewer_and_more_processes(tmp_path, options):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
    start = [torchrun, "--standalone", "--max-restarts=1", "--nproc-per-node=2", "-m"]
    command = [*start, *tiny_command(folder, "--steps=60", "-q", *options)[2:]]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_for(folder / "metrics.jsonl", '"step": 5,')
        workers = [int(pid) for pid in children(process.pid)]
        os.kill(workers[-1], signal.SIGKILL)
        assert process.wait(timeout=300) == 0  # torchrun started both again
    assert losses(folder)[-1][0] == 60
    with subprocess.Popen(
        [*start[:2], *start[3:], *tiny_command(folder, "--steps=100000", "-q", *options)[2:]]
    ) as lost:
        wait_for(folder / "metrics.jsonl", '"step": 65,')
        os.kill(int(children(lost.pid)[-1]), signal.SIGKILL)
        assert lost.wait(timeout=300) != 0  # without restarts the command fails …
    last = losses(folder)[-1][0]
    launch(1, folder, f"--steps={last + 4}", "-q")  # … and resumes with fewer processes
    launch(4, folder, f"--steps={last + 8}", "-q", *options)  # and with more
    launch(1, whole, f"--steps={last + 8}", "-q")
    assert [step for step, _, _ in losses(folder)] == list(range(1, last + 9))
    for (step, a, _), (_, b, _) in zip(losses(whole), losses(folder), strict=True):
        assert b == pytest.approx(a, abs=1e-5 if step <= 10 else 1e-3)


def children(pid):
    """Processes that `pid` started, oldest first."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


@pytest.mark.slow
def test_sigterm_to_one_process_of_two_is_a_checkpoint_that_one_process_resumes(tmp_path):
    folder = tmp_path / "run"
    meeting = ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
    command = [torchrun, "--nproc-per-node=2", *meeting, "-m", *tiny_command(folder, "--steps=100000")[2:]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(folder / "metrics.jsonl", '"step": 3')
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert "checkpoint after step" in err, err[-2000:]
    last = losses(folder)[-1][0]
    assert (folder / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()
    assert train(tiny_config(train__steps=last + 2), folder, quiet=True).finished


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_one_line_without_a_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    answer = subprocess.run(tiny_command(tmp_path / "file" / "run", "-q"), capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: ")
    assert "Traceback" not in answer.stderr
