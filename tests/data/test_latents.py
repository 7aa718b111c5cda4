"""Cached latents, compared with diffusers' AutoencoderKL on the images."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from scalelong.data import ImageData, decode_latents, encode_latents, load, load_vae
from scalelong.errors import DataError

COUNT = 7


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (COUNT, 16, 16, 3), dtype=np.uint8)


@pytest.fixture
def data(tmp_path: Path, images: np.ndarray) -> ImageData:
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(COUNT) % 2)
    return load(tmp_path / "set.npz")


def small_vae(**changes: object) -> AutoencoderKL:
    torch.manual_seed(0)
    settings = {
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "scaling_factor": 0.18215,
    }
    return AutoencoderKL(**(settings | changes)).eval()


@pytest.fixture
def vae(tmp_path: Path) -> Path:
    small_vae().save_pretrained(tmp_path / "vae-folder")
    return tmp_path / "vae-folder"


@pytest.fixture
def moments(images: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation as diffusers gives them, in one batch."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        latent = small_vae().encode(x).latent_dist
    return latent.mean, latent.std


def test_a_batch_is_diffusers_mean_times_the_scale(data: ImageData, vae: Path, moments):
    encoded = encode_latents(data, vae, batch_size=3)
    batch = encoded.batch([4, 0, 6])
    assert batch.shape == (3, 4, 8, 8)
    assert batch.dtype == torch.float32
    assert torch.allclose(batch, moments[0][[4, 0, 6]] * 0.18215, atol=1e-6)
    assert (len(encoded), encoded.channels, encoded.image_size) == (COUNT, 4, 8)


def test_noise_samples_the_posterior(data: ImageData, vae: Path, moments):
    encoded = encode_latents(data, vae, scale=0.5)
    noise = torch.randn(2, 4, 8, 8)
    expected = (moments[0][:2] + moments[1][:2] * noise) * 0.5
    assert torch.allclose(encoded.batch([0, 1], noise=noise), expected, atol=1e-6)


def test_mirrored_images_have_latents_of_their_own(data: ImageData, vae: Path, images: np.ndarray):
    encoded = encode_latents(data, vae, scale=1.0, mirror=True)
    flipped = torch.from_numpy(images[:, :, ::-1].copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        expected = small_vae().encode(flipped).latent_dist.mean
    flip = torch.tensor([True, False, True])
    batch = encoded.batch([2, 3, 4], flip)
    assert torch.allclose(batch[flip], expected[[2, 4]], atol=1e-6)
    assert torch.equal(batch[1], encoded.batch([3])[0])


def test_flips_without_mirrored_latents_are_an_error(data: ImageData, vae: Path):
    encoded = encode_latents(data, vae)
    assert torch.equal(encoded.batch([0, 1], torch.zeros(2, dtype=torch.bool)), encoded.batch([0, 1]))
    with pytest.raises(DataError, match="mirror=True"):
        encoded.batch([0, 1], torch.tensor([True, False]))


def test_the_scale_is_the_autoencoders_unless_given_or_known(data: ImageData, vae: Path):
    assert encode_latents(data, vae).scale == 0.18215
    assert encode_latents(data, vae, scale=2.0).scale == 2.0
    data.name = "coco"
    assert encode_latents(data, vae).scale == 0.2301  # U-ViT's, and the paper's


def test_decoding_undoes_scale_and_shift(data: ImageData, tmp_path: Path):
    model = small_vae(shift_factor=0.1, scaling_factor=0.3)
    model.save_pretrained(tmp_path / "shifted")
    encoded = encode_latents(data, tmp_path / "shifted")
    with torch.no_grad():
        expected = model.decode(model.encode(data.batch([0, 1])).latent_dist.mean).sample.clamp(-1, 1)
    found = decode_latents(encoded.batch([0, 1]), tmp_path / "shifted", encoded.scale)
    assert found.shape == (2, 3, 16, 16)
    assert torch.allclose(found, expected, atol=1e-5)


def test_labels_and_names_are_the_images_own(data: ImageData, vae: Path):
    encoded = encode_latents(data, vae)
    assert encoded.label_batch([0, 1, 2]).tolist() == [0, 1, 0]
    assert (encoded.name, encoded.split, encoded.num_classes) == (data.name, data.split, 2)
    assert encoded.captions is None


def test_latents_are_found_again_and_depend_on_images_and_weights(
    data: ImageData, vae: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    first = encode_latents(data, vae)
    torch.manual_seed(5)
    other = AutoencoderKL.from_config(small_vae().config)
    assert encode_latents(data, other).fingerprint != first.fingerprint
    monkeypatch.setattr("scalelong.data.shards._write_some", None)  # encoding again would fail
    second = encode_latents(data, vae)
    assert second.fingerprint == first.fingerprint
    assert encode_latents(data, vae, scale=0.7).fingerprint != first.fingerprint
    assert isinstance(np.load(first.folder / "moments-00000.npy", mmap_mode="r"), np.memmap)
    assert torch.equal(pickle.loads(pickle.dumps(second)).batch([1]), first.batch([1]))


def test_latents_depend_on_what_the_autoencoders_config_changes(data: ImageData):
    plain = encode_latents(data, small_vae())
    for change in ({"shift_factor": 0.5}, {"act_fn": "gelu"}, {"norm_num_groups": 2}):
        changed = encode_latents(data, small_vae(**change))
        assert changed.folder != plain.folder
        assert not torch.allclose(changed.batch([0]), plain.batch([0]))
    assert encode_latents(data, small_vae(shift_factor=0.5)).shift == 0.5
    assert encode_latents(data, small_vae(scaling_factor=0.5)).folder == plain.folder  # applied when they are read


def test_grey_images_are_encoded_as_three_equal_channels(tmp_path: Path, vae: Path, images: np.ndarray):
    np.save(tmp_path / "grey.npy", images[..., :1])
    np.save(tmp_path / "colour.npy", images[..., :1].repeat(3, axis=3))
    grey, colour = (encode_latents(load(tmp_path / name), vae).batch([0]) for name in ("grey.npy", "colour.npy"))
    assert torch.equal(grey, colour)


def test_a_pipelines_folder_works_too(data: ImageData, tmp_path: Path):
    small_vae().save_pretrained(tmp_path / "pipeline" / "vae")
    assert encode_latents(data, tmp_path / "pipeline").channels == 4


def test_a_size_that_does_not_divide_is_an_error(tmp_path: Path, vae: Path):
    np.save(tmp_path / "odd.npy", np.zeros((1, 15, 15, 3), np.uint8))
    with pytest.raises(DataError, match="2 pixels, got 15"):
        encode_latents(load(tmp_path / "odd.npy"), vae)


def test_an_autoencoder_that_cannot_be_loaded_is_a_one_line_error(tmp_path: Path, vae: Path):
    for name in (str(tmp_path / "none"), "nobody/nothing"):
        with pytest.raises(DataError, match=name) as caught:
            load_vae(name)
        assert "\n" not in str(caught.value)
    (vae / "diffusion_pytorch_model.safetensors").write_bytes(b"broken")
    with pytest.raises(DataError, match="vae-folder"):
        load_vae(vae)


def test_pickled_weights_are_not_opened(tmp_path: Path, vae: Path):
    class Planted:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.mkdir, (tmp_path / "executed",)

    (vae / "diffusion_pytorch_model.safetensors").unlink()
    (vae / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(DataError, match="vae-folder"):
        load_vae(vae)
    assert not (tmp_path / "executed").exists()


def test_non_finite_values_are_not_cached(data: ImageData, cache: Path):
    broken = small_vae()
    with torch.no_grad():
        broken.quant_conv.weight.fill_(float("nan"))
    with pytest.raises(DataError, match="finite"):
        encode_latents(data, broken)
    assert not list(cache.glob("latents/*/manifest.json"))
