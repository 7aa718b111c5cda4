"""Runs and pipelines on the Hugging Face hub, against a local stand-in of its HTTP interface."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from hub_server import TOKEN, Hub

import scalelong
from scalelong.errors import HubError, InvalidValueError
from scalelong.runs import Request
from scalelong.runs.hub import write_hub_folder
from scalelong.runs.locate import SHIPPED
from scalelong.runs.run import Run

SCRIPT = """
import sys, torch, scalelong
from scalelong import ScaleLongPipeline
from scalelong.runs.run import Run
from scalelong.errors import HubError

token = sys.argv[1]
run = scalelong.load_run("digits")
print(run.push_to_hub("me/digits", token=token, licence="mit"))
again = Run.from_pretrained("me/digits")
x, t, y = torch.randn(2, 1, 8, 8), torch.tensor([10.0, 500.0]), torch.tensor([3, 8])
out = lambda net: net(x, t, class_labels=y)
assert again.step == run.step and again.config == run.config and len(again.column("loss"))
assert torch.equal(out(again.net), out(run.net))
assert torch.equal(out(scalelong.load_run("hf:me/digits").net), out(run.net))
pipe = ScaleLongPipeline.from_pretrained("me/digits")  # the run's repository opens as a pipeline too
assert torch.equal(out(pipe.unet).sample, out(run.net))

scalelong.apply(pipe.unet.eval(), scalelong.SkipTuning(0.8), replace=True)
pipe.push_to_hub("me/tuned", token=token)
tuned = ScaleLongPipeline.from_pretrained("me/tuned")
assert torch.equal(out(tuned.unet).sample, out(pipe.unet).sample)
assert not torch.equal(out(tuned.unet).sample, out(run.net))
for attempt in (lambda: run.push_to_hub("me/digits", token="hf_wrong"), lambda: Run.from_pretrained("me/nothing")):
    try:
        attempt()
    except HubError as error:
        print(error)
"""


def test_runs_and_pipelines_go_to_the_hub_and_come_back_equal(tmp_path):
    with Hub() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "SCALELONG_CACHE": str(tmp_path / "cache")}
        environment.pop("HF_TOKEN", None)
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, TOKEN]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        files = hub.repos["me/digits"]
    address, refused, absent = done.stdout.splitlines()
    assert address.startswith(f"{hub.url}/me/digits/commit/")
    assert "401" in refused
    assert "hf auth login" in refused
    assert "no such repository" in absent
    assert not any(path.startswith("checkpoints") or path.endswith(".lock") for path in files)
    card = files["README.md"].decode()
    assert card.startswith("---\nlicense: mit\n")
    for said in (
        "| data | digits, split train",
        "κ_i = 1, 1",
        "curves.svg",
        "## Evaluation",
        'from_pretrained("me/digits")',
    ):
        assert said in card
    assert {"config.json", "curves.svg", "samples/samples.png", "model/scaling.json"} <= set(files)
    tuned = hub.repos["me/tuned"]
    assert "model_index.json" in tuned
    assert "SkipTuning" in tuned["README.md"].decode()
    assert 'from_pretrained("me/tuned")' in tuned["README.md"].decode()


def test_the_card_has_every_metric_with_its_conditions_and_no_path_of_this_machine(tmp_path):
    folder, out = tmp_path / "copy", tmp_path / "hub"
    shutil.copytree(SHIPPED / "digits", folder)
    run = Run(folder)
    run.evaluate(Request(n=72, steps=2, batch_size=72), "digits:train:80", "pixels", save_as="evaluate")
    out.mkdir()
    write_hub_folder(run, out, "me/digits")
    card = (out / "README.md").read_text(encoding="utf-8")
    stored = json.loads((folder / "evaluation.json").read_text())
    for metric in stored["metrics"].values():
        assert f"{metric['value']:.4g}" in card
    assert "samples 72" in card
    assert "reference digits" in card
    assert str(tmp_path) not in card


def test_without_a_connection_the_error_is_one_sentence(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="me/nothing"):
        Run.from_pretrained("me/nothing")
    with pytest.raises(InvalidValueError, match="owner/name"):
        scalelong.ScaleLongPipeline.from_pretrained("no such folder/here/at all")


def test_a_run_without_a_network_is_not_uploaded(tmp_path):
    with pytest.raises(scalelong.ScaleLongError, match="no trained network"):
        Run(tmp_path).push_to_hub("me/empty")


def test_a_run_whose_loss_is_not_always_positive_is_uploaded_without_curves(tmp_path):
    folder, out = tmp_path / "copy", tmp_path / "hub"
    shutil.copytree(SHIPPED / "digits", folder)
    entries = [{"step": step, "loss": 1.0 - step} for step in range(1, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    out.mkdir()
    write_hub_folder(Run(folder), out, "me/digits")
    assert not (out / "curves.svg").exists()
    assert "## Loss" not in (out / "README.md").read_text(encoding="utf-8")
