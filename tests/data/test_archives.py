"""Archives: what is inside stays inside, and what is too large is not unpacked."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.data import archives
from scalelong.data.archives import extract, is_archive, safe_member
from scalelong.errors import ScaleLongError


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
def test_a_name_that_leads_outside_is_refused(tmp_path: Path, folder: Path, make, name: str):
    with pytest.raises(ScaleLongError, match=r"a\.archive holds .* which would be written outside"):
        extract(make(tmp_path / "a.archive", name), folder)
    assert not any("escaped" in path.name for path in tmp_path.rglob("*"))
    assert not Path("/tmp/escaped-by-scalelong").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, folder: Path, kind: bytes):
    member = tarfile.TarInfo("innocent")
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises(ScaleLongError, match="innocent, which is a link or a device"):
        extract(tar_with(tmp_path / "a.tgz", member, "innocent/x.png"), folder)
    assert not list(folder.iterdir())


def test_links_in_a_zip_are_refused(tmp_path: Path, folder: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        link = zipfile.ZipInfo("innocent")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(ScaleLongError, match="innocent, which is a link or a device"):
        extract(tmp_path / "a.zip", folder)


def test_a_bomb_stops_at_the_limit(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(8 << 20))
    monkeypatch.setattr(archives, "MAX_BYTES", 1 << 20)
    with pytest.raises(ScaleLongError, match=r"bomb\.zip unpacks to more than 1 MiB"):
        extract(tmp_path / "bomb.zip", folder)
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= 1 << 20


def test_the_ratio_is_bounded_too(tmp_path: Path, folder: Path):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(80 << 20))  # 80 KB as a file
    with pytest.raises(ScaleLongError, match="unpacks to more than 64 MiB"):
        extract(tmp_path / "bomb.zip", folder)


def test_a_member_that_comes_twice_is_refused(tmp_path: Path, folder: Path):
    with pytest.raises(ScaleLongError, match=r"holds x\.png twice"):
        extract(tar_with(tmp_path / "a.tgz", "x.png", "x.png"), folder)


@given(data=st.binary(max_size=200), name=st.sampled_from(["a.zip", "a.tar", "a.tgz", "a.tar.xz"]))
@settings(max_examples=60, deadline=None)
def test_random_bytes_are_a_broken_archive(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str):
    base = tmp_path_factory.mktemp("random")
    (base / name).write_bytes(data)
    (base / "out").mkdir()
    with pytest.raises(ScaleLongError, match="is a broken archive"):
        extract(base / name, base / "out")


@given(position=st.floats(0, 1), change=st.integers(1, 255), kind=st.sampled_from(["zip", "tgz"]))
@settings(max_examples=100, deadline=None)
def test_a_damaged_archive_is_read_or_refused(
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
    except ScaleLongError as error:
        message = str(error)
        assert path.name in message
    assert {file.name for file in base.iterdir()} == {path.name, "out"}


@given(st.text(max_size=30))
def test_a_safe_name_stays_inside(name: str):
    try:
        path = safe_member(name, "a.zip")
    except ScaleLongError:
        return
    assert (Path("/base") / path).is_relative_to("/base")
    assert ".." not in path.parts


def test_archives_are_known_by_their_names():
    assert is_archive(Path("a.ZIP"))
    assert is_archive(Path("a.tar.gz"))
    assert not is_archive(Path("a.gz"))
