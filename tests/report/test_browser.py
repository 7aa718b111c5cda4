"""The page in headless Chromium: charts, legend, keyboard, phone, dark mode, printing, and no other script."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_run
from PIL import Image

from scalelong.report import write_report

pytestmark = pytest.mark.slow

HOSTILE = '<img src=x onerror="document.body.dataset.hacked=1">'
SCREENSHOT = Path(__file__).parents[2] / "docs" / "screenshot.py"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    runs = [
        make_run(root / f"{name}-{seed}", name, seed, samples=3) for name in ("none", "cs", "ls") for seed in (0, 1)
    ]
    evil = make_run(root / HOSTILE.replace("/", ""), "uniform", 0)
    card = json.loads((evil / "distance.json").read_text())
    card["card"]["notes"] = [HOSTILE]
    (evil / "distance.json").write_text(json.dumps(card))
    return write_report([*runs, evil], root / "page.html")


@pytest.fixture
def page(driver, path):
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    driver.set_window_size(1280, 900)
    driver.get_log("browser")
    driver.get(path.as_uri())
    return driver


def count(page, selector):
    return page.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def test_the_page_loads_without_console_messages(page):
    assert page.execute_script("return document.documentElement.classList.contains('drawn')")
    assert page.get_log("browser") == []


def test_every_chart_is_drawn(page):
    charts = page.execute_script(
        "return [...document.querySelectorAll('[data-chart]')].map(c => [c.dataset.chart,"
        " c.closest('details') ? -1 : c.querySelectorAll('svg .series path').length])"
    )
    assert len(charts) == 20
    assert all(marks for _, marks in charts), charts


def test_the_norms_of_any_layer_can_be_chosen(page):
    chart = "document.querySelector('[data-chart=norms]')"
    layers = page.execute_script(f"return [...{chart}.querySelectorAll('option')].map(o => o.textContent)")
    assert layers[0] == "‖h_1‖ (outermost)"
    assert layers[-1].endswith("(middle block)")
    first, second = (
        page.execute_script(
            f"const c = {chart}, s = c.querySelector('select'); s.value = {k}; s.dispatchEvent(new Event('input'));"
            "return [...c.querySelectorAll('svg .line')].map(p => p.getAttribute('d'))"
        )
        for k in (0, len(layers) - 1)
    )
    assert len(first) == len(second) > 1
    assert first != second


def test_the_band_of_a_norm_lies_within_the_axes_and_the_tip_has_it(page):
    outside = page.execute_script(
        """const chart = document.querySelector('[data-chart=norms]');
           const box = chart.querySelector('clipPath rect').getBBox();
           return [...chart.querySelectorAll('svg .range')].filter(path => {
             const own = path.getBBox();
             return own.y < box.y || own.y + own.height > box.y + box.height;
           }).length"""
    )
    assert count(page, "[data-chart=norms] svg .range") > 1
    assert outside == 0
    chart = page.find_element("css selector", "[data-chart=norms]")
    chart.send_keys("\ue014")  # the right arrow
    assert "±" in chart.find_element("css selector", ".tip").text


def test_lines_lie_within_their_axes(page):
    """Every point is inside its chart, and no path contains NaN."""
    bad = page.execute_script(
        """return [...document.querySelectorAll('svg .line')].filter(path => {
             const d = path.getAttribute('d') || '';
             const box = path.ownerSVGElement.viewBox.baseVal;
             return /NaN|Infinity/.test(d) || (d.match(/-?[\\d.]+,-?[\\d.]+/g) || []).some(p => {
               const [x, y] = p.split(',').map(Number);
               return x < 0 || x > box.width || y < -1 || y > box.height + 1;
             });
           }).length"""
    )
    assert bad == 0


def test_the_legend_hides_a_variant_on_the_whole_page(page):
    runs = [2, 3]  # cs
    assert count(page, "svg .series[data-run='2']") > 5
    page.find_element("css selector", "button.chip[data-toggle='2 3']").click()
    for run in runs:
        assert count(page, f"svg .series[data-run='{run}']") == 0
    still = page.execute_script(
        "return [...document.querySelectorAll('[data-member]')].filter(n => n.offsetParent !== null"
        " && n.dataset.member.split(' ').every(r => r === '2' || r === '3')).length"
    )
    assert still == 0
    assert "cs-0.7" not in page.execute_script("return document.querySelector('#samples').innerText")
    assert "cs-0.7" not in page.execute_script(
        "return document.querySelector('#results').innerText.split('missing')[0]"
    )
    assert count(page, "svg .series[data-run='0']") > 5
    page.find_element("css selector", "#all").click()
    assert count(page, "svg .series[data-run='2']") > 5


def test_one_seed_can_be_hidden(page):
    page.find_element("css selector", "button.seed[data-toggle='3']").click()
    assert count(page, "svg .series[data-run='3']") == 0
    assert count(page, "svg .series[data-run='2']") > 5
    chip = page.find_element("css selector", "button.chip[data-toggle='2 3']")
    assert chip.get_attribute("aria-pressed") == "mixed"


def test_hidden_charts_say_so_and_come_back(page):
    for button in page.find_elements("css selector", "button.chip"):
        button.click()
    assert count(page, "svg .series") == 0
    assert "nothing to show" in page.execute_script("return document.querySelector('[data-chart=loss]').textContent")
    page.find_element("css selector", "#all").click()
    assert count(page, "svg .series") > 50
    assert page.get_log("browser") == []


def test_the_keyboard_reaches_legend_and_charts(page):
    from selenium.webdriver.common.keys import Keys

    page.execute_script("document.querySelector('button.chip').focus()")
    page.switch_to.active_element.send_keys(Keys.SPACE)
    assert count(page, "svg .series[data-run='0']") == 0
    chart = page.find_element("css selector", "[data-chart=validation]")
    page.execute_script("arguments[0].focus()", chart)
    chart.send_keys(Keys.END)
    tip = chart.find_element("css selector", ".tip")
    assert "step 400" in tip.text
    assert "cs-0.7" in tip.text
    chart.send_keys(Keys.LEFT)
    assert "step 350" in tip.text
    chart.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()


def test_the_pointer_shows_values(page):
    from selenium.webdriver.common.action_chains import ActionChains

    chart = page.find_element("css selector", "[data-chart=loss]")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(page).move_to_element(chart).perform()
    assert "step" in chart.find_element("css selector", ".tip").text


def test_log_axis_and_smoothing_redraw(page):
    line = "return document.querySelector('[data-chart=loss] .series .line').getAttribute('d')"
    before = page.execute_script(line)
    page.find_element("css selector", "#log").click()
    logarithmic = page.execute_script(line)
    assert logarithmic != before
    page.execute_script(
        "const s = document.querySelector('#smooth'); s.value = 0.9; s.dispatchEvent(new Event('input'))"
    )
    assert page.execute_script(line) != logarithmic
    assert page.get_log("browser") == []


def test_the_slider_selects_the_samples_of_a_step(page):
    shown = "return [...document.querySelectorAll('.samples img')].filter(i => !i.hidden).map(i => +i.dataset.step)"
    assert set(page.execute_script(shown)) == {0, 400}  # 0: real images
    page.execute_script("const s = document.querySelector('#frame'); s.value = 0; s.dispatchEvent(new Event('input'))")
    assert max(page.execute_script(shown)) < 400
    assert page.execute_script("return [...document.images].every(i => i.naturalWidth > 0)")


def test_samples_are_enlarged_by_whole_pixels(page):
    sizes = page.execute_script(
        "return [...document.querySelectorAll('#samples .grids img')].filter(i => i.offsetParent && !i.hidden)"
        ".map(i => [i.getBoundingClientRect().width / i.getAttribute('width'), getComputedStyle(i).imageRendering])"
    )
    assert sizes
    for scale, rendering in sizes:
        assert scale == round(scale) >= 5  # images of 8 pixels have at least 40 on the screen
        assert rendering == "pixelated"


def test_a_grid_is_enlarged_by_mouse_or_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    first = page.find_element("css selector", "#samples .sheet")
    small = first.size["width"]
    page.execute_script("arguments[0].focus()", first)
    first.send_keys(Keys.ENTER)
    title = "return document.querySelector('#zoom[open] figcaption').textContent"
    assert "Real images" in page.execute_script(title)
    large = page.find_element("css selector", "#zoom .strip").size["width"]
    assert large > 1.5 * small
    others = []
    for _ in range(3):
        page.switch_to.active_element.send_keys(Keys.RIGHT)
        others.append(page.execute_script(title).strip())
    assert any("none" in name for name in others)
    assert len(set(others)) == 3
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert count(page, "#zoom[open]") == 0
    first.click()
    assert count(page, "#zoom[open]") == 1
    page.find_element("css selector", "#zoom .sheet").click()
    assert count(page, "#zoom[open]") == 0
    assert page.get_log("browser") == []


def test_every_axis_has_two_labels_or_more(page):
    few = page.execute_script(
        """const few = [];
           for (const chart of document.querySelectorAll('[data-chart]')) {
             if (chart.closest('details:not([open])')) continue;
             for (const svg of chart.querySelectorAll('svg')) {
               const ticks = [...svg.querySelectorAll('.tick')];
               const texts = (list) => new Set(list.map(t => t.textContent)).size;
               const x = ticks.filter(t => t.getAttribute('text-anchor') === 'middle' || +t.getAttribute('x') > 60);
               const y = ticks.filter(t => !x.includes(t));
               if (texts(x) < 2 || (chart.dataset.chart !== 'forest' && texts(y) < 2)) few.push(chart.dataset.chart);
             }
           }
           return few"""
    )
    assert few == []


def test_tables_show_that_they_scroll_where_they_do(page, screen):
    hints = (
        "return [...document.querySelectorAll('.table')].map(t => [t.firstChild.scrollWidth > t.firstChild.clientWidth"
    )
    hints += " + 1, t.lastChild.offsetParent !== null])"
    screen.set_screen(page, 420, 900)
    page.refresh()
    narrow = page.execute_script(hints)
    assert [True, True] in narrow
    assert all(overflows == hint for overflows, hint in narrow)


def test_the_screenshot_command_writes_a_picture(path, tmp_path):
    words = [sys.executable, str(SCREENSHOT), str(path), str(tmp_path / "page.png"), "--width", "768", "--dark"]
    subprocess.run(words, check=True, timeout=120)
    pixels = np.asarray(Image.open(tmp_path / "page.png").convert("L"))
    assert pixels.shape == (1000, 768)
    assert np.median(pixels) < 60


def test_hostile_names_stay_text(page):
    assert HOSTILE.replace("/", "") in page.execute_script("return document.body.innerText")
    assert page.execute_script("return document.body.dataset.hacked") is None
    assert count(page, "img[src='x']") == 0


def test_the_page_fits_a_phone(page):
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    )
    page.refresh()
    wide = page.execute_script("return document.documentElement.scrollWidth")
    assert wide <= 390
    assert count(page, "[data-chart=loss] .series") == 7


def test_the_page_follows_dark_mode(page):
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    colours = page.execute_script(
        "const s = getComputedStyle(document.body);"
        "return [s.backgroundColor, s.color].map(c => c.match(/\\d+/g).map(Number))"
    )
    assert max(colours[0]) < 60
    assert min(colours[1]) > 180


def test_the_page_prints(page):
    printed = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    content = base64.b64decode(printed["data"])
    assert content.startswith(b"%PDF")
    assert len(content) > 50_000
