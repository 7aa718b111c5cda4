"""The examples run, each with tiny settings, and stay short."""

import importlib.util
from pathlib import Path

import pytest
import torch

import scalelong
from peers import lucidrains

FOLDER = Path(__file__).parents[2] / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_at_most_sixty_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


def test_scale_a_unet(capsys):
    load("scale_a_unet").main()
    told = capsys.readouterr().out
    assert "UNet2DModel: 9 long skips, ConstantScaling(kappa=0.7, reverse=False)" in told
    assert told.count("the output moved by") == 3  # CS, CS behind the norms, LS after training
    assert told.count("the output is bit for bit the original") == 2  # LS from the identity, and removed
    assert "past norm: 1.000 … 1.000" in told
    assert "\033" not in told


def test_diffusers_unconditional(tmp_path, capsys):
    from diffusers import DDPMPipeline

    losses = load("diffusers_unconditional").main(steps=3, batch_size=4, out=tmp_path)
    assert len(losses) == 3
    assert torch.tensor(losses).isfinite().all()
    pipe = DDPMPipeline.from_pretrained(tmp_path)
    rows = scalelong.describe(scalelong.load_scaling(pipe.unet, tmp_path / "scaling")).rows
    assert [row.coefficient for row in rows] == [0.7**k for k in range(4)]


def test_finetune_stable_diffusion(tmp_path, capsys):
    from diffusers import UNet2DConditionModel

    example = load("finetune_stable_diffusion")
    example.SMALL |= {"block_out_channels": (32, 32), "layers_per_block": 1, "sample_size": 8, "cross_attention_dim": 8}
    assert len(example.main(steps=2, batch_size=2, out=tmp_path)) == 2
    assert "LearnableScaling" in capsys.readouterr().out
    again = scalelong.load_scaling(UNet2DConditionModel.from_pretrained(tmp_path), tmp_path)
    assert len(scalelong.describe(again).rows) == 4
    assert len(example.main(unet=str(tmp_path), steps=1, batch_size=1, out=tmp_path / "again")) == 1


def test_lucidrains_unet(capsys):
    lucidrains()
    assert len(load("lucidrains_unet").main(steps=2, batch_size=2, dim=8)) == 2
    assert "Unet: 5 long skips, LearnableScaling" in capsys.readouterr().out


def test_monai_segmentation(capsys):
    scores = load("monai_segmentation").main(steps=2, batch_size=2)
    assert len(scores) == 2
    assert all(0 <= score <= 1 for score in scores.values())
    assert "BasicUNet: 4 long skips" in capsys.readouterr().out
