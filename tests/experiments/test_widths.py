"""The coordinate check passes μP and fails everything else; transfer finds optima and resumes."""

import json
import math
from dataclasses import replace

import pytest

from scalelong import ConstantScaling, NoScaling, mup
from scalelong.cli import main
from scalelong.errors import InvalidValueError
from scalelong.experiments.coords import coordinate_check, overall
from scalelong.experiments.transfer import measure_transfer, optimum, spread
from scalelong.experiments.trials import TrialFile
from scalelong.experiments.widths import widened
from tiny_runs import tiny_config

WIDTHS = (32, 128)


def check(parametrization="mup", **settings):
    sizes = {"model.depth": 2, "model.embed_dim": 32, "model.num_heads": 2, "train.batch_size": 16}
    config = tiny_config("uvit-32", train__lr=1e-3, **{k.replace(".", "__"): v for k, v in (sizes | settings).items()})
    return coordinate_check(config, WIDTHS, [parametrization], base_width=32, seeds=(0, 1, 2))


def test_mup_passes_and_the_standard_parametrization_fails():
    assert overall(check("mup")) != "fail"
    rows = {row.layer: row for row in check("standard")}
    assert rows["mid_block.mlp.fc2"].verdict == "fail"
    assert rows["mid_block.mlp.fc2"].change.mean > 0.4


@pytest.mark.parametrize(
    ("role", "abc"),
    [
        ("input", (0.0, 0.0, 1.0)),  # a learning rate that shrinks
        ("input", (0.0, 0.5, 0.0)),  # initial values that shrink
        ("hidden", (0.0, 0.5, 0.0)),  # the standard learning rate
        ("hidden", (0.0, 0.0, 1.0)),  # one std at every width
        ("output", (0.0, 0.0, 0.0)),  # no factor on the output
    ],
)
def test_the_check_fails_when_a_rule_is_broken(role, abc, monkeypatch):
    monkeypatch.setitem(mup.ABC, role, abc)
    assert overall(check()) == "fail"


def test_the_check_fails_when_the_first_time_layer_is_an_input_layer(monkeypatch):
    roles = mup.roles

    def as_input(*args, **options):
        rows = roles(*args, **options).rows
        return mup.Roles(tuple(replace(r, lr=1.0, init=1.0) if r.name == "time_embed.0.weight" else r for r in rows))

    monkeypatch.setattr(mup, "roles", as_input)
    rows = {row.layer: row for row in check()}
    assert rows["time_embed.#"].verdict == "fail"


def test_the_check_passes_a_unet_by_channels():
    config = tiny_config("digits", train__batch_size=16, train__lr=1e-3, model__channels=(16, 32))
    rows = coordinate_check(config, (16, 64), ["mup"], seeds=(0, 1))
    assert sum(row.verdict == "fail" for row in rows) == 0


def test_widening_keeps_heads_and_the_initial_std_of_the_base_width():
    config = tiny_config("uvit-64", model__embed_dim=64, model__num_heads=4)
    wide = widened(config, 128)
    assert (wide.model.embed_dim, wide.model.num_heads, wide.mup.base_width) == (128, 8, 64)
    assert wide.model.init_std == config.model.init_std
    standard = widened(config, 256, "standard")
    assert standard.mup.base_width is None
    assert standard.model.init_std == pytest.approx(config.model.init_std / 2)
    unet = tiny_config("digits", model__channels=(16, 32))
    assert widened(unet, 32).model.channels == (32, 64)
    with pytest.raises(InvalidValueError, match="multiple of the head width 16"):
        widened(config, 40)


def test_the_standard_parametrization_has_no_rule_for_depth():
    config = tiny_config("uvit-64", model__embed_dim=64, model__num_heads=4, mup__base_depth=2)
    assert widened(config, 128, "standard").mup.base_depth is None
    assert widened(config, 128, "mup").mup.base_depth == 2


@pytest.mark.parametrize(
    ("own", "options", "expected"),
    [
        (None, {"base_depth": 2}, 2),  # without depths
        (2, {"depths": (4,)}, 2),  # the config's
        (2, {"depths": (4,), "base_depth": 6}, 6),
        (None, {"depths": (4,)}, None),
    ],
)
def test_transfer_trains_mup_alone_with_its_base_depth(own, options, expected, tmp_path, monkeypatch):
    seen = {}

    def keep(config):
        seen["standard" if config.mup.base_width is None else "mup"] = config.mup.base_depth
        return 1.0

    monkeypatch.setattr("scalelong.experiments.transfer.train_once", keep)
    config = tiny_config("uvit-32", model__embed_dim=32, model__num_heads=2, mup__base_depth=own)
    measure_transfer(config, widths=(32,), rates=(1e-3,), seeds=(0,), out=tmp_path, base_width=16, **options)
    assert seen == {"standard": None, "mup": expected}


def test_a_cell_that_diverges_at_every_rate_does_not_hide_the_others(tmp_path, monkeypatch, capsys):
    train = lambda config: None if config.model.embed_dim == 32 and config.seed else config.train.lr
    monkeypatch.setattr("scalelong.experiments.transfer.train_once", train)
    command = ["transfer", "uvit-32", "--widths=16,32", "--lrs=1e-3,3e-3", "--seeds=2", "--jobs=1", f"--out={tmp_path}"]
    assert run(*command, f"--figure={tmp_path / 'transfer.png'}") == 0
    printed = capsys.readouterr().out
    assert printed.count("diverged at every rate") == 2
    assert printed.count("(edge of the grid)") == 2
    assert run(*command, "--json") == 0
    curves = json.loads(capsys.readouterr().out)["curves"]
    assert [curve["best"] is None for curve in curves] == [False, True, False, True]


def test_the_optimum_of_a_parabola_in_log_lr_is_exact():
    losses = {lr: (math.log(lr) - math.log(0.003)) ** 2 + 1 for lr in (0.0005, 0.001, 0.002, 0.004, 0.01)}
    assert optimum(losses) == (pytest.approx(0.003), pytest.approx(losses[0.004]), True)
    assert optimum({0.1: 2.0, 0.2: 1.0}) == (pytest.approx(0.2), 1.0, False)
    assert optimum({0.1: 2.0, 0.2: 1.0, 0.4: None}) == (pytest.approx(0.2), 1.0, True)
    with pytest.raises(InvalidValueError, match="at least one run trains"):
        optimum({0.1: None})


def test_transfer_runs_its_grid_and_resumes_from_its_file(tmp_path, monkeypatch):
    config = tiny_config("uvit-32", model__embed_dim=32, model__num_heads=2, train__steps=3)
    grid = {"widths": (16, 32), "rates": (1e-3, 1e-2), "seeds": (0, 1), "out": tmp_path, "base_width": 16}
    curves = measure_transfer(config, scalings=(NoScaling(), ConstantScaling(0.7)), **grid)
    assert len(curves) == 2 * 2 * 2
    assert all(len(values) == 2 and None not in values for curve in curves for values in curve.losses.values())
    assert spread(curves) == {}  # of two learning rates each is an edge
    inside = [replace(curve, inside=True) for curve in curves]
    assert set(spread(inside)) == {"standard, none", "standard, cs-0.7", "mup, none", "mup, cs-0.7"}
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert len(lines) == 32
    (tmp_path / "trials.jsonl").write_text("\n".join(lines[:30]) + '\n{"key": "torn')
    monkeypatch.setattr("scalelong.experiments.transfer.train_once", lambda config: 1.5)
    again = measure_transfer(config, scalings=(NoScaling(), ConstantScaling(0.7)), **grid)
    changed = sum(value == 1.5 for curve in again for values in curve.losses.values() for value in values)
    assert changed == 2
    json.dumps([curve.to_dict() for curve in again])


def test_a_trial_runs_once(tmp_path):
    calls = []
    for _ in range(2):
        assert TrialFile(tmp_path / "trials.jsonl").run("a", lambda: calls.append(1) or {"x": 2}) == {"x": 2}
    assert len(calls) == 1


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return stopped.value.code or 0


def test_the_commands_print_tables_json_and_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--set=model.depth=2", "--set=train.batch_size=8", "--seeds=2", "--jobs=1"]
    coords = ["coords", "uvit-32", "--widths=32,64", "--parametrizations=standard", "--figure=coords.png", *small]
    assert run(*coords) == 0
    assert "decoder_pred" in capsys.readouterr().out
    transfer = ["transfer", "uvit-32", "--widths=16,32", "--lrs=1e-3,3e-3", "--steps=2", "--set=validate.n=8", *small]
    assert run(*transfer, "--figure=transfer.png") == 0
    assert "best learning rate" in capsys.readouterr().out
    assert run(*transfer, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["curves"]) == 4
    assert {path.name for path in tmp_path.glob("*.png")} == {"coords.png", "transfer.png"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["transfer", "--lrs=fast"], "--lrs must be"),
        (["transfer", "--widths=32,x"], "--widths must be"),
        (["coords", "--widths=64"], "two or more"),
        (["coords", "--parametrizations=sp"], "unknown parametrization"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(options, words, capsys):
    assert run(*options) == 1
    assert words in " ".join(capsys.readouterr().err.split())
