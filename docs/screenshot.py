"""Write a picture of a page with headless Chromium, for documentation and for looking at pages while changing them.

make demo && .venv/bin/python docs/screenshot.py runs/demo/report.html docs/images/report.png

Needs Debian's `chromium` and `chromium-driver`.
"""

import argparse
import base64
import shutil
import tempfile
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)


def open_chromium(profile: Path | str) -> Any:
    """Return a Selenium driver of headless Chromium that keeps its files in `profile`."""
    from selenium import webdriver

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    service = shutil.which("chromedriver")
    if chromium is None or service is None:
        raise FileNotFoundError("Debian's chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(service))
    driver.set_page_load_timeout(120)
    return driver


def set_screen(driver: Any, width: int, height: int, dark: bool = False, scale: float = 1) -> None:
    """Show pages on a screen of this size. `scale` is the number of device pixels per CSS pixel."""
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})


def picture(driver: Any, whole: bool = False) -> bytes:
    """Return the visible part of the page, or all of it, as PNG."""
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
    return base64.b64decode(taken["data"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path, help="a .png file")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1000, help="0 takes the whole page")
    parser.add_argument("--scale", type=float, default=1, help="device pixels per CSS pixel")
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = open_chromium(profile)
        try:
            set_screen(driver, options.width, options.height or 1000, options.dark, options.scale)
            driver.get(options.page.resolve().as_uri())
            if not options.height:
                height = driver.execute_script("return document.documentElement.scrollHeight")
                set_screen(driver, options.width, height, options.dark, options.scale)
            options.out.write_bytes(picture(driver))
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
