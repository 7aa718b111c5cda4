"""Prepared images: the contents of a batch, memory mapping, and the detection of damage."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scalelong
from scalelong.data import ImageData, load
from scalelong.errors import DataError


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 6, 6, 3), dtype=np.uint8)


@pytest.fixture
def data(tmp_path: Path, images: np.ndarray) -> ImageData:
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(20) % 3)
    return load(tmp_path / "set.npz")


def test_images_are_a_uint8_memory_map_in_the_order_n_h_w_c(data: ImageData, images: np.ndarray):
    assert isinstance(data.images, np.memmap)
    assert data.images.dtype == np.uint8
    assert np.array_equal(data.images, images)
    assert (len(data), data.image_size, data.channels, data.num_classes) == (20, 6, 3, 3)


def test_a_batch_is_the_images_as_float32_in_minus_one_to_one(data: ImageData, images: np.ndarray):
    indices = [3, 0, 19, 3]
    batch = data.batch(torch.tensor(indices))
    expected = images[indices].transpose(0, 3, 1, 2).astype(np.float64) / 127.5 - 1
    assert batch.dtype == torch.float32
    assert batch.is_contiguous()
    assert batch.shape == (4, 3, 6, 6)
    assert np.abs(batch.numpy() - expected).max() < 1e-7


def test_every_byte_value_is_in_range_and_the_extremes_are_exact(tmp_path: Path):
    np.save(tmp_path / "ramp.npy", np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1))
    ramp = load(tmp_path / "ramp.npy").batch([0]).flatten()
    assert ramp[0] == -1
    assert ramp[-1] == 1
    assert torch.equal(ramp, ramp.clamp(-1, 1))
    assert torch.equal(((ramp + 1) * 127.5).round(), torch.arange(256.0))


def test_flip_mirrors_left_and_right_where_it_is_true(data: ImageData):
    indices = torch.arange(20)
    flip = torch.rand(20) < 0.5
    plain = data.batch(indices)
    expected = torch.where(flip[:, None, None, None], plain.flip(3), plain)
    assert torch.equal(data.batch(indices, flip), expected)
    assert torch.equal(data.batch(indices), plain)  # the files did not change


@given(indices=st.lists(st.integers(0, 19), min_size=1, max_size=50), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_batch_does_not_depend_on_what_else_is_in_it(digits: ImageData, indices: list[int], seed: int):
    flip = torch.rand(len(indices), generator=torch.Generator().manual_seed(seed)) < 0.5
    one_by_one = torch.cat([digits.batch([index], flip[i : i + 1]) for i, index in enumerate(indices)])
    assert torch.equal(digits.batch(indices, flip), one_by_one)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALELONG_CACHE", str(tmp_path_factory.mktemp("digits")))
        return load("digits")


def test_indices_may_be_a_list_an_array_or_a_tensor(data: ImageData):
    expected = data.batch(torch.tensor([1, 2]))
    assert torch.equal(data.batch([1, 2]), expected)
    assert torch.equal(data.batch(np.array([1, 2])), expected)
    assert torch.equal(data.batch(torch.tensor([1, 2], dtype=torch.int32)), expected)


def test_labels_come_as_int64(data: ImageData):
    labels = data.label_batch([0, 4, 5])
    assert labels.dtype == torch.int64
    assert labels.tolist() == [0, 1, 2]


def test_labels_of_a_set_without_classes_raise_a_data_error(tmp_path: Path, images: np.ndarray):
    np.save(tmp_path / "plain.npy", images)
    data = load(tmp_path / "plain.npy")
    assert data.labels is None
    assert data.captions is None
    with pytest.raises(DataError, match=r"plain\.npy"):
        data.label_batch([0])


def test_an_index_out_of_range_is_an_error(data: ImageData):
    for index in (20, -1):
        with pytest.raises((IndexError, RuntimeError)):
            data.batch([index])


def test_a_pickled_copy_carries_the_path_and_no_pixels(data: ImageData):
    sent = pickle.dumps(data)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent).batch([5]), data.batch([5]))


def test_a_batch_of_a_large_set_takes_little_memory(tmp_path: Path):
    """A 98 MB set is opened and read at random within a fraction of its size."""
    source = tmp_path / "large.npy"
    np.lib.format.open_memmap(source, "w+", np.uint8, (500, 256, 256, 3)).flush()
    code = (
        "import resource, sys, torch, scalelong\n"
        "data = scalelong.data.load(sys.argv[1])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for step in range(20): data.batch(torch.randint(0, len(data), (2,)))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    load(source)
    grown = subprocess.run([sys.executable, "-c", code, str(source)], capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 30_000  # KiB; the set has 96,000


def test_fingerprints_depend_on_the_contents(tmp_path: Path, images: np.ndarray):
    def fingerprint(name: str, **arrays: np.ndarray) -> str:
        np.savez(tmp_path / name, **arrays)
        return load(tmp_path / name).fingerprint

    labels = np.arange(20) % 3
    same = fingerprint("a.npz", images=images, labels=labels)
    assert fingerprint("b.npz", images=images, labels=labels) == same
    assert fingerprint("c.npz", images=images[::-1].copy(), labels=labels) != same
    assert fingerprint("d.npz", images=images, labels=labels[::-1].copy()) != same
    assert fingerprint("e.npz", images=images) != same


def test_the_content_hash_does_not_depend_on_the_order(tmp_path: Path, images: np.ndarray):
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(20) % 3)
    np.savez(tmp_path / "b.npz", images=images[::-1].copy(), labels=(np.arange(20) % 3)[::-1].copy())
    first, second = (load(tmp_path / name).manifest["content_sha256"] for name in ("a.npz", "b.npz"))
    assert first == second


def test_verify_detects_a_single_flipped_bit(data: ImageData):
    data.verify()
    path = data.folder / "images.npy"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"images\.npy"):
        ImageData(data.folder).verify()


@pytest.mark.parametrize("name", ["images.npy", "labels.npy", "manifest.json"])
@pytest.mark.parametrize("damage", ["empty", "short", "absent", "foreign"])
def test_a_damaged_file_raises_a_data_error(data: ImageData, name: str, damage: str):
    path = data.folder / name
    content = path.read_bytes()
    path.unlink()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "short":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "foreign":
        path.write_bytes(b"\x80\x04something else" * 20)
    with pytest.raises(DataError) as caught:
        ImageData(data.folder)
    assert str(data.folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(["images.npy", "labels.npy", "manifest.json"]),
    position=st.floats(0, 1),
    change=st.integers(1, 255),
)
def test_a_changed_byte_raises_a_data_error_or_leaves_valid_data(
    digits: ImageData, tmp_path_factory: pytest.TempPathFactory, name: str, position: float, change: int
):
    folder = tmp_path_factory.mktemp("damaged")
    for file in digits.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    content = bytearray((folder / name).read_bytes())
    content[min(int(position * len(content)), len(content) - 1)] ^= change
    (folder / name).write_bytes(content)
    try:
        data = ImageData(folder)
    except DataError:
        return
    assert data.batch([0, len(data) - 1]).abs().max() <= 1
    assert data.label_batch(range(len(data))).max() < data.num_classes


def test_the_subpackage_is_an_attribute_of_the_package():
    assert scalelong.data.ImageData is ImageData
