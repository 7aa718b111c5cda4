"""Hugging Face datasets from local folders, in every form the library writes."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from pictures import picture
from pyarrow import parquet

from scalelong.data import load
from scalelong.data.hub import read_hub
from scalelong.data.records import BadExampleError, Options
from scalelong.errors import DataError, SourceUnavailableError, UnknownNameError

COUNT = 6


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    picture(seed).save(buffer, "PNG")
    return buffer.getvalue()


def make(**columns: object) -> object:
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    rows = {
        "image": [{"bytes": png(seed), "path": None} for seed in range(COUNT)],
        "label": [seed % 2 for seed in range(COUNT)],
    }
    for name, (feature, values) in columns.items():
        features[name], rows[name] = feature, values
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()


EXPECTED = np.stack([np.asarray(picture(seed)) for seed in range(COUNT)])


def save(dataset, folder: Path, form: str) -> Path:
    if form == "one":
        dataset.save_to_disk(folder)
    elif form == "dict":
        datasets.DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(folder)
    else:
        (folder / "data").mkdir(parents=True)
        dataset.to_parquet(folder / "data" / "train-00000-of-00001.parquet")
        dataset.select([0]).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("form", ["one", "dict", "parquet"])
@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_each_form_gives_the_same_images_and_classes(tmp_path: Path, form: str, prefix: str):
    data = load(prefix + str(save(make(), tmp_path / "set", form)))
    assert np.array_equal(data.images, EXPECTED)
    assert data.class_names == ("cat", "dog")
    assert data.labels.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("form", ["dict", "parquet"])
def test_splits_are_the_datasets_own(tmp_path: Path, form: str):
    folder = save(make(), tmp_path / "set", form)
    assert len(load(folder, "test")) == 1
    assert len(load(folder, "validation")) == 1
    with pytest.raises(DataError, match=r"'extra'.*test, train"):
        load(folder, "extra")


def test_captions_may_be_text_or_lists_of_text(tmp_path: Path):
    texts = [f"number {seed}" for seed in range(COUNT)]
    single = make(text=(datasets.Value("string"), texts))
    many = make(captions=(datasets.Sequence(datasets.Value("string")), [[text, "also"] for text in texts]))
    assert list(load(save(single, tmp_path / "a", "one")).captions) == texts
    assert load(save(many, tmp_path / "b", "parquet")).captions.of(2) == ["number 2", "also"]


def test_columns_can_be_named(tmp_path: Path):
    kinds = ["x", "y", "x", "z", "y", "x"]
    dataset = make(kind=(datasets.Value("string"), kinds), alt=(datasets.Value("string"), kinds))
    folder = save(dataset, tmp_path / "set", "one")
    data = load(folder, label_column="kind", caption_column="alt")
    assert [data.class_names[label] for label in data.labels] == kinds
    assert list(data.captions) == kinds
    with pytest.raises(UnknownNameError, match=r"label column .*'kinds'; did you mean 'kind'"):
        load(folder, label_column="kinds")


def test_numbers_without_names_are_classes(tmp_path: Path):
    dataset = make().remove_columns("label").add_column("label", [0, 3, 1, 2, 0, 0])
    assert load(save(dataset, tmp_path / "set", "parquet")).num_classes == 4


def test_rows_of_one_image_are_its_captions(tmp_path: Path):
    texts = [f"number {seed}" for seed in range(COUNT)]
    dataset = make(caption=(datasets.Value("string"), texts), cocoid=(datasets.Value("int64"), [7, 7, 7, 8, 9, 9]))
    folder = save(dataset, tmp_path / "set", "one")
    reading = read_hub(str(folder), "train", Options(), "x", group="cocoid")
    assert [example.captions for example in reading.examples] == [texts[:3], texts[3:4], texts[4:]]


def test_a_negative_label_is_an_error_with_its_row(tmp_path: Path):
    dataset = make().remove_columns("label").add_column("label", [0, 1, -1, 0, 0, 0])
    folder = save(dataset.cast_column("label", datasets.ClassLabel(names=["a", "b"])), tmp_path / "set", "one")
    with pytest.raises(BadExampleError, match=r"row 2 .*-1.*0…1"):
        load(folder)
    assert len(load(folder, skip_bad=True)) == 5


def test_a_broken_image_is_an_error_with_its_row(tmp_path: Path):
    rows = {"image": [{"bytes": png(0), "path": None}, {"bytes": b"broken", "path": None}]}
    dataset = datasets.Dataset.from_dict(rows, features=datasets.Features(image=datasets.Image()))
    folder = save(dataset, tmp_path / "set", "one")
    with pytest.raises(BadExampleError, match=r"row 1 "):
        load(folder)


def test_a_local_table_cannot_name_files(tmp_path: Path):
    picture(0).save(tmp_path / "private.png")
    rows = {"image": [{"bytes": None, "path": str(tmp_path / "private.png")}]}
    (tmp_path / "set").mkdir()
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    parquet.write_table(pyarrow.table({"image": pyarrow.array(rows["image"], kind)}), tmp_path / "set" / "a.parquet")
    with pytest.raises(BadExampleError, match="row 0 "):
        load(tmp_path / "set")


def test_a_dataset_without_images_is_an_error_with_its_columns(tmp_path: Path):
    datasets.Dataset.from_dict({"text": ["a"], "size": [1]}).save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match="text, size"):
        load(tmp_path / "set")


def test_a_damaged_table_is_a_one_line_error(tmp_path: Path):
    folder = save(make(), tmp_path / "set", "parquet")
    path = folder / "data" / "train-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="set") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_mixed_tables_are_a_one_line_error(tmp_path: Path):
    folder = save(make(), tmp_path / "set", "parquet")
    with pyarrow.OSFile(str(folder / "data" / "train-00001.arrow"), "wb") as file:
        file.write(b"not a table")
    with pytest.raises(DataError, match="set") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_scripts_and_pickles_in_the_folder_are_not_run(tmp_path: Path):
    class Planted:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.mkdir, (tmp_path / "executed",)

    folder = save(make(), tmp_path / "set", "parquet")
    trap = f"import os; os.mkdir({str(tmp_path / 'executed')!r})"
    (folder / "set.py").write_text(trap)
    (folder / "__init__.py").write_text(trap)
    (folder / "data" / "extra.pkl").write_bytes(pickle.dumps(Planted()))
    assert len(load(folder)) == COUNT
    assert not (tmp_path / "executed").exists()


def test_a_hub_name_without_a_network_is_a_one_line_error():
    with pytest.raises(SourceUnavailableError, match="hf:nobody/nothing") as caught:
        load("hf:nobody/nothing")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["dict", "tables"])
def test_names_of_classes_have_one_number_in_all_splits(tmp_path: Path, form: str):
    """`validation` lacks the first class."""
    names = ["cat", "dog", "emu"]
    dataset = datasets.Dataset.from_dict(
        {"image": [{"bytes": png(k), "path": None} for k in range(3)], "label": names},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")}),
    )
    parts = {"train": dataset, "validation": dataset.select([1, 2])}
    if form == "dict":
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "set")
    else:
        (tmp_path / "set").mkdir()
        for name, part in parts.items():
            part.to_parquet(tmp_path / "set" / f"{name}-0.parquet")
    data = load(tmp_path / "set", "validation")
    assert (data.class_names, data.labels.tolist()) == (tuple(names), [1, 2])
