"""The site: it builds without a warning, fits desktop and phone in both themes, and its search answers."""

import functools
import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
PAGES = ("index.html", "paper.html", "networks.html", "reference/skips.html", "reference/scaling.html")
SEARCH = "return [...document.querySelectorAll('.md-search-result__item a')].map(link => link.getAttribute('href'))"
# Elements that stick out of the page and have no scrolling box around them that fits.
WIDE = """
const fits = box => box.getBoundingClientRect().right <= innerWidth + 1;
const boxed = node => { while ((node = node.parentElement)) {
  if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(node).overflowX)) return fits(node);
} return false; };
return [...document.querySelectorAll('.md-content *')]
  .filter(node => node.getBoundingClientRect().width && !fits(node) && !boxed(node))
  .map(node => node.outerHTML.slice(0, 200))
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def build(folder, *options):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder), *options]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    built = build(site)
    assert built.returncode == 0, built.stderr[-3000:]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_pages_fit_the_screen_in_both_themes(address, screen, driver, width, dark):
    screen.set_screen(driver, width, 900, dark)
    if dark:
        address = address.replace("127.0.0.1", "localhost")  # a browser keeps the theme of an origin
    for page in PAGES:
        driver.get(address + page)
        assert driver.execute_script(WIDE) == []
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        scheme = driver.execute_script("return document.body.getAttribute('data-md-color-scheme')")
        assert scheme == ("slate" if dark else "default")
    requests = driver.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(one.startswith(address) for one in requests)  # nothing from another server


def test_the_search_finds_a_public_name(address, screen, driver):
    screen.set_screen(driver, 1280, 900)
    driver.get(address + "index.html?q=estimate_kappa")
    for _ in range(100):
        if found := driver.execute_script(SEARCH):
            break
        time.sleep(0.2)
    assert any("reference/kappa.html" in one for one in found)


def test_a_broken_link_fails_the_build(tmp_path):
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n[nowhere](missing.md)\n", encoding="utf-8")
    head, _, tail = config.partition("nav:\n")
    head = "".join(line for line in head.splitlines(True) if not line.startswith(("hooks:", "watch:")))
    start = f"{head}nav:\n  - index.md\n\ntheme:\n{tail.partition('theme:')[2]}"
    (tmp_path / "mkdocs.yml").write_text(start.replace("[site.css]", "[]"), encoding="utf-8")
    built = build(tmp_path / "site", "-f", str(tmp_path / "mkdocs.yml"))
    assert built.returncode != 0
    assert "missing.md" in built.stderr
