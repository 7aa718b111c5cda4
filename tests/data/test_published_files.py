"""The named datasets: scikit-learn's digits, and the others from small files in the published form."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pictures import picture
from PIL import Image
from sklearn.datasets import load_digits

from scalelong.data import CATALOG, load, prepare, spec_of
from scalelong.data import published as files
from scalelong.data.images import read_image
from scalelong.data.records import BadExampleError, Example, Options, Reading
from scalelong.errors import DataError, InvalidValueError, SourceUnavailableError


def examples(reading: Reading, count: int | None = None, options: Options | None = None) -> list[Example]:
    """The first examples of a reading with their images decoded."""
    decode = reading.decode or read_image
    chosen = itertools.islice(reading.examples, count)
    return [replace(each, image=decode(each.image, each.name, options or Options())) for each in chosen]


class TestDigits:
    def test_are_scikit_learns_scaled_to_255(self):
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

    def test_have_no_test_split(self):
        with pytest.raises(DataError, match=r"digits .*'test'.*train, validation"):
            load("digits", "test")

    def test_options_of_other_kinds_of_data_are_rejected(self):
        with pytest.raises(DataError, match="digits.*holdout"):
            load("digits", holdout=0.1)
        with pytest.raises(InvalidValueError, match="digits.*/tmp"):
            load("digits", source="/tmp")


class TestCifar10:
    def test_binary_records_are_label_red_green_blue(self, tmp_path: Path):
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (10_000, 32, 32, 3), dtype=np.uint8)
        labels = rng.integers(0, 10, 10_000, dtype=np.uint8)
        records = np.concatenate([labels[:, None], images.transpose(0, 3, 1, 2).reshape(10_000, -1)], axis=1)
        (tmp_path / "cifar-10-batches-bin").mkdir()
        records.tofile(tmp_path / "cifar-10-batches-bin" / "test_batch.bin")
        found = examples(files.read_cifar10([tmp_path], "test"), 50)
        assert np.array_equal([example.image for example in found], images[:50])
        assert [example.label for example in found] == labels[:50].tolist()
        # Complete, but not CIFAR-10:
        with pytest.raises(DataError, match="cifar10.*SHA-256.*--source"):
            load("cifar10", "test", source=tmp_path)

    def test_sheets_have_one_image_per_row(self, tmp_path: Path):
        images = np.random.default_rng(0).integers(0, 256, (10_000, 1024, 3), dtype=np.uint8)
        images[20:] = 0
        Image.fromarray(images).save(tmp_path / "test_batch.png", compress_level=1)
        (tmp_path / "test_lables.json").write_text(json.dumps([3] * 10_000))
        found = examples(files.read_cifar10([tmp_path], "test"), 20)
        assert np.array_equal([example.image for example in found], images[:20].reshape(20, 32, 32, 3))

    def test_the_pickled_version_is_not_opened(self, tmp_path: Path):
        (tmp_path / "test_batch").write_bytes(b"cos\nmkdir\n(S'/tmp/executed-by-scalelong'\ntR.")
        with pytest.raises(SourceUnavailableError, match="pickled.*binary"):
            load("cifar10", "test", source=tmp_path)
        assert not Path("/tmp/executed-by-scalelong").exists()

    def test_wrong_sizes_are_errors(self, tmp_path: Path):
        (tmp_path / "test_batch.bin").write_bytes(bytes(100))
        with pytest.raises(DataError, match=r"test_batch\.bin.*30,730,000.*100"):
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
        found = examples(files.read_fashion_mnist([tmp_path], "test"), 30)
        assert np.array_equal([example.image[..., 0] for example in found], images[:30])
        assert [example.label for example in found] == labels[:30].tolist()

    def test_another_count_and_damage_are_errors(self, tmp_path: Path):
        self.write(tmp_path, np.zeros((10, 28, 28), np.uint8), np.zeros(10, np.uint8))
        with pytest.raises(DataError, match="10000 × 28 × 28"):
            load("fashion-mnist", "test", source=tmp_path)
        path = tmp_path / "t10k-images-idx3-ubyte.gz"
        path.write_bytes(path.read_bytes()[:40])
        with pytest.raises(DataError, match=r"images-idx3-ubyte\.gz"):
            load("fashion-mnist", "test", source=tmp_path)


class TestCelebA:
    def test_faces_are_the_128_pixels_around_row_121_and_column_89(self):
        image = picture(0, (178, 218))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        face = files.read_face(buffer.getvalue(), "a", Options(image_size=128))
        assert np.array_equal(face, np.asarray(image)[121 - 64 : 121 + 64, 89 - 64 : 89 + 64])
        small = files.read_face(buffer.getvalue(), "a", Options(image_size=64))
        cropped = image.crop((89 - 64, 121 - 64, 89 + 64, 121 + 64)).resize((64, 64), Image.Resampling.BILINEAR)
        assert np.array_equal(small, np.asarray(cropped))

    def test_the_partition_is_by_number(self, tmp_path: Path):
        picture(0, (178, 218)).save(tmp_path / "182638.jpg")
        options = Options(image_size=64, channels=3)
        reading = files.read_celeba([tmp_path], "test")
        assert reading.total == 19_962
        assert examples(reading, 1, options)[0].image.shape == (64, 64, 3)
        with pytest.raises(SourceUnavailableError, match=r"000001\.jpg"):
            load("celeba64", source=tmp_path)

    def test_a_missing_file_is_an_error_with_its_name(self, tmp_path: Path):
        picture(0, (178, 218)).save(tmp_path / "182638.jpg")
        with pytest.raises(BadExampleError, match=r"^182639\.jpg .*No such file"):
            load("celeba64", "test", source=tmp_path)


class TestImageNet64:
    def test_batches_number_classes_from_one_and_store_colours_in_planes(self, tmp_path: Path):
        images = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)
        planes = images.transpose(0, 3, 1, 2).reshape(5, -1)
        np.savez(tmp_path / "train_data_batch_1.npz", data=planes[:3], labels=np.array([1, 1000, 7]))
        np.savez(tmp_path / "train_data_batch_10.npz", data=planes[4:], labels=np.array([3]))
        np.savez(tmp_path / "train_data_batch_2.npz", data=planes[3:4], labels=np.array([2]))
        found = examples(files.read_imagenet64([tmp_path], "train"))
        assert np.array_equal([example.image for example in found], images)
        assert [example.label for example in found] == [0, 999, 6, 1, 2]

    @pytest.mark.parametrize("shape", [(500, 375), (64, 64), (70, 200), (333, 129), (30, 40)])
    def test_folders_are_cropped_as_guided_diffusion_does(self, shape):
        image = picture(0, shape)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        found = files.read_photograph(buffer.getvalue(), "a", Options(image_size=64, channels=3))
        expected = image.convert("RGB")
        while min(expected.size) >= 128:
            expected = expected.resize(tuple(side // 2 for side in expected.size), Image.Resampling.BOX)
        scale = 64 / min(expected.size)
        expected = np.array(expected.resize(tuple(round(side * scale) for side in expected.size), Image.BICUBIC))
        y, x = ((side - 64) // 2 for side in expected.shape[:2])
        assert np.array_equal(found, expected[y : y + 64, x : x + 64])

    def test_folders_need_a_thousand_classes(self, class_folder: Path, tmp_path: Path):
        (tmp_path / "imagenet").mkdir()
        class_folder.rename(tmp_path / "imagenet" / "train")
        with pytest.raises(SourceUnavailableError, match="2 class folders.*1,000"):
            load("imagenet64", source=tmp_path / "imagenet")

    def test_an_incomplete_copy_is_detected_by_its_count(self, tmp_path: Path):
        np.savez(tmp_path / "val_data.npz", data=np.zeros((2, 12288), np.uint8), labels=np.array([1, 2]))
        with pytest.raises(DataError, match=r"imagenet64 \(validation\).*50,000.*2 from"):
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

    def test_images_are_ordered_by_id_with_all_their_captions(self, folder: Path):
        options = Options(image_size=32)
        reading = files.read_coco([folder], "validation")
        first, second = examples(reading, None, options)
        assert (first.name, first.captions) == ("b.jpg", ("caption 1", "caption 3", "caption 4"))
        assert (second.name, second.captions) == ("a.jpg", ("caption 0", "caption 2"))
        assert first.image.shape == (32, 32, 3)
        assert reading.captioned

    def test_a_file_name_cannot_lead_outside(self, folder: Path):
        self.write(folder, images=[{"id": 9, "file_name": "../../secret.jpg"}, {"id": 4, "file_name": "b.jpg"}])
        with pytest.raises(DataError, match=r"'\.\./\.\./secret\.jpg'"):
            load("coco", "validation", source=folder)

    @pytest.mark.parametrize("content", ["{", "[]", '{"images": 3}', '{"images": [{"id": 1}], "annotations": [{}]}'])
    def test_a_broken_file_of_captions_is_an_error(self, folder: Path, content: str):
        (folder / "annotations" / "captions_val2014.json").write_text(content)
        with pytest.raises(DataError, match=r"captions_val2014\.json"):
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
        options, read = Options(image_size=4), CATALOG["emoji"].read
        opened = [read([folder], split) for split in ("train", "validation")]
        return [example for reading in opened for example in examples(reading, None, options)]

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
        assert files.EMOJI_CATEGORIES[found["fxemoji:redsquare"].label] == "Symbols"
        assert files.EMOJI_CATEGORIES[found["noto:waving-hand-dark-skin-tone"].label] == "People & Body"

    def test_drawings_have_their_colours(self, folder: Path):
        found = {example.name: example for example in self.all(folder)}
        assert (found["noto:red-square"].image == (255, 0, 0)).all()
        assert (found["fluent-emoji-flat:red-square"].image == (0xEE, 0, 0)).all()

    def test_a_name_is_in_one_split_only(self, folder: Path):
        read = CATALOG["emoji"].read
        sides = [
            {example.captions[0] for example in read([folder], split).examples} for split in ("train", "validation")
        ]
        assert sides[0].isdisjoint(sides[1])

    def test_a_drawing_that_refers_to_files_is_rejected(self, folder: Path):
        path = folder / "noto" / "package" / "icons.json"
        stated = json.loads(path.read_text())
        stated["icons"]["red-square"]["body"] = '<image href="/etc/passwd"/>'
        path.write_text(json.dumps(stated))
        with pytest.raises(BadExampleError, match="^noto:red-square "):
            self.all(folder)

    def test_a_broken_drawing_is_an_error_with_its_name(self, folder: Path):
        path = folder / "noto" / "package" / "icons.json"
        stated = json.loads(path.read_text())
        stated["icons"]["red-square"]["body"] = "<path"
        path.write_text(json.dumps(stated))
        with pytest.raises(BadExampleError, match="^noto:red-square "):
            self.all(folder)


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


def test_the_version_is_part_of_the_folder_in_the_cache(flat_folder: Path, monkeypatch: pytest.MonkeyPatch):
    before = [load(name).folder for name in (flat_folder, "digits")]
    monkeypatch.setattr(prepare, "VERSION", prepare.VERSION + 1)
    after = [load(name).folder for name in (flat_folder, "digits")]
    assert set(before).isdisjoint(after)
