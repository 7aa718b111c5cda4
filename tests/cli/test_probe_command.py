"""`scalelong probe` on runs, and `probe.every` during training."""

import json

import pytest

from scalelong.cli import main
from scalelong.errors import DataError, UnknownNameError
from scalelong.runs.run import Run
from scalelong.training import train
from tiny_runs import read_lines, tiny_config

OPTIONS = ("--n", "200", "--n-test", "100", "--t", "0.05", "--no-cache")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = tiny_config(probe__every=3, probe__n=60, probe__t="0.1", validate__every=3)
    return train(config, tmp_path_factory.mktemp("probe") / "run", quiet=True).run


def command(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["probe", *map(str, words)])
    return stopped.value.code, capsys.readouterr()


def test_training_logs_probes(run):
    probes = {entry["step"]: entry for entry in read_lines(run.metrics_path) if "probe_accuracy" in entry}
    assert list(probes) == [3, 6]
    assert 0 <= probes[6]["probe_accuracy"] <= 1
    assert probes[6]["probe_block"] in ("in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1")
    assert run.column("probe_accuracy").last == probes[6]["probe_accuracy"]


def test_probing_does_not_change_training(run, tmp_path):
    plain = train(tiny_config(validate__every=3), tmp_path / "plain", quiet=True).run
    assert plain.column("loss").last == run.column("loss").last


def test_it_prints_a_table_writes_json_and_draws_a_heat_map(run, capsys):
    code, printed = command(capsys, run.folder, *OPTIONS)
    assert code in (0, None)
    for word in ("mid_block", "out_blocks.1", "best:", "95 %", "untrained network", "pixels", "chance", "probe.json"):
        assert word in printed.out
    stored = json.loads((run.folder / "probe.json").read_text())
    assert [len(row) for row in stored["accuracy"]] == [1] * 5
    assert (stored["n_train"], stored["n_test"]) == (200, 100)
    assert stored["best"]["accuracy"] == max(map(max, stored["accuracy"]))
    assert (run.folder / "probe.png").stat().st_size > 5000


def test_json_blocks_and_a_checkpoint(run, capsys, tmp_path):
    words = (*OPTIONS, "--layers", "mid_block,out_blocks.0", "--step", "4", "--no-baselines", "--json")
    code, printed = command(capsys, run.folder, *words, "--out", tmp_path / "probe.svg")
    assert code in (0, None)
    result = json.loads(printed.out)
    assert result["blocks"] == ["mid_block", "out_blocks.0"]
    assert result["pixels"] is None
    assert (tmp_path / "probe.svg").is_file()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--layers", "mid_blok"), "mid_block"),
        (("--t", "7"), "--t must be from 0 to 1"),
        (("--t", "x"), "numbers separated by commas"),
        (("--fit", "svm"), "lbfgs"),
        (("--n", "0"), "--n must be an integer >= 1"),
        (("--step", "5"), "one of"),
    ],
)
def test_mistakes_are_explained_in_one_sentence(run, capsys, words, expected):
    code, printed = command(capsys, run.folder, *OPTIONS, *words)
    assert code == 1
    assert expected in printed.err
    assert len(printed.err.splitlines()) == 1


def test_data_without_classes_is_refused_before_training(tmp_path):
    import numpy as np

    np.save(tmp_path / "grey.npy", np.random.default_rng(0).integers(0, 255, (40, 8, 8, 1), dtype=np.uint8))
    settings = {"data__name": str(tmp_path / "grey.npy"), "data__channels": 1, "data__holdout": 0.2, "probe__every": 2}
    with pytest.raises(DataError, match="classes"):
        train(tiny_config(**settings), tmp_path / "run", quiet=True)


def test_an_unknown_block_is_refused_before_training(tmp_path):
    with pytest.raises(UnknownNameError, match="out_blocks.1"):
        train(tiny_config(probe__every=2, probe__layers="last"), tmp_path / "run", quiet=True)
    assert not Run(tmp_path / "run").metrics_path.exists()
