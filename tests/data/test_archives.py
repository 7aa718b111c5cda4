"""Archives: nothing is written outside the folder, and nothing too large is unpacked."""

from __future__ import annotations

import io
import json
import shutil
import stat
import tarfile
import zipfile
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import picture

from scalelong.data import load, registries
from scalelong.data.registries import extract, is_archive, unpacked
from scalelong.errors import DataError


def tar_with(path: Path, *members: tarfile.TarInfo | str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = 5 if info.isreg() else 0
            tar.addfile(info, io.BytesIO(b"hello") if info.isreg() else None)
    return path


def zip_with(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "hello")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "deep" / "inside"
    inside.mkdir(parents=True)
    return inside


@pytest.mark.parametrize("make", [tar_with, zip_with])
def test_ordinary_members_are_written(tmp_path: Path, folder: Path, make):
    extract(make(tmp_path / "a.archive", "x.png", "sub/y.png"), folder)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.png")} == {"x.png", "sub/y.png"}


@pytest.mark.parametrize("make", [tar_with, zip_with])
@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped", "/tmp/escaped-by-scalelong", "..\\escaped", "C:x"])
def test_a_name_that_leads_outside_is_rejected_or_stays_inside(tmp_path: Path, folder: Path, make, name: str):
    archive = make(tmp_path / "a.archive", name)
    with suppress(DataError):
        extract(archive, folder)
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert all(path == archive or path.is_relative_to(folder) for path in written)
    assert not Path("/tmp/escaped-by-scalelong").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_a_tar_are_rejected(tmp_path: Path, folder: Path, kind: bytes):
    member = tarfile.TarInfo("innocent")
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises(DataError, match="innocent"):
        extract(tar_with(tmp_path / "a.tgz", member, "innocent/x.png"), folder)
    assert not list(folder.iterdir())


def test_a_link_in_a_zip_becomes_a_plain_file(tmp_path: Path, folder: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        link = zipfile.ZipInfo("innocent")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    extract(tmp_path / "a.zip", folder)
    assert not (folder / "innocent").is_symlink()


def test_a_bomb_stops_at_the_limit(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(8 << 20))
    with tarfile.open(tmp_path / "bomb.tgz", "w:gz") as tar:
        member = tarfile.TarInfo("zeros")
        member.size = 8 << 20
        tar.addfile(member, io.BytesIO(bytes(8 << 20)))
    monkeypatch.setattr(registries, "MAX_BYTES", 1 << 20)
    for name in ("bomb.zip", "bomb.tgz"):
        with pytest.raises(DataError, match=rf"{name}.* 1 MiB"):
            extract(tmp_path / name, folder)
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= 1 << 20


def test_a_zip_that_understates_its_size_is_not_unpacked_beyond_it(tmp_path: Path, folder: Path):
    path = tmp_path / "liar.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(80 << 20))
    content = path.read_bytes().replace((80 << 20).to_bytes(4, "little"), (1 << 10).to_bytes(4, "little"))
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"liar\.zip"):
        extract(path, folder)
    assert sum(file.stat().st_size for file in folder.rglob("*")) <= 1 << 20


def test_the_ratio_is_bounded_too(tmp_path: Path, folder: Path):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(80 << 20))  # 80 KB as a file
    with pytest.raises(DataError, match=r"bomb\.zip.* 64 MiB"):
        extract(tmp_path / "bomb.zip", folder)


@given(data=st.binary(max_size=200), name=st.sampled_from(["a.zip", "a.tar", "a.tgz", "a.tar.xz"]))
@settings(max_examples=60, deadline=None)
def test_random_bytes_are_a_broken_archive(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str):
    base = tmp_path_factory.mktemp("random")
    (base / name).write_bytes(data)
    (base / "out").mkdir()
    with pytest.raises(DataError, match=name):
        extract(base / name, base / "out")


@given(position=st.floats(0, 1), change=st.integers(1, 255), kind=st.sampled_from(["zip", "tgz"]))
@settings(max_examples=100, deadline=None)
def test_a_damaged_archive_is_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, position: float, change: int, kind: str
):
    base = tmp_path_factory.mktemp("damaged")
    path = (zip_with if kind == "zip" else tar_with)(base / f"a.{kind}", "x.png", "sub/y.png")
    content = bytearray(path.read_bytes())
    content[min(int(position * len(content)), len(content) - 1)] ^= change
    path.write_bytes(content)
    out = base / "out"
    out.mkdir()
    try:
        extract(path, out)
    except DataError as error:
        message = str(error)
        assert path.name in message
    assert {file.name for file in base.iterdir()} == {path.name, "out"}


@given(name=st.text(min_size=1, max_size=30), make=st.sampled_from([tar_with, zip_with]))
@settings(max_examples=60, deadline=None)
def test_any_name_stays_inside(tmp_path_factory: pytest.TempPathFactory, name: str, make):
    base = tmp_path_factory.mktemp("names")
    (base / "out").mkdir()
    try:
        archive = make(base / "a.archive", name)
    except (UnicodeError, ValueError):
        return  # such a name cannot be stored
    with suppress(DataError, OSError):
        extract(archive, base / "out")
    assert {file.name for file in base.iterdir()} == {"a.archive", "out"}


def test_archives_are_known_by_their_names():
    assert is_archive(Path("a.ZIP"))
    assert is_archive(Path("a.tar.gz"))
    assert not is_archive(Path("a.gz"))


@pytest.mark.parametrize("wrapped", [False, True])
def test_images_in_an_archive_are_a_folder(tmp_path: Path, class_folder: Path, cache: Path, wrapped: bool):
    for kind in ("zip", "gztar"):
        source = {"root_dir": class_folder.parent, "base_dir": "images"} if wrapped else {"root_dir": class_folder}
        archive = Path(shutil.make_archive(str(tmp_path / f"set-{kind}"), kind, **source))
        data = load(archive)
        assert np.array_equal(data.images, load(class_folder).images)
        assert data.class_names == ("cat", "dog")
    assert [path.name for path in cache.iterdir()] == ["data"]


def test_archives_in_a_folder_are_unpacked_beside_its_subfolders(tmp_path: Path):
    (tmp_path / "set" / "annotations").mkdir(parents=True)
    picture(0).save(tmp_path / "x.png")
    with zipfile.ZipFile(tmp_path / "set" / "images.zip", "w") as archive:
        archive.write(tmp_path / "x.png", "x.png")
    with ExitStack() as stack:
        folder = unpacked(tmp_path / "set", stack)
        assert (folder / "0" / "x.png").is_file()
        assert (folder / "annotations").is_dir()
    assert not folder.exists()


def shard(path: Path, **examples: dict[str, object]) -> Path:
    """A WebDataset archive: one picture per key, with the contents of its other members by suffix."""
    with tarfile.open(path, "w") as tar:
        for key, members in examples.items():
            image = io.BytesIO()
            picture(len(key)).save(image, "PNG")
            for suffix, content in {"png": image.getvalue(), **members}.items():
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(raw)
                tar.addfile(info, io.BytesIO(raw))
    return path


@pytest.mark.parametrize("names", [(0, 1, 2), ("cat", "dog", "emu")])
def test_classes_of_shards_have_one_number_in_all_splits(tmp_path: Path, names):
    (tmp_path / "set").mkdir()
    shard(tmp_path / "set" / "train-0.tar", a={"json": {"label": names[1]}}, b={"json": {"label": names[2]}})
    shard(tmp_path / "set" / "val-0.tar", c={"json": {"label": names[0]}}, d={"json": {"label": names[2]}})
    training, validation = (load(tmp_path / "set", split) for split in ("train", "validation"))
    assert training.class_names == validation.class_names == tuple(map(str, names))
    assert (training.labels.tolist(), validation.labels.tolist()) == ([1, 2], [0, 2])


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"caption": 7}, "caption must be text"),
        ({"label": [1]}, "label must be"),
        ({"label": 4_000_000_000}, "count up"),
    ],
)
def test_metadata_of_shards_that_makes_no_sense_is_an_error(tmp_path: Path, facts, message: str):
    with pytest.raises(DataError, match=message):
        load(shard(tmp_path / "a.tar", a={"json": facts}))


def test_a_folder_of_shards_may_have_captions_alone(tmp_path: Path):
    (tmp_path / "set").mkdir()
    for number in range(2):
        shard(tmp_path / "set" / f"0000{number}.tar", a={"txt": b"a cat"}, bb={"txt": b"a dog"})
    data = load(tmp_path / "set")
    assert len(data) == 4
    assert data.captions[3] == "a dog"
