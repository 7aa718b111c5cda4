"""DINOv2 and CLIP with small random weights in their true formats, against transformers' own processing and forward."""

import numpy as np
import pytest
import torch
from small_pictures import pictures
from transformers import (
    BitImageProcessorPil,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    Dinov2Config,
    Dinov2Model,
)

from scalelong.data import load
from scalelong.errors import EvaluationError
from scalelong.evaluation import build_extractor, evaluate_images
from scalelong.evaluation.transformer import IMAGENET, OPENAI

IMAGES = torch.from_numpy(pictures(3))


@pytest.fixture(scope="module")
def dinov2():
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=1, image_size=28, patch_size=14)
    return Dinov2Model(config).eval()


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A folder as the hub has it: config.json, model.safetensors and a tokenizer."""
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**small, "image_size": 32, "patch_size": 8}
    text = {**small, "vocab_size": 8, "max_position_embeddings": 6, "bos_token_id": 6, "eos_token_id": 7}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)).save_pretrained(folder)
    words = ["a</w>", "b</w>", "c</w>", "d</w>", "e</w>", "f</w>", "<|startoftext|>", "<|endoftext|>"]
    CLIPTokenizer(vocab={word: k for k, word in enumerate(words)}, merges=[]).save_pretrained(folder)
    return folder


def test_dinov2_is_transformers_class_token_after_its_own_preprocessing(dinov2, tmp_path):
    dinov2.save_pretrained(tmp_path)
    extractor = build_extractor("dinov2", tmp_path)
    size = {"height": 224, "width": 224}
    processor = BitImageProcessorPil(
        size=size, do_center_crop=False, resample=3, image_mean=IMAGENET[0], image_std=IMAGENET[1]
    )
    x = processor([image.numpy() for image in IMAGES], return_tensors="pt", input_data_format="channels_last")
    with torch.inference_mode():
        expected = dinov2(x["pixel_values"]).last_hidden_state[:, 0]
        torch.testing.assert_close(extractor(IMAGES), expected, rtol=1e-4, atol=1e-4)
    assert extractor.name == "dinov2 ViT-64/14"
    assert not extractor.is_fid


def meta_checkpoint(network):
    """The same weights under Meta's names, as dinov2_vits14_pretrain.pth has them."""
    state, names = {}, {"layer_scale1.lambda1": "ls1.gamma", "layer_scale2.lambda1": "ls2.gamma"}
    own = network.state_dict()
    for key, tensor in own.items():
        if key.startswith("encoder.layer."):
            number, rest = key.removeprefix("encoder.layer.").split(".", 1)
            if ".q_proj." in rest or ".k_proj." in rest or ".v_proj." in rest:
                continue
            rest = rest.replace("attention.o_proj", "attn.proj")
            state[f"blocks.{number}.{names.get(rest, rest)}"] = tensor
        else:
            for theirs, ours in (
                ("embeddings.position_embeddings", "pos_embed"),
                ("embeddings.patch_embeddings.projection", "patch_embed.proj"),
                ("embeddings.", ""),
                ("layernorm", "norm"),
            ):
                key = key.replace(theirs, ours)
            state[key] = tensor
    for number in range(network.config.num_hidden_layers):
        for kind in ("weight", "bias"):
            parts = [own[f"encoder.layer.{number}.attention.{name}_proj.{kind}"] for name in "qkv"]
            state[f"blocks.{number}.attn.qkv.{kind}"] = torch.cat(parts)
    return state


def test_metas_checkpoint_gives_the_same_features_and_hash(dinov2, tmp_path):
    dinov2.save_pretrained(tmp_path / "folder")
    torch.save(meta_checkpoint(dinov2), tmp_path / "dinov2_vits14_pretrain.pth")
    folder, file = (build_extractor("dinov2", tmp_path / name) for name in ("folder", "dinov2_vits14_pretrain.pth"))
    assert file.weights == folder.weights
    with torch.inference_mode():
        torch.testing.assert_close(file(IMAGES), folder(IMAGES), rtol=1e-5, atol=1e-5)
    broken = {key: value for key, value in meta_checkpoint(dinov2).items() if "blocks.1.mlp.fc2" not in key}
    torch.save(broken, tmp_path / "broken.pth")
    with pytest.raises(EvaluationError, match="2 tensors missing"):
        build_extractor("dinov2", tmp_path / "broken.pth")


def test_clip_is_transformers_image_embedding_after_its_own_preprocessing(clip_folder):
    extractor, network = build_extractor("clip", clip_folder), CLIPModel.from_pretrained(clip_folder).eval()
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size=32, image_mean=OPENAI[0], image_std=OPENAI[1]
    )
    pixels = processor([image.numpy() for image in IMAGES], return_tensors="pt", input_data_format="channels_last")
    tokens = CLIPTokenizer.from_pretrained(clip_folder)(["a b c", "d e a"], return_tensors="pt")
    with torch.inference_mode():
        output = network(**tokens, **pixels)
        torch.testing.assert_close(extractor(IMAGES), output.image_embeds, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(extractor.embed_text(["a b c", "d e a"]), output.text_embeds, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*too few:scalelong.errors.EvaluationWarning")
def test_one_call_computes_metrics_of_three_extractors_each_once(dinov2, clip_folder, extractor, tmp_path):
    dinov2.save_pretrained(tmp_path)
    others = {"dinov2": build_extractor("dinov2", tmp_path), "clip": build_extractor("clip", clip_folder)}
    passes = dict.fromkeys(others, 0)
    for name, other in others.items():
        other.register_forward_hook(lambda *_, name=name: passes.__setitem__(name, passes[name] + 1))
    names = ["clip-score", "frechet", "fd-dinov2", "cmmd", "precision"]
    images, reference = pictures(12), pictures(10, seed=1)
    captions = ["a b c", "d e a"] * 6
    result = evaluate_images(
        iter([images[:8], images[8:]]), reference, extractor, metrics=names, extractors=others, captions=captions
    )
    assert list(result.values) == names
    assert passes == {"dinov2": 3, "clip": 3}  # two batches of images and one of the reference
    assert result.card.metrics["cmmd"].extractor == others["clip"].name
    assert result.card.metrics["fd-dinov2"].weights == others["dinov2"].weights
    alone = evaluate_images(images, reference, others["clip"], metrics=["clip-score"], captions=captions)
    assert alone.values["clip-score"].value == pytest.approx(result.values["clip-score"].value, rel=1e-6)
    by_hand = others["clip"].embed_text(captions).numpy() * others["clip"](torch.from_numpy(images)).detach().numpy()
    assert alone.values["clip-score"].value == pytest.approx(100 * np.maximum(by_hand.sum(1), 0).mean(), rel=1e-4)
    named = ["digits:validation:40", load("digits", "validation").images[:40]]
    words = ["a b c" if k % 3 else "d e a" for k in range(40)]
    results = [
        evaluate_images(one, reference, others["clip"], metrics=["clip-score"], captions=words, seed=1) for one in named
    ]
    scores = [result.values["clip-score"].value for result in results]
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)  # cached statistics keep an order of their own
    with pytest.raises(EvaluationError, match="clip-score needs the captions"):
        evaluate_images(images, reference, extractor, metrics=["clip-score"], extractors=others)
    with pytest.raises(EvaluationError, match="one caption per image, got 2 for 12"):
        evaluate_images(images, reference, others["clip"], metrics=["clip-score"], captions=captions[:2])


def test_weights_that_cannot_be_loaded_are_named_with_the_options(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EvaluationError, match="could not load dinov2 from .*--dinov2 or SCALELONG_DINOV2"):
        build_extractor("dinov2", tmp_path)
    with pytest.raises(EvaluationError, match="could not load clip from .*--clip-model or SCALELONG_CLIP"):
        build_extractor("clip", tmp_path)
