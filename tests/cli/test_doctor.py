"""`scalelong doctor`, and how the command line answers."""

import json

import pytest

from scalelong.cli import main


def test_doctor_prints_versions_devices_and_parts(capsys, measured):
    with pytest.raises(SystemExit) as left:
        main(["doctor"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    for word in ("torch", "diffusers", "cpu", "safetensors"):
        assert word in out


def test_doctor_speaks_json_and_says_what_a_missing_part_would_give(capsys, measured):
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


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A cache of its own, and one preset small enough to be timed in a test."""
    from scalelong.training import speed

    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speed, "timed", lambda: ["digits"])
    monkeypatch.setattr(speed, "FLOP", 1e8)
    return tmp_path / "cache"


def answer_of(capsys, *words):
    with pytest.raises(SystemExit) as left:
        main([*words, "--json"])
    assert left.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_doctor_measures_once_and_presets_then_print_minutes(capsys, measured):
    from scalelong.training.presets import sizes

    assert answer_of(capsys, "presets")[0]["minutes"] is None
    first = answer_of(capsys, "doctor")
    system, speed = first["system"], first["speed"]
    assert system["usable_cores"] >= 1
    assert system["memory"] > system["memory_available"] > 0
    assert system["cache"] == str(measured)
    assert min(system["cache_free"], system["folder_free"]) > 0
    assert "torch" in system["kernels"]
    assert speed["threads"] == 1
    again = answer_of(capsys, "doctor")
    assert again["speed"] == speed  # from the cache
    row = next(row for row in answer_of(capsys, "presets") if row["name"] == "digits")
    assert row["minutes"] == pytest.approx(speed["seconds"]["digits"] * sizes()["digits"]["steps"] / 60)
    assert speed["seconds"]["digits"] > 0


def test_a_preset_that_was_not_timed_is_extrapolated_from_its_kind():
    from scalelong.training.presets import sizes
    from scalelong.training.speed import Speed

    name = "cifar10-uvit-s"
    size = sizes()[name]
    speed = Speed("cpu", 1, "2", "cpu", "today", {}, {"uvit": 1e9})
    assert speed.minutes(name) == pytest.approx(size["flop_per_step"] * size["steps"] / 1e9 / 60)
    assert speed.minutes("cifar10-unet") is None


def test_a_measurement_of_another_machine_is_not_used(measured, monkeypatch):
    from scalelong.training import speed

    values = {"machine": "another", "threads": 1, "torch": "2.0", "device": "cpu", "measured": "x", "seconds": {}}
    measured.mkdir(parents=True)
    (measured / "speed.json").write_text(json.dumps({**values, "flops": {}}))
    assert speed.stored_speed() is None
    (measured / "speed.json").write_text("{}")
    assert speed.stored_speed() is None


@pytest.mark.parametrize("environment", [{}, {"DISPLAY": ":0", "CI": "true"}])
def test_no_browser_is_opened_without_a_screen_or_in_ci(environment, monkeypatch, capsys, tmp_path):
    import webbrowser

    from scalelong.cli._shared import open_page

    for name in ("DISPLAY", "WAYLAND_DISPLAY", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(webbrowser, "open", lambda address: pytest.fail("opened a browser"))
    open_page(tmp_path / "report.html")
    assert str(tmp_path / "report.html") in capsys.readouterr().err


def test_the_page_is_opened_where_there_is_a_screen(monkeypatch, tmp_path, capsys):
    import webbrowser

    from scalelong.cli._shared import open_page

    opened = []
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    open_page(tmp_path / "report.html")
    assert opened == [(tmp_path / "report.html").as_uri()]
    assert capsys.readouterr().err == ""
