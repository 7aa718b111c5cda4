"""ImageNet and COCO as they are on a disk, in small: preparation, encoding, training, sampling, all by commands."""

import io
import json
import multiprocessing
import tarfile
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from scalelong.cli.app import app
from scalelong.data import encode_latents, load, published, shards
from scalelong.data.catalog import CATALOG
from scalelong.errors import DataError
from tiny_runs import TINY, losses
from training_encoders import small_clip, small_vae

IDS = ["n01440764", "n01443537", "n01484850"]


def command(*words, code=0):
    answer = CliRunner().invoke(app, [str(word) for word in words])
    assert answer.exit_code == code, (answer.output, answer.exception)
    return answer.stdout


def photo(path, seed, mode="RGB", size=(90, 70)):
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path, "JPEG")


@pytest.fixture
def imagenet(tmp_path, monkeypatch):
    """train/ by class, a flat val/, one CMYK file: the published layout with three classes of four images."""
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(published, "IMAGENET_CLASSES", len(IDS))
    counts = {"train": (12,), "validation": (6,)}
    monkeypatch.setitem(CATALOG, "imagenet64", replace(CATALOG["imagenet64"], counts=counts, num_classes=3))
    root = tmp_path / "ILSVRC"
    for label, name in enumerate(IDS):
        for k in range(4):
            photo(root / "train" / name / f"{name}_{k}.JPEG", 10 * label + k, "CMYK" if (label, k) == (1, 2) else "RGB")
    for k in range(6):
        photo(root / "val" / f"ILSVRC2012_val_{k + 1:08d}.JPEG", 100 + k)
    monkeypatch.setenv("SCALELONG_SOURCE", str(root))
    return root


MAPS = {
    "LOC_val_solution.csv": lambda k: f"ILSVRC2012_val_{k + 1:08d},{IDS[k % 3]} 85 1 499 272",
    "val.txt": lambda k: f"ILSVRC2012_val_{k + 1:08d}.JPEG {k % 3}",
    "imagenet_2012_validation_synset_labels.txt": lambda k: IDS[k % 3],
}


@pytest.mark.parametrize("name", [*MAPS, "xml"])
def test_a_flat_val_folder_takes_its_classes_from_the_usual_files(imagenet, name):
    if name == "xml":
        for k in range(6):
            path = imagenet / "Annotations" / "CLS-LOC" / "val" / f"ILSVRC2012_val_{k + 1:08d}.xml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"<annotation><object><name>{IDS[k % 3]}</name></object></annotation>")
    else:
        header = "ImageId,PredictionString\n" if name.endswith(".csv") else ""
        (imagenet / name).write_text(header + "\n".join(MAPS[name](k) for k in range(6)) + "\n")
    data = load("imagenet64", "validation", source=str(imagenet))
    assert data.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.class_names == tuple(IDS)


def test_a_flat_val_folder_without_classes_names_the_files_that_would_help(imagenet):
    with pytest.raises(DataError, match=r"no class for 6 of 6 images.*LOC_val_solution\.csv"):
        load("imagenet64", "validation", source=str(imagenet))


def test_imagenet_is_prepared_with_a_bad_file_left_out_and_the_preset_trains(imagenet, tmp_path):
    (imagenet / "val.txt").write_text("\n".join(MAPS["val.txt"](k) for k in range(6)))
    (imagenet / "train" / IDS[0] / f"{IDS[0]}_3.JPEG").write_bytes(b"not a photo")
    command("data", "prepare", "imagenet64", "--source", imagenet, code=1)
    out = command("data", "prepare", "imagenet64", "--source", imagenet, "--skip-bad")
    assert "skipped 1 bad files" in out
    small = {**TINY, "model.patch_size": 16, "train.steps": 2, "validate.n": 4, "train.batch_size": 4}
    settings = [f"--set={key}={value}" for key, value in small.items()]
    command("train", "imagenet64-uvit-m", "--out", tmp_path / "run", *settings, "-q")
    assert len(losses(tmp_path / "run")) == 2


@pytest.fixture
def coco(tmp_path, monkeypatch):
    """train2014/, val2014/ and annotations/, with five captions per image."""
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(CATALOG, "coco", replace(CATALOG["coco"], counts={"train": (6,), "validation": (4,)}))
    root = tmp_path / "coco"
    for split, count in (("train", 6), ("val", 4)):
        names = [f"COCO_{split}2014_{k + 1:012d}.jpg" for k in range(count)]
        for k, name in enumerate(names):
            photo(root / f"{split}2014" / name, k, "L" if k == 1 else "RGB")
        images = [{"id": k + 1, "file_name": name} for k, name in enumerate(names)]
        notes = [
            {"id": 10 * k + j, "image_id": k + 1, "caption": f"picture {'abcde'[j]}"}
            for k in range(count)
            for j in range(5)
        ]
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"captions_{split}2014.json").write_text(
            json.dumps({"images": images, "annotations": notes})
        )
    monkeypatch.setenv("SCALELONG_SOURCE", str(root))
    return root


def test_coco_is_encoded_once_and_the_preset_trains_and_samples_on_it(coco, tmp_path, monkeypatch):
    vae, clip = small_vae(tmp_path / "vae"), small_clip(tmp_path / "clip")
    command("data", "prepare", "coco", "--source", coco, "--image-size", 64)
    encoders = ("--vae", vae, "--text", clip, "--text-tokens", 7)
    done = json.loads(command("data", "encode", "coco", *encoders, "--image-size", 64, "--device", "cpu", "--json"))
    assert [(entry["split"], entry["kind"], entry["shape"]) for entry in done] == [
        ("train", "latents", [6, 4, 8, 8]), ("train", "tokens", [6, 7, 24]),
        ("validation", "latents", [4, 4, 8, 8]), ("validation", "tokens", [6, 7, 24]),
    ]  # fmt: skip
    monkeypatch.setattr(shards, "_write_some", None)  # training encodes nothing
    small = {
        **TINY, "train.steps": 2, "train.batch_size": 4, "validate.n": 4, "sample.n": 4, "sample.steps": 3,
        "data.vae": vae, "data.text": clip, "data.text_tokens": 7, "data.image_size": 64,
    }  # fmt: skip
    settings = [f"--set={key}={value}" for key, value in small.items()]
    command("train", "coco-uvit-s", "--out", tmp_path / "run", *settings, "-q")
    assert len(losses(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "samples" / "step-00000002.png").exists()


def test_encoding_nothing_is_an_error(coco):
    answer = CliRunner().invoke(app, ["data", "encode", "coco"])
    assert answer.exit_code == 1
    assert "give --vae" in str(answer.exception) + answer.output


# ------------------------------------------------------------------------------------------------ shards


def rows(first, last):
    return {"square": np.arange(first, last, dtype=np.float32)[:, None] ** 2}


def slow_rows(first, last):
    time.sleep(0.05)
    return rows(first, last)


def test_an_interrupted_encoding_resumes_with_the_shards_that_are_missing(tmp_path):
    asked = []

    def stops(first, last):
        asked.append(first)
        if first >= 6:
            raise KeyboardInterrupt
        return rows(first, last)

    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        shards.build_shards(folder, 10, stops, dict, "test", size=3)
    assert not folder.exists()
    asked.clear()
    shards.build_shards(folder, 10, lambda a, b: (asked.append(a), rows(a, b))[1], dict, "test", size=3)
    assert asked == [6, 9]
    stored = shards.Shards(folder, "square", np.float32, (10, 1), size=3)
    order = torch.tensor([9, 0, 4, 4, 2])
    assert stored.rows(order).flatten().tolist() == [81.0, 0.0, 16.0, 16.0, 4.0]
    assert not list(folder.glob("*.lock"))


def share(folder):
    shards.build_shards(folder, 40, slow_rows, lambda: {"n": 40}, "test", size=4)


def test_processes_share_the_shards(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=share, args=(tmp_path / "out",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    stored = shards.Shards(tmp_path / "out", "square", np.float32, (40, 1), size=4)
    assert stored.rows(torch.arange(40)).flatten().tolist() == [float(k * k) for k in range(40)]


def test_latents_do_not_depend_on_batches_and_shards(coco, tmp_path):
    data = load("coco", "train", source=str(coco), image_size=64)
    vae = small_vae(tmp_path / "vae")
    whole = encode_latents(data, vae)
    (whole.folder).rename(tmp_path / "aside")
    parts = encode_latents(data, vae, batch_size=2, shard=4)
    assert len(list(parts.folder.glob("moments-*.npy"))) == 2
    order = torch.tensor([5, 0, 3])
    whole.folder.parent.joinpath(parts.folder.name).rename(tmp_path / "parts")
    (tmp_path / "aside").rename(whole.folder)
    torch.testing.assert_close(parts.batch(order), whole.batch(order), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------- tars


def add(tar, name, content):
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def test_a_webdataset_is_streamed_into_the_prepared_arrays(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"train-{shard:06d}.tar", "w") as tar:
            for k in range(3):
                image = io.BytesIO()
                Image.new("RGB", (16, 16), (40 * k, 100 * shard, 0)).save(image, "PNG")
                key = f"{shard}{k:04d}"
                add(tar, f"{key}.png", image.getvalue())
                add(tar, f"{key}.cls", str(k).encode())
                add(tar, f"{key}.txt", f"colour {k}".encode())
    monkeypatch.setattr("scalelong.data.registries.extract", None)  # nothing is unpacked
    data = load(folder, "train")
    assert len(data) == 6
    assert data.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.captions[4] == "colour 1"
    assert data.images[5][0, 0].tolist() == [80, 100, 0]


def test_a_tar_of_a_folder_by_class_is_still_read_as_one(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for name in ("cat/1.png", "dog/1.png"):
            image = io.BytesIO()
            Image.new("RGB", (16, 16)).save(image, "PNG")
            add(tar, name, image.getvalue())
    assert load(tmp_path / "set.tar").class_names == ("cat", "dog")
