"""NumPy files as datasets: every supported form, every error, and never a pickle."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.data import load
from scalelong.errors import DataError

RNG = np.random.default_rng(1)
IMAGES = RNG.integers(0, 256, (7, 4, 4, 3), dtype=np.uint8)


class Planted:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "stored",
    [IMAGES, IMAGES.transpose(0, 3, 1, 2).copy(), IMAGES[..., :1], IMAGES[..., 0].copy(), np.asfortranarray(IMAGES)],
    ids=["nhwc", "nchw", "one channel", "no channel", "Fortran order"],
)
def test_images_in_any_common_layout(tmp_path: Path, stored: np.ndarray):
    np.save(tmp_path / "a.npy", stored)
    data = load(tmp_path / "a.npy")
    assert np.array_equal(data.images, IMAGES if data.channels == 3 else IMAGES[..., :1])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_labels_captions_and_names(tmp_path: Path, save):
    captions = np.array([f"image {i}" for i in range(7)])
    save(tmp_path / "a.npz", images=IMAGES, labels=np.arange(7) % 2, captions=captions, class_names=["even", "odd"])
    data = load(tmp_path / "a.npz")
    assert data.class_names == ("even", "odd")
    assert data.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert list(data.captions) == captions.tolist()


def test_several_captions_per_image(tmp_path: Path):
    np.savez(tmp_path / "a.npz", images=IMAGES, captions=np.array([[f"a {i}".encode(), b"b"] for i in range(7)]))
    assert load(tmp_path / "a.npz").captions.of(3) == ["a 3", "b"]


def test_splits_in_keras_form(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x_train=IMAGES, y_train=np.zeros((7, 1), int), x_test=IMAGES[:2], y_test=[0, 0])
    assert len(load(tmp_path / "a.npz")) == 7
    assert len(load(tmp_path / "a.npz", "test")) == 2
    assert len(load(tmp_path / "a.npz", "validation")) == 2  # the test split is what is not trained on


def test_a_holdout_splits_the_rows(tmp_path: Path):
    many = RNG.integers(0, 256, (80, 2, 2, 1), dtype=np.uint8)
    np.save(tmp_path / "a.npy", many)
    parts = [load(tmp_path / "a.npy", split, holdout=0.25) for split in ("train", "validation")]
    assert sum(map(len, parts)) == 80
    assert 8 <= len(parts[1]) <= 32


def test_resizing_and_greying(tmp_path: Path):
    np.save(tmp_path / "a.npy", IMAGES)
    assert load(tmp_path / "a.npy", image_size=2, channels=1).images.shape == (7, 2, 2, 1)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": IMAGES.astype(float)}, r"a\.npz: images .*uint8.*got float64"),
        ({"images": IMAGES[0, 0]}, r"got uint8 of shape \(4, 3\)"),
        ({"images": np.zeros((3, 8, 8, 4), np.uint8)}, r"got uint8 of shape \(3, 8, 8, 4\)"),
        ({"images": IMAGES[:0]}, r"got uint8 of shape \(0, 4, 4, 3\)"),
        ({"pictures": IMAGES}, r"images, .*got pictures"),
        ({"images": IMAGES, "labels": np.arange(5)}, r"labels .*7 integers.*got int64 of shape \(5,\)"),
        ({"images": IMAGES, "labels": np.arange(7) / 2}, r"labels .*got float64"),
        ({"images": IMAGES, "labels": np.arange(7) - 1}, r"^a\.npz row 0 .*-1"),
        ({"images": IMAGES, "labels": np.arange(7), "class_names": ["x"]}, r"^a\.npz row 1 .*label 1"),
        ({"images": IMAGES, "labels": np.full(7, 10**12)}, r"got 1000000000000"),
        ({"images": IMAGES, "captions": np.arange(7)}, r"captions .*text.*got int64"),
        ({"images": IMAGES, "captions": np.array([b"\xff"] * 7)}, r"captions .*UTF-8"),
        ({"images": IMAGES, "captions": np.array(["a", "", "c", "d", "e", "f", "g"])}, r"row 1 .*caption"),
        ({"images": np.zeros((2, 4, 6), np.uint8)}, r"row 0 .*6×4"),
    ],
)
def test_errors_contain_the_array_and_what_was_received(tmp_path: Path, arrays: dict[str, np.ndarray], message: str):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path / "a.npz")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["images", "labels", "captions", "class_names"])
def test_a_planted_pickle_is_not_executed(tmp_path: Path, key: str):
    trap = tmp_path / "executed"
    arrays = {"images": IMAGES, "labels": np.arange(7)} | {key: np.array([Planted(trap)] * 7, dtype=object)}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=key):
        load(tmp_path / "a.npz")
    np.save(tmp_path / "b.npy", arrays[key], allow_pickle=True)
    if key != "images":
        with pytest.raises(DataError):
            load(tmp_path / "b.npy")
    assert not trap.exists()


def test_a_header_that_promises_more_than_the_file_holds_is_an_error(tmp_path: Path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 1000, 1000, 3)}
    )
    (tmp_path / "a.npy").write_bytes(header.getvalue())
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", header.getvalue())
    for name in ("a.npy", "a.npz"):
        with pytest.raises(DataError, match=name):
            load(tmp_path / name)


@settings(max_examples=150, deadline=None)
@given(
    suffix=st.sampled_from([".npy", ".npz"]),
    position=st.floats(0, 1),
    change=st.integers(0, 255),
    cut=st.booleans(),
)
def test_a_damaged_file_is_data_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, position: float, change: int, cut: bool
):
    path = tmp_path_factory.mktemp("numpy") / f"a{suffix}"
    if suffix == ".npy":
        np.save(path, IMAGES)
    else:
        np.savez_compressed(path, images=IMAGES, labels=np.arange(7))
    content = bytearray(path.read_bytes())
    place = min(int(position * len(content)), len(content) - 1)
    content[place] ^= change
    path.write_bytes(content[: place + 1] if cut else content)
    try:
        assert len(load(path)) > 0
    except DataError as error:
        message = str(error)
        assert path.name in message


def test_classes_of_all_splits_are_numbered_alike(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x_train=IMAGES, y_train=np.arange(7), x_val=IMAGES[:2], y_val=np.array([0, 1]))
    assert load(tmp_path / "a.npz", "validation").class_names == load(tmp_path / "a.npz").class_names
