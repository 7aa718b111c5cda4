"""Text-to-image on latents, as the paper's MS-COCO runs: a small autoencoder and a small CLIP made here, by path."""

import json

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from tiny_runs import tiny_config
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from scalelong import ConstantScaling, load_run
from scalelong.training.generate import Request, generate
from scalelong.training.loop import train
from scalelong.training.run import read_lines


def small_clip(folder):
    words = [
        "<|startoftext|>",
        "<|endoftext|>",
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"{c}</w>" for c in "abcdefghijklmnopqrstuvwxyz"),
    ]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({word: k for k, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPTextConfig(vocab_size=len(words), max_position_embeddings=77, bos_token_id=0, eos_token_id=1, **sizes)
    torch.manual_seed(0)
    CLIPTextModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_vae(folder):
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = AutoencoderKL(block_out_channels=(8, 8, 8, 8), latent_channels=4, norm_num_groups=4, **blocks)
    vae.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["uvit", "unet"])
def test_a_latent_text_to_image_run_trains_and_samples(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    images = tmp_path / "images"
    images.mkdir()
    rng = np.random.default_rng(0)
    for k in range(12):
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(images / f"{k}.png")
        (images / f"{k}.txt").write_text(f"picture {'abc'[k % 3]}")
    settings = {
        "data__name": str(images), "data__validation": "train", "data__vae": str(small_vae(tmp_path / "vae")),
        "data__text": str(small_clip(tmp_path / "clip")), "data__text_tokens": 7, "train__steps": 2,
        "train__batch_size": 4, "train__precision": "fp32", "validate__n": 4,
    }  # fmt: skip
    preset = "coco-uvit-s"
    if kind == "unet":
        preset = "coco-unet"
        settings |= {"model__channels": "32,32,32", "model__layers": 1}
    config = tiny_config(preset, **settings, scaling=ConstantScaling(0.8))
    train(config, tmp_path / "run", quiet=True)
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 2
    trained = load_run(tmp_path / "run")
    assert (trained.facts.shapes.channels, trained.facts.shapes.size, trained.facts.shapes.text_tokens) == (4, 8, 7)
    request = Request(n=2, sampler="dpm-solver++", steps=3, guidance=2.0, prompts=["picture a", "picture b"])
    made = np.concatenate(list(generate(trained.net, trained.config, trained.facts, request)))
    assert made.shape == (2, 64, 64, 3)
    assert not np.array_equal(made[0], made[1])
