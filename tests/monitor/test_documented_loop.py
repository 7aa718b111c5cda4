"""The loop in docs/monitor.md and the example run unchanged, on third-party U-Nets."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from peers import lucidrains
from scalelong.monitor.log import read_stability

ROOT = Path(__file__).resolve().parents[2]


def documented_loop():
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8"), flags=re.S)[0]


def test_the_documented_loop_monitors_lucidrains_unet(tmp_path, monkeypatch, capsys):
    net = lucidrains().Unet(dim=8, dim_mults=(1, 2), attn_dim_head=4, attn_heads=2)
    monkeypatch.chdir(tmp_path)
    g = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(4, 3, 8, 8, generator=g)
    batches = [(draw(), torch.randint(1000, (4,), generator=g), draw()) for _ in range(40)]
    names = {"net": net, "batches": batches, "x_t": batches[0][0], "t": batches[0][1]}
    names["optimizer"] = torch.optim.AdamW(net.parameters(), 1e-3)
    code = documented_loop()
    assert len([line for line in code.splitlines() if "watch" in line]) <= 6
    exec(code, names)
    log = read_stability(tmp_path / "stability.jsonl")
    assert [e["step"] for e in log.entries] == [10, 20, 30, 40]
    assert log.header["network"] == "Unet"
    last = log.entries[-1]
    assert len(log.header["skips"]) == len(last["oscillation"]["probe"]["backbone"]) == 5
    assert None not in last["probe"]["ratio"] + last["oscillation"]["probe"]["backbone"]
    assert last["loss"]["steps"] == 10
    assert "no alarms" in capsys.readouterr().out
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("kappa", [None, 0.8])
def test_the_example_runs_and_is_short(kappa, tmp_path, capsys):
    path = ROOT / "examples" / "watch_your_own_loop.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60
    spec = importlib.util.spec_from_file_location("watch_your_own_loop", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    watch = module.main(steps=20, kappa=kappa, out=tmp_path / "s.jsonl")
    entry = read_stability(tmp_path / "s.jsonl").entries[-1]
    assert entry == watch.last
    assert entry["kappa"]["mean"] == pytest.approx([(kappa or 1.0) ** k for k in range(6)], rel=1e-4)
    assert "6 long skips; step 20" in capsys.readouterr().out
