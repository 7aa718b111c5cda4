"""Small CLIP and VAE weights in the format of the real ones, made by the test."""

import json

import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


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
