import pytest

from scalelong.training.loop import train
from tiny_runs import tiny_config


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run of six steps. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    train(tiny_config(), folder, quiet=True)
    return folder
