"""What is published: wheel and sdist, installed in environments of their own, and the README's install path.

The base install is an environment with nothing but the wheel and what it requires. An extra is installed on top of it
in another environment, so that torch is unpacked once.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from scalelong.version import __version__

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

APPLY = """
import torch, scalelong
from torch import nn
class Up(nn.Module):
    def __init__(self): super().__init__(); self.c = nn.Conv2d(8, 4, 1)
    def forward(self, x, skip): return self.c(torch.cat([x, skip], 1))
class Net(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Conv2d(3, 4, 1); self.m = nn.Conv2d(4, 4, 1); self.u = Up()
    def forward(self, x): s = self.a(x); return self.u(self.m(s), s)
net = scalelong.apply(Net(), scalelong.ConstantScaling(0.5), example=(torch.randn(1, 3, 4, 4),))
watch = scalelong.StabilityMonitor(net, every=1)
with watch.step(1):
    net(torch.randn(2, 3, 4, 4)).mean().backward()
assert watch.last["step"] == 1
print(scalelong.describe(net), scalelong.__version__)
"""
EXTRAS = {
    "text": "import transformers, scalelong.integrations.transformers",
    "emoji": "import resvg_py",
    "datasets": "import datasets",
    "export": "import onnx, onnxruntime, onnxscript",
    "lightning": "from scalelong.integrations.lightning import StabilityCallback; StabilityCallback(every=1)",
    "tensorboard": "from torch.utils.tensorboard import SummaryWriter",
    "wandb": "import wandb",
}


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=1800, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Wheel and sdist, built from a copy of the tracked files."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source)
    return folder / "dist"


def environment(dist):
    """Packages of this checkout from `dist`, all others in the tested versions."""
    links = f"{dist} {os.environ.get('PIP_FIND_LINKS', '')}"
    settings = {"PIP_FIND_LINKS": links, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "OMP_NUM_THREADS": "1"}
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | settings


def make(folder, path=None):
    """An environment; `path` is the site-packages of another one that it sees too."""
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python*/site-packages")
    if path is not None:
        (site / "base.pth").write_text(f"{path}\n")
    return folder / "bin" / "python", site


@pytest.fixture(scope="module")
def base(dist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    python, site = make(folder / "venv")
    run(python, "-m", "pip", "install", "-q", "scalelong", env=environment(dist))
    yield python, site
    shutil.rmtree(folder)  # more than a gigabyte, which pytest would keep


def test_the_wheel_holds_the_package_with_its_trained_network_and_nothing_else(dist):
    (wheel,) = dist.glob("*.whl")
    assert wheel.name == f"scalelong-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"scalelong", f"scalelong-{__version__}.dist-info"}
    wanted = ("py.typed", "__init__.pyi", "training/presets.toml", "runs/shipped/digits/config.json")
    assert {f"scalelong/{name}" for name in wanted} <= set(names)
    assert "scalelong/runs/shipped/digits/model/diffusion_pytorch_model.safetensors" in names
    assert wheel.stat().st_size < 4e6


def test_the_sdist_builds_the_same_wheel(dist, tmp_path):
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    assert sdist.name == f"scalelong-{__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        tmp_path / "dist",
        tmp_path / sdist.stem[:-4],
    )
    (again,) = (tmp_path / "dist").glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_the_changelog_has_this_version():
    assert re.search(
        rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M
    )


def test_the_base_install_scales_and_monitors_and_names_what_the_command_needs(base, tmp_path):
    python, site = base
    assert __version__ in run(python, "-c", APPLY, cwd=tmp_path)
    installed = {path.name.split("-")[0].lower() for path in site.glob("*.dist-info")}
    assert not installed & {"diffusers", "accelerate", "transformers", "typer", "matplotlib", "torchvision"}
    done = subprocess.run([python.parent / "scalelong", "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'scalelong[train]'" in done.stderr


@pytest.fixture(scope="module")
def trained(dist, base, tmp_path_factory):
    """The extra [train] on top of the base."""
    folder = tmp_path_factory.mktemp("train")
    python, _ = make(folder / "venv", base[1])
    run(python, "-m", "pip", "install", "-q", "scalelong[train]", env=environment(dist))
    yield python
    shutil.rmtree(folder)


def test_the_train_extra_samples_trains_and_reports(trained, tmp_path):
    settings = {**os.environ, "SCALELONG_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    scalelong = lambda *words: run(trained, "-m", "scalelong", *words, cwd=tmp_path, env=settings)
    scalelong("sample", "digits", "--n", "4", "--steps", "2", "--out", "grid.png")
    scalelong("train", "digits", "--steps", "2", "--out", "run", "--quiet", "--set", "sample.n=4")
    scalelong("report", "run", "--out", "report.html")
    scalelong("export", "digits", "--torch-export", "--out", "exported")
    assert (tmp_path / "grid.png").is_file()
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "exported" / "model.pt2").is_file()
    without = subprocess.run(
        [trained, "-m", "scalelong", "export", "digits", "--onnx"], capture_output=True, text=True, env=settings
    )
    assert without.returncode == 1
    assert "pip install 'scalelong[export]'" in without.stderr


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_installs_on_its_own(extra, dist, base, tmp_path):
    python, site = make(tmp_path / "venv", base[1])
    run(python, "-m", "pip", "install", "-q", f"scalelong[{extra}]", env=environment(dist))
    run(python, "-c", f"import scalelong; {EXTRAS[extra]}", cwd=tmp_path)
    assert not list(site.glob("torchvision*"))
    shutil.rmtree(tmp_path / "venv")


def test_the_extras_are_those_that_are_tested():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(extras) == {*EXTRAS, "train", "all", "dev"}


def test_the_install_lines_of_the_readme_work_as_they_stand(dist, base, tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("pip install")]
    assert lines
    python, _ = make(tmp_path / "venv", base[1])
    settings = environment(dist) | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    for line in lines:  # `pip install .` is meant for a clone
        run("bash", "-c", line, env=settings, cwd=dist.parent / "source")
    assert __version__ in run(python, "-c", "import scalelong; print(scalelong.__version__)", cwd=tmp_path)
