"""`scalelong evaluate` and `scalelong data stats`, on a real run, as a user types them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "evaluation"))

from small_pictures import pictures, write_pictures

from scalelong.cli import main

# A few images are enough here; one test checks the warning about that.
pytestmark = pytest.mark.filterwarnings("always::scalelong.errors.EvaluationWarning")
CHEAP = ["--extractor", "pixels"]


@pytest.fixture
def folders(tmp_path):
    one = write_pictures(tmp_path / "one", pictures(8, size=12))
    return str(one), str(write_pictures(tmp_path / "two", pictures(8, size=12, seed=1, high=150)))


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        main([*map(str, arguments)])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


@pytest.mark.slow
def test_two_folders_give_fid_in_json(capsys, folders):
    one, two = folders
    code, out, err = run(capsys, "evaluate", "--images", one, "--reference", two, "--n", 6, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["fid"] == answer["frechet"] > 0
    assert answer["card"]["metric"] == "FID"
    assert answer["card"]["extractor"] == "inception-2015-12-05"
    assert (answer["card"]["n"], answer["card"]["reference"]["n"]) == (6, 8)
    assert "warning: 6 images are too few for 2,048 features: their covariance has rank 5" in err


def test_two_folders_give_values_and_warnings_in_json(capsys, folders):
    one, two = folders
    code, out, err = run(capsys, "evaluate", "--images", one, "--reference", two, "--n", 6, *CHEAP, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["fid"] is None
    assert answer["frechet"] == answer["metrics"]["frechet"]["value"] > 0
    assert (answer["card"]["n"], answer["card"]["reference"]["n"]) == (6, 8)
    assert "warning: 6 images are too few for 192 features: their covariance has rank 5" in err


@pytest.mark.slow
def test_two_processes_give_the_figures_of_one(capsys, folders):
    one, two = folders
    arguments = [
        "evaluate",
        "--images",
        one,
        "--reference",
        two,
        "--batch-size",
        "3",
        "--device",
        "cpu",
        *CHEAP,
        "--json",
    ]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    launch = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=2", "--rdzv-backend=c10d"]
    launch += ["--rdzv-endpoint=localhost:0", "-m", "scalelong"]
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    alone, together = json.loads(out), json.loads(done.stdout)
    assert together["card"]["processes"] == 2
    assert together["card"]["content"] == alone["card"]["content"]
    assert together["frechet"] == pytest.approx(alone["frechet"], rel=1e-5)


def test_the_table_holds_the_card_and_out_writes_it(capsys, folders, tmp_path):
    one, two = folders
    target = tmp_path / "evaluation.json"
    code, out, _ = run(capsys, "evaluate", "--images", one, "--reference", two, *CHEAP, "--out", target)
    assert code == 0
    for word in ("not FID", "KID", "8×8 pixels", "resize", "versions", "one, 12×12×3", "two, 8 images"):
        assert word in out
    assert json.loads(target.read_text())["fid"] is None


def test_comparison_ranks_and_refuses(capsys, folders, tmp_path):
    one, two = folders
    files = [tmp_path / f"{name}.json" for name in ("first", "second", "fewer")]
    for file, images, n in zip(files, (two, one, one), (8, 8, 7), strict=True):
        evaluate = ["evaluate", "--images", images, "--reference", two, *CHEAP, "--n", n, "--out", file]
        assert run(capsys, *evaluate)[0] == 0
    code, out, _ = run(capsys, "evaluate", *files[:2], "--compare")
    assert code == 0
    assert "interval" in out
    code, out, _ = run(capsys, "evaluate", *files[:2], "--compare", "--json")
    assert [entry["name"] for entry in json.loads(out)["ranking"]] == [str(file) for file in files[:2]]
    code, out, err = run(capsys, "evaluate", *files[1:], "--compare")
    assert code == 1
    assert out == ""
    assert err.startswith("error: ")
    assert "differ in n (8 in " in err
    code, out, _ = run(capsys, "evaluate", *files[1:], "--compare", "--json")
    assert code == 1
    assert json.loads(out)["comparable"] is False
    assert list(json.loads(out)["differences"]) == ["n"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one run folder"),
        (["a", "b"], "one run folder"),
        (["a", "--images", "x", "--reference", "y"], "one run folder"),
        (["--images", "."], "--images needs --reference"),
        (["--images", ".", "--reference", ".", "--sampler", "ddim"], "--sampler"),
        (["--images", "nowhere", "--reference", "."], "nowhere is not a folder"),
        (["nowhere"], "nowhere is not a run folder"),
        (["--compare"], "at least 2 evaluations"),
        (["--vary", "n", "a"], "--vary n needs --compare"),
        (["nowhere", "nothing", "--compare"], "nowhere does not exist"),
        (["--images", "EMPTY", "--reference", "."], "contains no images"),
        (["--images", ".", "--reference", ".", "--step", "best"], "--step, --labels and --memorisation apply to a run"),
        (["nowhere", "--labels", "frequent"], "unknown labels 'frequent'; did you mean 'frequency'?"),
        (["a", "b", "--compare", "--metrics", "fid,kid"], "ranks by one metric, got fid, kid"),
    ],
)
def test_errors_are_one_sentence(capsys, tmp_path, arguments, message):
    arguments = [str(tmp_path) if argument == "EMPTY" else argument for argument in arguments]
    code, out, err = run(capsys, "evaluate", *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_weights_file_with_another_hash_stops_everything(capsys, folders, tmp_path):
    one, two = folders
    (tmp_path / "weights.pt").write_bytes(b"not the weights")
    arguments = [
        "--images",
        one,
        "--reference",
        two,
        "--weights",
        tmp_path / "weights.pt",
        "--out",
        tmp_path / "e.json",
    ]
    code, out, err = run(capsys, "evaluate", *arguments)
    assert (code, out) == (1, "")
    assert "did not open" in err
    assert not (tmp_path / "e.json").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from scalelong.training import override, preset, train

    folder = tmp_path_factory.mktemp("run") / "digits"
    small = {"train.steps": 2, "model.embed_dim": 16, "model.depth": 2, "sample.n": 0, "train.batch_size": 4}
    train(override(preset("digits-uvit"), {**small, "model.num_heads": 2, "validate.n": 4}), folder, quiet=True)
    return folder


def test_a_run_is_evaluated_with_its_card(capsys, trained):
    arguments = ["evaluate", trained, "--n", 10, "--steps", 3, "--reference", "digits:train:20", *CHEAP]
    code, out, _ = run(capsys, *arguments, "--json")
    answer = json.loads(out)
    assert code == 0
    made = answer["card"]["generation"]
    assert (made["sampler"], made["evaluations"], made["guidance"]) == ("dpm-solver-fast", 3, 1.0)
    assert (made["step"], made["effective_batch"], made["train_seed"], made["ema"]) == (2, 4, 0, 0.995)
    assert answer["card"]["image"] == [8, 8, 1]
    assert json.loads((trained / "evaluation.json").read_text()) == answer
    code, out, _ = run(capsys, *arguments, "--batch-size", 3)  # no batch size changes an image
    assert code == 0
    assert "checkpoint step" in out
    again = json.loads((trained / "evaluation.json").read_text())
    assert again["card"]["content"] == answer["card"]["content"]
    assert again["frechet"] == pytest.approx(answer["frechet"], rel=1e-3)


def test_metrics_are_chosen_by_name_and_rank_a_comparison(capsys, folders, trained, tmp_path):
    names = ["precision", "recall", "density", "coverage", "mind", "frechet"]
    arguments = ["evaluate", trained, "--n", 10, "--steps", 2, "--reference", "digits:train:20", *CHEAP]
    code, out, _ = run(capsys, *arguments, "--metrics", ",".join(names), "--json", "--out", tmp_path / "a.json")
    answer = json.loads(out)
    assert code == 0
    assert list(answer["metrics"]) == list(answer["card"]["metrics"]) == names
    run(capsys, *arguments, "--metrics", ",".join(names), "--seed", 1, "--out", tmp_path / "b.json")
    code, out, _ = run(capsys, "evaluate", tmp_path / "a.json", tmp_path / "b.json", "--compare", "--metrics", "mind")
    assert code == 0
    assert "MIND" in out


def test_a_step_and_memorisation_of_a_run(capsys, trained):
    arguments = ["evaluate", trained, "--n", 10, "--steps", 2, "--reference", "digits:train:20", *CHEAP]
    code, out, _ = run(capsys, *arguments, "--step", 2, "--memorisation", "--json")
    assert code == 0
    assert json.loads(out)["memorisation"]["n"] == 10
    assert (trained / "memorisation.png").is_file()
    code, _, err = run(capsys, *arguments, "--step", "best")
    assert code == 1
    assert "evaluate.keep_best=true" in err


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["evaluate", "--n", 10, *CHEAP], "evaluation.json"),
        (["sample", "--n", 4, "--steps", 2], "samples/sample-step2-dpm-solver-fast-2-seed0.png"),
        (["probe"], "probe.json"),
        (["robustness"], "robustness.json"),
    ],
)
def test_a_result_that_cannot_be_stored_is_refused_before_the_work(capsys, trained, tmp_path, command, file):
    copy = tmp_path / "digits"
    shutil.copytree(trained, copy)
    (copy / file).unlink(missing_ok=True)
    (copy / file).mkdir(parents=True)
    code, out, err = run(capsys, command[0], copy, *command[1:])
    assert (code, out) == (1, "")
    assert f"the output path must be a file, got '{copy / file}'" in err


def test_a_read_only_run_is_evaluated_into_another_file(capsys, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "access", lambda path, mode: (Path(path), mode) != (trained, os.W_OK)
    )  # root may write everywhere
    (trained / "evaluation.json").unlink(missing_ok=True)
    arguments = ["evaluate", trained, "--n", 10, "--steps", 2, "--reference", "digits:train:20", *CHEAP]
    code, _, err = run(capsys, *arguments)
    assert code == 1
    assert f"{trained} is read-only; give --out FILE" in err
    assert run(capsys, *arguments, "--out", tmp_path / "e.json")[0] == 0
    assert (tmp_path / "e.json").is_file()
    assert not (trained / "evaluation.json").exists()


def test_a_npz_needs_its_extractor_stated(capsys, folders, tmp_path):
    import numpy as np

    np.savez(tmp_path / "stats.npz", mu=np.zeros(192), sigma=np.eye(192))
    arguments = ["evaluate", "--images", folders[0], "--reference", tmp_path / "stats.npz", *CHEAP]
    code, _, err = run(capsys, *arguments)
    assert code == 1
    assert "--reference-extractor" in err
    code, _, err = run(capsys, *arguments, "--reference-extractor", "inception-pytorch-fid")
    assert code == 1
    assert "have extractor inception-pytorch-fid, expected 8×8 pixels" in err
    code, _, _ = run(capsys, *arguments, "--reference-extractor", "8×8 pixels")
    assert code == 0


def test_statistics_are_computed_once_with_their_card(capsys, tmp_path):
    arguments = ["data", "stats", "digits", "--split", "train", "--n", 20, *CHEAP]
    code, out, _ = run(capsys, *arguments, "--json")
    card = json.loads(out)
    assert code == 0
    assert (card["name"], card["split"], card["n"], card["image"]) == ("digits", "train", 20, [8, 8, 1])
    code, out, _ = run(capsys, *arguments, "--out", tmp_path / "digits.safetensors")
    assert code == 0
    assert f"--reference {tmp_path / 'digits.safetensors'}" in out
    assert card["created"] in out  # the same computation, not another one
    assert run(capsys, *arguments, "--out", tmp_path / "digits.npz")[0] == 1
