"""docs/recipes.md: its lines, inserted into the loops that they are for, scale, record and change nothing else."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from recipe_loops import LOOPS

import scalelong
from peers import lucidrains, network_packages

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the libraries' own warnings


def added_lines(title: str) -> list[str]:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    (diff,) = re.findall(r"```diff\n(.*?)```", section, flags=re.S)
    return [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]


def run(title: str, lines: list[str]) -> dict:
    """Run a loop with these lines at its marks, every snapshot recorded."""
    lines = [line.replace('out="stability.jsonl"', 'out="stability.jsonl", every=1') for line in lines]
    parts = LOOPS[title].split("# +\n")
    code = "".join(part + line + "\n" for part, line in zip(parts, [*lines, ""], strict=True))
    torch.manual_seed(0)
    np.random.seed(0)  # torchcfm pairs noise and data with NumPy's
    names: dict = {"__name__": "recipe"}
    exec(compile(code, title, "exec"), names)
    return names


@pytest.mark.parametrize("title", LOOPS)
def test_the_two_lines_of_a_recipe_scale_and_record(title, tmp_path, monkeypatch):
    (lucidrains if "lucidrains" in title else network_packages)()
    monkeypatch.chdir(tmp_path)
    names = run(title, added_lines(title))
    watch = names["watch"]
    rows = scalelong.describe(watch.root).rows
    assert [row.coefficient for row in rows] == pytest.approx([0.7**k for k in range(len(rows))])
    assert len(rows) >= 2
    assert watch.last["step"] == 6  # accumulated gradients, sampling and validation count for nothing
    assert all(value > 0 for value in watch.last["train"]["backbone"])
    assert watch.last["train"]["n"] == {"lucidrains' README": 16, "diffusers' `train_unconditional.py`": 8}.get(
        title, 4
    )
    assert (tmp_path / "stability.jsonl").is_file()
    copies = [names[name] for name in ("ema_model",) if isinstance(names.get(name), torch.nn.Module)]
    copies += [names["trainer"].ema.ema_model.model] if "trainer" in names else []
    for copy in copies:  # an EMA that copies the network has the scaling too
        assert [row.coefficient for row in scalelong.describe(copy).rows] == [row.coefficient for row in rows]


@pytest.mark.parametrize("title", LOOPS)
def test_the_monitor_changes_no_weight(title, tmp_path, monkeypatch):
    (lucidrains if "lucidrains" in title else network_packages)()
    weights = []
    for name, second in (("with", added_lines(title)[1]), ("without", "pass")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        net = run(title, [added_lines(title)[0], second])["model"]
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(*weights)
