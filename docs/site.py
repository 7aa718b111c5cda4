"""mkdocs hooks: pages that live outside docs/, and links to files of the repository.

The pages of docs/ are written for GitHub, where `../results/x.json` and `../CONTRIBUTING.md` work. On the site the
pages of `PAGES` are part of the navigation, and every other linked file is copied to `repository/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"(^```.*?^```)", flags=re.M | re.S)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/ and the files that pages link to."""
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    pages = list(files.documentation_pages())
    for page in pages:  # grows: a linked page may link to more
        for path in _links(page):
            if files.get_file_from_path(_uri(path)) is None:
                for new in _added(path, config):
                    files.append(new)
                    pages += [new] if new.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        path = _target(page.file, match[2])
        return match[0] if path is None else match[1] + posixpath.relpath(_uri(path), folder or ".") + match[3]

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def _links(file: Any) -> list[Path]:
    if file.abs_src_path is None:
        return []
    text = FENCE.sub("", Path(file.abs_src_path).read_text(encoding="utf-8"))
    return [path for match in LINK.finditer(text) if (path := _target(file, match[2])) is not None]


def _target(file: Any, link: str) -> Path | None:
    """The file or folder of the repository that a link leads to."""
    if file.abs_src_path is None:
        return None
    path = (Path(file.abs_src_path).parent / link).resolve()
    return path if path.exists() else None


def _uri(path: Path) -> str:
    """Where the site has a file of the repository."""
    uri = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"repository/{uri}/index.md"
    return PAGES.get(uri) or (uri.removeprefix("docs/") if uri.startswith("docs/") else f"repository/{uri}")


def _added(path: Path, config: Any) -> list[Any]:
    """The file, or a page that lists the files of a folder."""
    if path.is_dir():
        inside = [one.name for one in sorted(path.iterdir()) if one.is_file()]
        listing = "\n".join(f"- [{name}]({name})" for name in inside)
        options: dict[str, Any] = {"content": f"# {path.relative_to(ROOT).as_posix()}\n\n{listing}\n"}
        others = [_added(path / name, config)[0] for name in inside]
    else:
        options, others = {"abs_src_path": str(path)}, []
    return [File.generated(config, _uri(path), **options, inclusion=InclusionLevel.NOT_IN_NAV), *others]
