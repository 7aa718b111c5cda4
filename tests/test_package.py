"""The package as it is installed: light to import, typed, and clear about what is missing."""

import resource
import subprocess
import sys

import scalelong


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_help_answers_in_under_half_a_second_without_torch():
    command = [sys.executable, "-m", "scalelong", "--help"]
    times = []
    for _ in range(3):  # processor time of the command, which other tests running beside it disturb least
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert answer.returncode == 0
    assert "doctor" in answer.stdout
    assert min(times) < 0.5
    heavy = "('torch', 'numpy', 'diffusers')"
    probe = f"import sys; from scalelong.cli.app import app; print([m for m in {heavy} if m in sys.modules])"
    assert run(probe).stdout.strip() == "[]"


def test_every_public_name_can_be_imported():
    for name in scalelong.__all__:
        assert getattr(scalelong, name) is not None
    assert set(scalelong.__all__) <= set(dir(scalelong))


def test_apply_needs_torch_and_safetensors_only():
    """The base install: everything else is hidden from the import system."""
    code = """
import sys, importlib.abc
HIDDEN = 'diffusers accelerate transformers typer rich sklearn PIL matplotlib'.split()
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in HIDDEN:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Hide())
import torch, scalelong
from torch import nn
class Up(nn.Module):
    def __init__(self): super().__init__(); self.c = nn.Conv2d(8, 4, 1)
    def forward(self, x, skip): return self.c(torch.cat([x, skip], 1))
class Net(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Conv2d(3, 4, 1); self.m = nn.Conv2d(4, 4, 1); self.u = Up()
    def forward(self, x): s = self.a(x); return self.u(self.m(s), s)
net = scalelong.apply(Net(), scalelong.LearnableScaling(), sites=[scalelong.Site('u', 'skip', channels=4)])
print(scalelong.describe(net, torch.randn(1, 3, 4, 4)).rows[0].felt > 0)
try:
    scalelong.UViT
except scalelong.MissingExtraError as error:
    print(error)
from scalelong.cli import main
main(['--help'])
"""
    answer = run(code)
    lines = answer.stdout.splitlines()
    assert lines[0] == "True", answer.stderr
    assert "pip install 'scalelong[train]'" in lines[1]
    assert answer.returncode == 1
    assert "the scalelong command needs" in answer.stderr
    assert "pip install 'scalelong[train]'" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_dir_and_help_show_lazy_modules_in_a_fresh_process():
    code = """
import pydoc
import scalelong
assert {"apply", "UViT", "training", "models", "diffusion"} <= set(dir(scalelong)), dir(scalelong)
assert "attach" not in dir(scalelong)
assert {"train", "preset", "loop"} <= set(dir(scalelong.training)), dir(scalelong.training)
page = pydoc.render_doc(scalelong.training, renderer=pydoc.plaintext)
assert "train(config" in page and "optimizer: `optimizer(net)`" in page
for name, words in (("Limits", "ratio_growth:"), ("Alarm", "advice:"), ("KappaEstimate", "share_below_5")):
    assert words in pydoc.render_doc(getattr(scalelong, name), renderer=pydoc.plaintext), name
assert "timestep" in pydoc.render_doc(scalelong.UViT, renderer=pydoc.plaintext)
assert not hasattr(scalelong, "nothing")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
