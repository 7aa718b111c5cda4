"""Where a run is: a folder, a network that comes with the package, or a repository on the Hugging Face hub.

    scalelong.load_run("digits")           # a small trained network, without training or download
    scalelong.load_run("hf:owner/name")    # what `run.push_to_hub("owner/name")` uploaded

A folder of that name comes first. `shipped/README.md` records the command that trained the shipped network.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from scalelong.errors import RunError, suggestion
from scalelong.files import atomic_folder, cache_dir
from scalelong.version import __version__

SHIPPED = Path(__file__).parent / "shipped"
HUB = "hf:"


def shipped_networks() -> tuple[str, ...]:
    """Return the names of the trained networks that come with the package."""
    return tuple(sorted(path.parent.name for path in SHIPPED.glob("*/config.json")))


def locate(run: Path | str) -> Path:
    """Return the folder of a run. A shipped network is copied to the cache, where commands can write beside it."""
    name = str(run)
    if name.startswith(HUB):
        from scalelong.models.hub import download

        return download(name.removeprefix(HUB))
    if Path(run).exists() or name not in shipped_networks():
        return Path(run)
    folder = cache_dir() / "networks" / __version__ / name
    if not folder.exists():
        try:
            with atomic_folder(folder) as temporary:
                shutil.copytree(SHIPPED / name, temporary, dirs_exist_ok=True)
        except (OSError, ValueError):
            if not folder.exists():  # another process may have copied it meanwhile
                raise
    return folder


def no_run(folder: Path, config: str) -> RunError:
    """Build the error for a folder that is not a run."""
    names = shipped_networks()
    hint = suggestion(str(folder), names) if not folder.exists() else ""
    made = f"scalelong train creates one, and {', '.join(map(repr, names))} comes with the package"
    return RunError(f"{folder} is not a run folder: it has no {config}; {made}{hint}")
