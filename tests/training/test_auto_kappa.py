"""`--scaling auto`: the number is chosen once, stored in config.json, and kept when the run resumes."""

import json

import pytest

from scalelong.cli import main
from scalelong.experiments.plan import plan, scaling_variants
from scalelong.runs.run import Run, load_run
from scalelong.training import train
from scalelong.training.auto import resolve_kappa
from tiny_runs import TINY, tiny_config


def test_a_run_stores_what_auto_chose_and_resumes_without_choosing_again(tmp_path, monkeypatch, capsys):
    config = tiny_config("digits-uvit", scaling="auto", train__steps=2)
    train(config, tmp_path / "run")
    assert "scaling auto: kappa = " in capsys.readouterr().err
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    kappa = stored["scaling"]["kappa"]
    assert isinstance(kappa, float)
    assert stored["kappa"] == kappa
    assert load_run(tmp_path / "run").net.config["scaling"]["kappa"] == kappa

    def never(*_):
        raise AssertionError("chosen again")

    monkeypatch.setattr("scalelong.training.auto.resolve_kappa", never)
    assert train(tiny_config("digits-uvit", scaling="auto", train__steps=3), tmp_path / "run", quiet=True).step == 3


def test_all_seeds_get_the_same_kappa():
    config = tiny_config("digits-uvit", scaling="auto")
    kappas = {resolve_kappa(tiny_config("digits-uvit", scaling="auto", seed=seed))[0].kappa for seed in (0, 5)}
    assert len(kappas) == 1
    assert not resolve_kappa(config)[0].scaling.unresolved


def test_a_comparison_names_the_variant_auto_and_accepts_its_runs_again(tmp_path):
    settings = [f"{key}={value}" for key, value in TINY.items()]
    variants = scaling_variants("digits-uvit", "none,auto", settings=settings)
    assert [variant.name for variant in variants] == ["none", "cs-auto"]
    job = plan(variants, [0], tmp_path)[1]
    train(job.config, job.folder, quiet=True)
    assert isinstance(Run(job.folder).config.scaling.kappa, float)
    plan(variants, [0], tmp_path)  # does not refuse the folder


def test_the_dry_run_prints_the_number(capsys):
    settings = [f"--set={key}={value}" for key, value in TINY.items() if key != "train.steps"]
    with pytest.raises(SystemExit) as stopped:
        main(["train", "digits-uvit", "--scaling", "auto", "--dry-run", *settings])
    assert stopped.value.code in (0, None)
    assert isinstance(json.loads(capsys.readouterr().out)["scaling"]["kappa"], float)
