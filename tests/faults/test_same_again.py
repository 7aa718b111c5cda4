"""The same config and seed give the same losses, whoever watches."""

import pytest
from fault_runs import losses, small_config, weights

from scalelong.training.loop import train

STEPS = 6
OBSERVERS = {
    "nothing": {},
    "the monitor": {"monitor__every": 1},
    "validation": {"validate__every": 1},
    "samples": {"sample__every": 2, "sample__n": 4, "sample__steps": 2},
    "evaluation": {"evaluate__every": 3, "evaluate__n": 4, "evaluate__extractor": "pixels"},
    "all of them": {
        "monitor__every": 1,
        "validate__every": 1,
        "sample__every": 2,
        "sample__n": 4,
        "sample__steps": 2,
        "evaluate__every": 3,
        "evaluate__n": 4,
        "evaluate__extractor": "pixels",
    },
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("same") / "whole"
    train(small_config(train__steps=STEPS), folder, quiet=True)
    return folder


@pytest.mark.parametrize(
    "watched",
    [pytest.param(name, marks=pytest.mark.slow if "eval" in name or "all" in name else ()) for name in OBSERVERS],
)
@pytest.mark.filterwarnings("ignore")
def test_observing_changes_no_loss_and_no_weight(tmp_path, whole, note, watched):
    train(small_config(train__steps=STEPS, **OBSERVERS[watched]), tmp_path / "run", quiet=True)
    assert losses(tmp_path / "run") == losses(whole)
    assert weights(tmp_path / "run", STEPS) == weights(whole, STEPS)
    fault = "the same config and seed again" if watched == "nothing" else f"{watched} switched on"
    note("the same again", fault, 1, "losses and weights equal bit for bit")
