"""Every fault that was tried is noted; `make test-faults` makes docs/reliability.md of the notes."""

import dataclasses
import json
import os
from pathlib import Path

import pytest


class Notes:
    """Counts by fault, kept in the file that SCALELONG_RELIABILITY names (nowhere without it)."""

    def __init__(self):
        named = os.environ.get("SCALELONG_RELIABILITY")
        self.path = Path(named).resolve() if named else None

    def __call__(self, kind, fault, tried, happened, lost="nothing"):
        assert tried > 0, fault
        if self.path is None:
            return
        rows = json.loads(self.path.read_text(encoding="utf-8"))["faults"] if self.path.exists() else []
        same = next((row for row in rows if row["fault"] == fault), None)
        if same is None:
            rows.append({"kind": kind, "fault": fault, "tried": tried, "happened": happened, "lost": lost})
        else:
            same.update(tried=same["tried"] + tried, happened=happened, lost=lost)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"faults": rows}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def note():
    return Notes()


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """A cache of this suite's own, so that nothing of the user's is touched by bombs and fuzzing."""
    before = os.environ.get("SCALELONG_CACHE")
    os.environ["SCALELONG_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["SCALELONG_CACHE"]
    else:
        os.environ["SCALELONG_CACHE"] = before


@pytest.fixture(scope="session")
def imported(tmp_path_factory):
    """Everything that a run imports is imported here once, so that copies of this process start in no time.

    Nothing is trained here: copies of a process whose autograd has run are not a process as it starts.
    """
    from fault_runs import small_config

    import scalelong.monitor.monitor
    import scalelong.training.loop  # noqa: F401
    from scalelong.runs.run import Run, load_run
    from scalelong.training.examples import Examples
    from scalelong.training.trainer import Trainer

    config = small_config()
    examples = Examples(config, "train")
    trainer = Trainer(config, examples)
    run = Run(tmp_path_factory.mktemp("imported"))
    run.write_record({"config": config.to_dict(), **dataclasses.asdict(examples.facts())})
    run.save_model(trainer.net, 0)
    load_run(run.folder)
