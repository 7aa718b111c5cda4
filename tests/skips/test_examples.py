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


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> dict[str, Path]:
    """An unconditional and a Stable-Diffusion pipeline with random weights, tiny."""
    import json

    from diffusers import AutoencoderKL, DDIMPipeline, DDIMScheduler, StableDiffusionPipeline, UNet2DModel
    from diffusers import UNet2DConditionModel as Conditional
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    folder, small = tmp_path_factory.mktemp("pipelines"), {"block_out_channels": (8, 16), "norm_num_groups": 4}
    torch.manual_seed(0)
    net = UNet2DModel(sample_size=8, layers_per_block=1, attention_head_dim=4, **small,
                      down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                      up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip
    DDIMPipeline(net, DDIMScheduler()).save_pretrained(folder / "ddim")
    words = ["<|startoftext|>", "<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"{letter}</w>" for letter in words[2:]]
    (folder / "vocab.json").write_text(json.dumps({word: k for k, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=8)
    text = CLIPTextConfig(vocab_size=len(words), hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                          num_attention_heads=2, max_position_embeddings=8, bos_token_id=0, eos_token_id=1)  # fmt: skip
    unet = Conditional(sample_size=8, layers_per_block=1, attention_head_dim=4, cross_attention_dim=8, **small,
                       down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                       up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))  # fmt: skip
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8)
    StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(text), tokenizer=tokenizer, unet=unet, scheduler=DDIMScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder / "sd")  # fmt: skip
    return {"ddim": folder / "ddim", "sd": folder / "sd"}


@pytest.mark.filterwarnings("ignore")  # diffusers' and transformers' own, about tiny models
@pytest.mark.parametrize("kind", ["ddim", "sd"])
def test_skip_tuning_and_freeu_on_a_pipeline(kind, pipelines, tmp_path, capsys):
    import numpy as np

    prompt = None if kind == "ddim" else "a fox"
    common = {"prompt": prompt, "steps": 2, "n": 2}
    sheet = load("skip_tuning").main(str(pipelines[kind]), rho=(1.0, 0.5), out=tmp_path / "s.png", **common)
    first, second = np.split(np.asarray(sheet), 2)
    assert not np.array_equal(first, second)
    assert "UNet" in capsys.readouterr().out
    sheet = load("freeu").main(str(pipelines[kind]), setting="sd1.5", out=tmp_path / "f.png", **common)
    without, with_freeu = np.split(np.asarray(sheet), 2)
    assert np.array_equal(without, first)  # ρ = 1 and the network as it is: bit for bit
    assert not np.array_equal(without, with_freeu)
    assert (tmp_path / "s.png").exists()
    assert (tmp_path / "f.png").exists()
