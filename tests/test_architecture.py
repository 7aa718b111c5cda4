"""docs/architecture.md describes the code as it is."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "scalelong"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SUPPORT = {"errors", "files", "counter", "progress", "lazy", "version", "_modules", "_text"}


def rooms() -> dict[str, str]:
    """Room -> the file to start reading at, from the table of rooms."""
    section = PAGE.split("## Rooms")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \|.*\| `([\w./]+)` \|$", section, flags=re.M))


def test_every_room_is_described_with_a_file_to_start_at():
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    modules = {path.stem for path in SOURCE.glob("*.py") if not path.stem.startswith("__")}
    assert set(rooms()) == packages | (modules - SUPPORT)
    for room, start in rooms().items():
        assert (SOURCE / room / start).is_file() or (SOURCE / start).is_file(), (room, start)


def test_every_room_has_its_place_in_the_checked_layers():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = config["tool"]["importlinter"]["contracts"][0]["layers"]
    placed = {name.strip().removeprefix("scalelong.") for layer in layers for name in re.split(r"[|:]", layer)}
    assert placed == set(rooms()) | SUPPORT


def test_the_files_of_the_hop_table_exist():
    section = PAGE.split("## How far to read")[1].split("\n## ")[0]
    files = set(re.findall(r"`(\w+(?:/\w+)?\.py)`", section))
    assert len(files) >= 8
    assert [file for file in files if not (SOURCE / file).is_file()] == []


def test_kappa_is_visible_in_the_forward_of_our_u_vit():
    text = (SOURCE / "models" / "uvit.py").read_text(encoding="utf-8")
    assert "scale_skip(self," in text


def test_strategies_are_not_chosen_by_the_class_of_a_scaling():
    kinds = "No|Uniform|Constant|Explicit|Fixed|Learnable|Block|Stable|ReZero"
    checks = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "scaling" and path.name != "official.py"  # which translates LS weights
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(rf"isinstance\([^)]*\b({kinds})Scaling", line)
    ]
    assert checks == []
