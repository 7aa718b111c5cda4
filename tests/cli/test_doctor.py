"""`scalelong doctor`, and how the command line answers."""

import json

import pytest

from scalelong.cli import main


def test_doctor_prints_versions_devices_and_parts(capsys):
    with pytest.raises(SystemExit) as left:
        main(["doctor"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    for word in ("torch", "diffusers", "cpu", "safetensors"):
        assert word in out


def test_doctor_speaks_json_and_says_what_a_missing_part_would_give(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--json"])
    answer = json.loads(capsys.readouterr().out)
    parts = {part["name"]: part for part in answer["parts"]}
    assert parts["torch"]["version"]
    assert all(part["gives"] for part in answer["parts"])
    assert [d["device"] for d in answer["devices"]][-1] == "cpu"


def test_an_unknown_command_leaves_with_an_error(capsys):
    with pytest.raises(SystemExit) as left:
        main(["trian"])
    assert left.value.code != 0


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("scalelong ")
