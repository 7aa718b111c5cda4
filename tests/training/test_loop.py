"""A run folder: its files, exact resume, and observers that change nothing."""

import json
import shutil
from importlib import metadata

import pytest
import torch

from scalelong import ConstantScaling, LearnableScaling, NoScaling, describe
from scalelong.errors import RunError
from scalelong.models.registry import MODELS, Model
from scalelong.runs.run import Run, load_run
from scalelong.training.loop import train
from tiny_runs import losses, read_lines, tiny_config


def test_a_run_writes_the_files_of_the_contract(finished):
    run = Run(finished)
    record = json.loads((finished / "config.json").read_text())
    assert record["versions"]["torch"] == metadata.version("torch")
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
        "model_index.json",  # these three make the folder a diffusers pipeline
        "scheduler_config.json",
        "pipeline.py",
    }
    assert not list(finished.rglob("*.part"))
    assert not [p for p in finished.rglob("*") if p.suffix in (".pt", ".pth", ".pkl", ".bin")]


def test_the_learning_rate_warms_up(finished):
    assert Run(finished).metrics["lr"].values.tolist() == [0.0005, 0.001, 0.001, 0.001, 0.001, 0.001]


def test_global_random_state_has_no_influence(tmp_path, finished):
    torch.manual_seed(123)
    torch.rand(1000)
    train(tiny_config(), tmp_path / "again", quiet=True)
    assert losses(tmp_path / "again") == losses(finished)


# --------------------------------------------------------------------------------------------- resume


def test_a_finished_run_returns_at_once_and_changes_nothing(finished):
    before = {p: p.stat().st_mtime_ns for p in (finished / "checkpoints").rglob("*")}
    result = train(tiny_config(), finished, quiet=True)
    assert result.finished
    assert before == {p: p.stat().st_mtime_ns for p in (finished / "checkpoints").rglob("*")}


@pytest.mark.parametrize("scaling", [NoScaling(), ConstantScaling(0.5), LearnableScaling()], ids=lambda s: s.kind)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, scaling):
    train(tiny_config(scaling=scaling), tmp_path / "whole", quiet=True)
    train(tiny_config(scaling=scaling, train__steps=3), tmp_path / "parts", quiet=True)
    train(tiny_config(scaling=scaling), tmp_path / "parts", quiet=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    a, b = load_run(tmp_path / "whole").net, load_run(tmp_path / "parts").net
    assert all(torch.equal(a.state_dict()[k], b.state_dict()[k]) for k in a.state_dict())


def test_a_run_with_dropout_resumes_bit_for_bit(tmp_path):
    unet = {"model__kind": "unet", "model__channels": "8,16", "model__layers": 1}
    settings = {"name": "digits", **unet, "model__dropout": 0.3}
    train(tiny_config(**settings), tmp_path / "whole", quiet=True)
    train(tiny_config(**settings, train__steps=3), tmp_path / "parts", quiet=True)
    torch.manual_seed(5)
    train(tiny_config(**settings), tmp_path / "parts", quiet=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    train(tiny_config(**{**settings, "model__dropout": 0.0}), tmp_path / "without", quiet=True)
    assert losses(tmp_path / "without") != losses(tmp_path / "whole")


class Hidden(torch.nn.Module):
    """Dropout that no module shows."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x, t):
        return self.body(torch.nn.functional.dropout(x, 0.3, self.training))


def test_a_run_with_dropout_that_no_module_shows_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "hidden", Model(build=lambda model, shapes: Hidden()))
    train(tiny_config(model__kind="hidden"), tmp_path / "whole", quiet=True)
    train(tiny_config(model__kind="hidden", train__steps=3), tmp_path / "parts", quiet=True)
    torch.manual_seed(5)
    train(tiny_config(model__kind="hidden"), tmp_path / "parts", quiet=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "reader"),
    [
        ({"name": "digits", "model__channels": "8,16", "model__dropout": 0.3}, "dropout"),
        (
            {"distillation__weight": 0.1, "distillation__stride": 2, "self_conditioning__block": "mid_block"},
            "distillation",
        ),
    ],
    ids=["dropout", "distillation"],
)
def test_another_split_of_the_batch_is_refused_where_a_step_depends_on_it(tmp_path, settings, reader):
    train(tiny_config(**settings, train__steps=2), tmp_path / "run", quiet=True)
    with pytest.raises(RunError, match=rf"train\.accumulate: 1 → 2 \({reader}"):
        train(tiny_config(**settings, train__accumulate=2), tmp_path / "run", quiet=True)


def test_fewer_processes_with_more_parts_have_the_same_dropout_masks_and_may_resume(tmp_path):
    settings = {"name": "digits", "model__channels": "8,16", "model__dropout": 0.3}
    train(tiny_config(**settings, train__steps=2), tmp_path / "run", quiet=True)
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(record | {"processes": 2}))
    assert train(tiny_config(**settings, train__accumulate=2), tmp_path / "run", quiet=True).finished


def test_a_run_with_mup_remembers_it_and_resumes_bit_for_bit(tmp_path):
    settings = {"model__embed_dim": 32, "mup__base_width": 8, "mup__base_depth": 2, "scaling": ConstantScaling(0.5)}
    train(tiny_config(**settings), tmp_path / "whole", quiet=True)
    train(tiny_config(**settings, train__steps=3), tmp_path / "parts", quiet=True)
    train(tiny_config(**settings), tmp_path / "parts", quiet=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    a, b = load_run(tmp_path / "whole").net, load_run(tmp_path / "parts").net
    assert all(torch.equal(a.state_dict()[k], b.state_dict()[k]) for k in a.state_dict())
    with pytest.raises(RunError, match="mup.base_width"):
        train(tiny_config(**{**settings, "mup__base_width": None, "train__steps": 8}), tmp_path / "whole", quiet=True)
    train(tiny_config(**{**settings, "mup__base_width": None, "mup__base_depth": None}), tmp_path / "no", quiet=True)
    assert losses(tmp_path / "no") != losses(tmp_path / "whole")


def test_more_steps_continue_a_finished_run(tmp_path, finished):
    folder = tmp_path / "longer"
    shutil.copytree(finished, folder)
    train(tiny_config(train__steps=8), folder, quiet=True)
    assert losses(folder)[:6] == losses(finished)
    assert [step for step, _, _ in losses(folder)] == list(range(1, 9))


def test_a_config_of_an_older_version_without_new_settings_resumes(tmp_path, finished):
    folder = tmp_path / "old"
    shutil.copytree(finished, folder)
    record = json.loads((folder / "config.json").read_text())
    del record["config"]["model"]["options"]
    (folder / "config.json").write_text(json.dumps(record))
    assert train(tiny_config(train__steps=7), folder, quiet=True).step == 7


def test_steps_after_the_checkpoint_are_not_logged_twice(tmp_path, finished):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 0.')  # torn
    train(tiny_config(), folder, quiet=True)
    assert losses(folder) == losses(finished)


def damage(path, kind):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    changed = {"truncated": content[:-7], "flipped": content, "empty": b"", "manifest": b"{"}
    path.unlink()
    if kind != "removed":
        path.write_bytes(changed[kind])


@pytest.mark.parametrize("kind", ["truncated", "flipped", "empty", "removed", "manifest"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before_and_reported(tmp_path, finished, capsys, kind):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    newest = folder / "checkpoints" / "step-00000006"
    damage(newest / ("manifest.json" if kind == "manifest" else "optimizer.safetensors"), kind)
    train(tiny_config(), folder)
    assert "damaged checkpoint step-00000006" in capsys.readouterr().err
    assert losses(folder) == losses(finished)


def test_other_settings_are_refused_by_their_keys(finished):
    with pytest.raises(RunError, match=r"train\.lr: 0\.001 → 0\.002"):
        train(tiny_config(train__lr=2e-3), finished, quiet=True)
    with pytest.raises(RunError, match=r"scaling\.kind"):
        train(tiny_config(scaling=ConstantScaling(0.5)), finished, quiet=True)


# ------------------------------------------------------------------------------------------ observers


def test_observers_do_not_change_a_loss(tmp_path, finished):
    config = tiny_config(validate__every=1, sample__every=2, sample__n=4, sample__steps=3, monitor__every=2)
    train(config, tmp_path / "run", quiet=True)
    assert losses(tmp_path / "run") == losses(finished)
    files = sorted(p.name for p in (tmp_path / "run" / "samples").iterdir())
    assert files == ["real.png", *(f"step-{step:08d}.png" for step in (2, 4, 6))]


def test_the_probe_has_as_many_images_as_configured(tmp_path, finished):
    train(tiny_config(monitor__every=2, monitor__samples=7), tmp_path / "run", quiet=True)
    header, *entries = read_lines(tmp_path / "run" / "stability.jsonl")
    assert header["probe"] == 7
    assert {entry["probe"]["n"] for entry in entries} == {7}
    assert losses(tmp_path / "run") == losses(finished)


def test_tensorboard_receives_the_logged_values(tmp_path, finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny_config(tracker="tensorboard"), tmp_path / "run", quiet=True)
    events = next((tmp_path / "run").rglob("events.out.tfevents.*"))
    reader = EventAccumulator(str(events.parent))
    reader.Reload()
    assert [e.value for e in reader.Scalars("loss")] == pytest.approx([a for _, a, _ in losses(finished)])


def test_a_missing_tracker_is_named_with_its_extra(tmp_path):
    with pytest.raises(ImportError, match=r"scalelong\[wandb\]"):
        train(tiny_config(tracker="wandb"), tmp_path / "run", quiet=True)


def test_the_placement_of_the_scaling_is_a_setting_that_model_keeps(tmp_path):
    config = tiny_config("digits", train__steps=1, placement="after_norm", scaling=ConstantScaling(0.5))
    train(config, tmp_path / "after", quiet=True)
    train(tiny_config("digits", train__steps=1, scaling=ConstantScaling(0.5)), tmp_path / "join", quiet=True)
    nets = [load_run(tmp_path / name).net for name in ("after", "join")]
    assert [describe(net).placement for net in nets] == ["after_norm", "join"]
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([10.0, 500.0])
    assert not torch.allclose(nets[0](x, t), nets[1](x, t))
