"""Time until the console's pages are complete, in headless Chromium over simulated workers.

    python -m benchmarks.console [--workers 256] [--rounds 3] [--launcher console streamlit]

Starts `halfmoon up --engine sim` with half of the workers in each role, sends some requests, and runs consoles next to
it: `console` is `python -m console`, as started by `halfmoon up`; `streamlit` is the same page under plain `streamlit
run`. Seconds:

first           the first visit to a server that has just answered its health check
again           a visit by a browser without a cache to a server visited before; median
Placements …    from the click on a page's link until it is complete; median

A page is complete when its heading is there, nothing is still loading, and every chart is drawn. Needs playwright and
Debian's chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from playwright.async_api import Browser, Page, async_playwright

from halfmoon.up.supervision.child import ServiceSpec
from halfmoon.up.supervision.log_files import LogFiles
from halfmoon.up.supervision.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("Placements", "Cache", "SLO", "Planner", "Try it", "Overview")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
LAUNCHERS = {"console": ("-m", "console"), "streamlit": ("-m", "streamlit", "run", str(ROOT / "console" / "app.py"))}
_PATIENCE_MS = 120_000
_NUM_REQUESTS = 20
_WHOLE = """title => {
  const main = document.querySelector('[data-testid=stMainBlockContainer]');
  if (main?.querySelector('h1')?.textContent.trim() !== title) return false;
  if (main.querySelector('[data-testid=stSkeleton]')) return false;
  const charts = [...main.querySelectorAll('[data-testid=stVegaLiteChart]')];
  return main.innerText.length > 40 && charts.every(one => one.querySelector('svg, canvas'));
}"""


async def until_whole(page: Page, title: str) -> None:
    """Waits until the page with this title is complete."""
    await page.wait_for_function(_WHOLE, arg=title, timeout=_PATIENCE_MS)


async def visit(browser: Browser, url: str) -> tuple[float, Page]:
    """Opens the first page in an empty browser; returns the seconds it took and the page."""
    page = await (await browser.new_context(viewport={"width": 1440, "height": 900})).new_page()
    page.set_default_timeout(_PATIENCE_MS)
    started_s = time.perf_counter()
    await page.goto(url)
    await until_whole(page, "Overview")
    return time.perf_counter() - started_s, page


async def changes(page: Page, rounds: int) -> dict[str, float]:
    """Median seconds to change to each page that this console has."""
    times: dict[str, list[float]] = {}
    links = page.get_by_test_id("stSidebarNav")
    for _ in range(rounds):
        for title in PAGES:
            link = links.get_by_text(title, exact=True)
            if await link.count():
                started_s = time.perf_counter()
                await link.click()
                await until_whole(page, title)
                times.setdefault(title, []).append(time.perf_counter() - started_s)
    return {title: statistics.median(took) for title, took in times.items()}


@asynccontextmanager
async def running_console(launcher: Sequence[str], gateway: str, port: int) -> AsyncIterator[str]:
    """Runs a console; yields its URL after its first healthy answer."""
    with tempfile.TemporaryDirectory() as state:
        supervisor = Supervisor(LogFiles(Path(state)), lambda service, event: None)
        flags = (f"--server.port={port}", "--server.address=127.0.0.1", "--server.headless=true")
        arguments = (*launcher, *flags, "--browser.gatherUsageStats=false")
        try:
            await supervisor.start(ServiceSpec("console", arguments, {"HALFMOON_CONSOLE_GATEWAY_URL": gateway}))
            await _until(f"http://127.0.0.1:{port}/_stcore/health", lambda status, _: status == 200)
            yield f"http://127.0.0.1:{port}"
        finally:
            await supervisor.stop()


@asynccontextmanager
async def running_gateway(num_workers: int, port: int) -> AsyncIterator[str]:
    """Runs simulated workers behind a gateway that has served some requests."""
    with tempfile.TemporaryDirectory() as state:
        supervisor = Supervisor(LogFiles(Path(state) / "logs"), lambda service, event: None)
        half = str(num_workers // 2)
        which = ("--engine", "sim", "--prefill", half, "--decode", half, "--sim-processes", "2", "--no-console")
        url = f"http://127.0.0.1:{port}"
        try:
            up = ("-m", "halfmoon.cli.app", "up", *which, "--port", str(port), "--state-dir", state)
            await supervisor.start(ServiceSpec("up", up, {}))
            await _until(f"{url}/halfmoon/v1/cluster", lambda status, body: len(body.get("workers", ())) >= num_workers)
            async with aiohttp.ClientSession(url) as session:
                for number in range(_NUM_REQUESTS):
                    body = {"model": "demo", "prompt": f"moon {number} " * 100, "max_tokens": 20}
                    async with session.post("/v1/completions", json=body) as response:
                        response.raise_for_status()
            yield url
        finally:
            await supervisor.stop()


async def _until(url: str, is_ready: Any) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as response:
                    body = await response.json() if response.content_type == "application/json" else {}
                    if is_ready(response.status, body):
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


async def measure(launchers: Sequence[str], num_workers: int, rounds: int, port: int) -> None:
    """Measures and prints."""
    columns: dict[str, dict[str, float]] = {}
    async with running_gateway(num_workers, port) as gateway, async_playwright() as play:
        browser = await play.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        for number, launcher in enumerate(launchers):
            async with running_console(LAUNCHERS[launcher], gateway, port + 1 + number) as console:
                first_s, page = await visit(browser, console)
                again_s = [(await visit(browser, console))[0] for _ in range(rounds)]
                columns[launcher] = {"first": first_s, "again": statistics.median(again_s)}
                columns[launcher] |= await changes(page, rounds)
        await browser.close()
    print(f"{num_workers} workers, seconds" + "".join(f"{name:>12}" for name in columns))
    for name in next(iter(columns.values())):
        print(f"{name:20}" + "".join(f"{times[name]:12.2f}" for times in columns.values()))


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--launcher", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--port", type=int, default=18700, help="the gateway's; the consoles take the next ones")
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        print("chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # child processes end with this one
    asyncio.run(measure(options.launcher, options.workers, options.rounds, options.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
