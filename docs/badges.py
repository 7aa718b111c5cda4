"""Write the badges of README.md as files, so that no page asks another server: `python docs/badges.py`."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{name}: {value}">'
    '<rect width="{left}" height="20" fill="#555"/><rect x="{left}" width="{right}" height="20" fill="{color}"/>'
    '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
    '<text x="6" y="14">{name}</text><text x="{start}" y="14">{value}</text></g></svg>\n'
)


def badges() -> dict[str, str]:
    """The badges by file name, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(one for one in project["dependencies"] if one.startswith("torch"))
    values = {
        "python": (project["requires-python"].replace(">=", "") + " or newer", "#3572a5"),
        "torch": (torch.removeprefix("torch>=") + " or newer", "#3572a5"),
        "licence": (project["license"], "#3a7d44"),
        "status": (project["classifiers"][0].rpartition(" :: ")[2].split(" - ")[1].lower(), "#a15c00"),
        "tested on": ("CPU only", "#a15c00"),
    }
    drawn = {}
    for name, (value, color) in values.items():
        left, right = 12 + 7 * len(name), 12 + 7 * len(value)
        sizes = {"left": left, "right": right, "width": left + right, "start": left + 6}
        drawn[f"badge-{name.replace(' ', '-')}.svg"] = SVG.format(name=name, value=value, color=color, **sizes)
    return drawn


if __name__ == "__main__":
    for name, svg in badges().items():
        (ROOT / "docs" / "images" / name).write_text(svg, encoding="utf-8")
