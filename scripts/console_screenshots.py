"""Screenshots of every page of a running console: `scripts/console_screenshots.py http://127.0.0.1:8501 docs/images`.

Needs playwright and Debian's chromium.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PAGES = ("overview", "placements", "cache", "slo", "planner", "try")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
_READY_MS = 60_000
_DRAWN = """() => {
  const main = document.querySelector('[data-testid=stMainBlockContainer]');
  const charts = [...main.querySelectorAll('[data-testid=stVegaLiteChart]')];
  return main.innerText.length > 40 && !main.querySelector('[data-testid=stSkeleton]')
    && charts.every(one => one.querySelector('svg, canvas'));
}"""


def main() -> int:
    """Writes one PNG per page and prints its path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("console", help="its URL")
    parser.add_argument("directory", type=Path, help="directory of the PNGs")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--pages", nargs="*", default=PAGES)
    parser.add_argument("--width", type=int, default=1440)
    options = parser.parse_args()
    browser_path = shutil.which("chromium")
    if browser_path is None:
        print("chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 1
    options.directory.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path, args=list(FLAGS))
        page = browser.new_page(viewport={"width": options.width, "height": 900}, color_scheme=options.scheme)
        for name in options.pages:
            file = options.directory / f"{name}.png"
            _shoot(page, f"{options.console}/{'' if name == 'overview' else name}", file)
            print(file)
        browser.close()
    return 0


def _shoot(page: Page, url: str, file: Path) -> None:
    """Takes a screenshot of the whole page at its own height."""
    page.goto(url)
    page.locator("h1").wait_for(timeout=_READY_MS)
    page.wait_for_function(_DRAWN, timeout=_READY_MS)
    page.wait_for_timeout(2_500)  # parts further down arrive with the next refresh
    height = page.evaluate("document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight")
    size = page.viewport_size or {"width": 1440}
    page.set_viewport_size({"width": size["width"], "height": max(900, int(height) + 40)})
    page.wait_for_timeout(3_000)  # charts draw themselves after they are loaded
    page.screenshot(path=file)
    page.set_viewport_size({"width": size["width"], "height": 900})


if __name__ == "__main__":
    sys.exit(main())
