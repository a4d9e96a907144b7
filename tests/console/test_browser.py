"""The console in a real browser, over a live cluster of simulated workers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

pytest.importorskip("streamlit")
playwright = pytest.importorskip(
    "playwright.async_api", reason="playwright is not installed: pip install -e '.[browser]'"
)

from tests.e2e.system import ROOT, System, running_system  # noqa: E402
from tests.services.gateway.fakes import Script, running_fleet, served_model  # noqa: E402

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium: apt-get install chromium"),
]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PATIENCE_MS = 90_000  # for what must come; never slept
PAGES = ("Placements", "Cache", "SLO", "Planner", "Autopilot", "Try it", "Overview")
ADDRESSES = {title: title.split()[0].lower() for title in PAGES}
TOKEN = "moon"


class Seen(NamedTuple):
    """A page of the browser, and what went wrong on it."""

    page: Any
    errors: list[str]


@asynccontextmanager
async def running_console(
    gateway: str, planner: str = "", token: str = "", secret_file: Path | str = ""
) -> AsyncIterator[str]:
    """Streamlit on a free port, with its URL; ready when the browser's first look is answered.

    With a token it can be reached from other machines, and asks who comes for it.
    """
    settings = {
        "HALFMOON_CONSOLE_GATEWAY_URL": gateway,
        "HALFMOON_CONSOLE_PLANNER": planner,
        "HALFMOON_CONSOLE_OPERATOR_TOKEN": token,
        "HALFMOON_CLUSTER_SECRET_FILE": str(secret_file),
    }
    address = "0.0.0.0" if token else "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = (f"--server.port={port}", f"--server.address={address}", "--server.headless=true")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "console", *flags, "--browser.gatherUsageStats=false"),
        stdout=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, **settings},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        await asyncio.wait_for(_until_answered(f"{url}/_stcore/health"), PATIENCE_MS / 1000)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def _until_answered(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)


@asynccontextmanager
async def browsing() -> AsyncIterator[Seen]:
    """An empty page of headless Chromium."""
    errors: list[str] = []
    async with playwright.async_playwright() as play:
        browser = await play.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda message: errors.append(f"{message.text} {message.location}") if message.type == "error" else None,
        )
        yield Seen(page, errors)
        await browser.close()


async def complete(system: System) -> int:
    """The status of a small request."""
    body = {"model": "demo", "prompt": "hello " * 200, "max_tokens": 4}
    url = f"{system.url}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        await response.read()
        return response.status


async def test_a_day_of_an_operator(tmp_path: Path) -> None:
    """One cluster for all of it: every page, an edit that counts from the next request, what dies and comes back."""
    options = (
        "--engine",
        "sim",
        "--prefill",
        "2",
        "--decode",
        "2",
        "--sim-processes",
        "2",
        "--slo",
        "off",
        "--no-console",
    )
    async with (
        running_system(tmp_path, *options) as system,
        running_console(system.url, planner_of(tmp_path), TOKEN, tmp_path / "cluster_secret") as console,
        browsing() as (page, errors),
    ):
        for _ in range(6):
            assert await complete(system) == 200
        await every_page_opens_at_its_address(page, console)
        await nothing_is_wider_than_a_narrow_window(page)
        await an_edit_changes_the_next_requests(page, system)
        await no_figure_or_button_is_cut_in_a_small_window(page)
        await the_edit_is_undone(page, system)
        await a_search_is_begun_and_cancelled(page)
        await a_search_ends_with_a_plan(page)
        await a_dead_worker_is_red(page, system)
        await a_dead_gateway_is_told_and_comes_back(page, system)
        assert errors == []


async def test_every_page_shows_256_workers(tmp_path: Path) -> None:
    options = ("--engine", "sim", "--prefill", "128", "--decode", "128", "--sim-processes", "2", "--no-console")
    async with (
        running_system(tmp_path, *options) as system,
        running_console(system.url) as console,
        browsing() as (page, errors),
    ):
        assert await complete(system) == 200
        await page.goto(console)
        await every_page_renders(page, num_workers=256)
        assert errors == []


async def test_reasoning_is_seen_while_it_comes_and_folded_away_behind_its_answer(tmp_path: Path) -> None:
    gate, model = asyncio.Event(), replace(served_model(), reasons=True)
    said = Script("<think>\nRome or Paris?\n</think>\n\nIt is **Paris**.", decode_gate=gate, tokens_before_gate=22)
    async with (
        running_fleet(tmp_path, model=model) as fleet,
        running_console(fleet.http) as console,
        browsing() as (page, errors),
    ):
        await fleet.pair(said)
        await page.goto(f"{console}/try")
        await is_whole(page, "Try it")
        await page.get_by_test_id("stChatInputTextArea").fill("The capital of France?")
        await page.keyboard.press("Enter")
        thought = page.get_by_test_id("stExpander").get_by_text("Rome or Paris?")
        await thought.wait_for()
        gate.set()
        await page.get_by_text("Paris", exact=True).wait_for()
        await thought.wait_for(state="hidden")
        await page.get_by_test_id("stExpander").get_by_text("Reasoning").click()
        await thought.wait_for()
        assert errors == []


async def open_page(page: Any, title: str) -> None:
    """By its link."""
    await page.get_by_test_id("stSidebarNav").get_by_text(title, exact=True).click()
    await page.get_by_role("heading", name=title, exact=True).wait_for()


async def every_page_opens_at_its_address(page: Any, console: str) -> None:
    """For those who know the token."""
    await page.goto(console)
    await enter(page, "sun")
    await page.get_by_text("This is not the operator token.").wait_for()
    assert await page.get_by_role("heading", name="Overview").count() == 0
    for title, address in ADDRESSES.items():
        await page.goto(f"{console}/{address}")
        await enter(page, TOKEN)
        await is_whole(page, title)


async def is_whole(page: Any, title: str) -> None:
    await page.get_by_role("heading", name=title, exact=True).wait_for()
    await page.wait_for_function("() => !document.querySelector('[data-testid=stSkeleton]')")
    for broken in ("stException", "stAlertContentError"):
        assert await page.get_by_test_id(broken).count() == 0, (title, broken)


async def enter(page: Any, token: str) -> None:
    await page.locator("input[type=password]").fill(token)
    await page.get_by_role("button", name="Enter").click()


async def nothing_is_wider_than_a_narrow_window(page: Any) -> None:
    """Of the overview, which is open."""
    await page.set_viewport_size({"width": 420, "height": 800})
    await page.locator(".drawn svg").nth(6).wait_for()
    main = page.get_by_test_id("stMain")
    assert await main.evaluate("one => one.scrollWidth <= one.clientWidth")
    await page.set_viewport_size({"width": 400, "height": 800})
    await page.goto(page.url.rpartition("/")[0] + "/autopilot")
    await enter(page, TOKEN)
    await is_whole(page, "Autopilot")
    assert await main.evaluate("one => one.scrollWidth <= one.clientWidth")
    await page.set_viewport_size({"width": 1440, "height": 900})
    await page.get_by_test_id("stSidebarNav").wait_for()


_CUT = """() => [...document.querySelectorAll('[data-testid=stMetric] *, [data-testid=stMain] button *')]
    .filter(one => one.scrollWidth > one.clientWidth && getComputedStyle(one).overflowX !== 'visible')
    .map(one => one.textContent)"""


async def no_figure_or_button_is_cut_in_a_small_window(page: Any) -> None:
    await page.set_viewport_size({"width": 800, "height": 800})
    for title, part in (("Overview", "stMetric"), ("Cache", "stMetric"), ("SLO", "stButton")):
        await open_page(page, title)
        await page.get_by_test_id(part).first.wait_for()
        assert await page.evaluate(_CUT) == [], title
    await page.set_viewport_size({"width": 1440, "height": 900})


async def every_page_renders(page: Any, num_workers: int) -> None:
    for title in PAGES:
        await open_page(page, title)
        await is_whole(page, title)
        if title == "Overview":
            await page.locator('[data-standing="serving"]').nth(num_workers - 1).wait_for()
            assert await page.locator("[data-worker]").count() == num_workers
            await page.locator('[data-store][data-standing="there"]').wait_for()
            await page.locator(".drawn svg").nth(6).wait_for()
            await page.get_by_text(f"All {num_workers} workers in a table").click()
            await page.get_by_test_id("stDataFrame").wait_for()


async def an_edit_changes_the_next_requests(page: Any, system: System) -> None:
    await open_page(page, "SLO")
    await page.get_by_label("Name", exact=True).fill("default")
    await page.get_by_label("Name", exact=True).press("Enter")
    await page.get_by_label("TTFT target (ms)", exact=True).fill("0.1")
    await page.get_by_label("TTFT target (ms)", exact=True).press("Enter")
    await page.get_by_role("button", name="Preview").click()
    await page.get_by_text("Of the last hour's").wait_for()
    assert await complete(system) == 200  # a preview changes nothing
    await page.get_by_role("button", name="Save", exact=True).click()
    await page.get_by_text("Class default is saved as version 1.").wait_for()
    statuses = [await complete(system) for _ in range(4)]
    assert 429 in statuses  # an idle cluster lets one in at times, to see


def planner_of(state_dir: Path) -> str:
    """Where the planner that `halfmoon up` started listens."""
    lines = (state_dir / "logs" / "planner.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return str(next(one["address"] for one in events if one["event"] == "service.ready"))


async def a_search_is_begun_and_cancelled(page: Any) -> None:
    await open_page(page, "Planner")
    await page.get_by_text("Last hour here").click()
    await page.get_by_text("per second, with").wait_for()
    await page.get_by_text("Known workload").click()
    await page.get_by_text("More", exact=True).click()
    await page.get_by_label("Requests per simulation").fill("20000")  # it is not over before it is cancelled
    await page.get_by_label("Requests per simulation").press("Enter")
    cancel = page.get_by_role("button", name="Cancel")
    await search_until(page, cancel)
    await cancel.click()
    await page.get_by_text("The search was cancelled").wait_for()


async def a_search_ends_with_a_plan(page: Any) -> None:
    await page.get_by_label("Requests per simulation").fill("20")
    await page.get_by_label("Requests per simulation").press("Enter")
    await search_until(page, page.get_by_text("the best layout had more load"))
    await page.get_by_role("button", name="Download plan.yaml").wait_for()


async def search_until(page: Any, sign: Any) -> None:
    search = page.get_by_test_id("stMainBlockContainer").locator("button", has_text="Search")
    while not await sign.is_visible():  # a page that is just being drawn anew may lose a click
        if await search.is_enabled():
            await search.click()
        await page.wait_for_timeout(1000)


async def the_edit_is_undone(page: Any, system: System) -> None:
    await page.get_by_role("button", name="Undo").first.click()
    await page.get_by_text("Class default is restored.").wait_for()
    assert [await complete(system) for _ in range(4)] == [200] * 4


async def a_dead_worker_is_red(page: Any, system: System) -> None:
    await open_page(page, "Overview")
    await page.locator('[data-standing="serving"]').nth(3).wait_for()
    simulations = system.serving("simulation")
    simulations[0].kill()
    await page.locator('[data-standing="gone"]').first.wait_for()
    assert await page.locator('[data-standing="gone"]').first.locator("rect").first.get_attribute("fill") == "#D55E00"


async def a_dead_gateway_is_told_and_comes_back(page: Any, system: System) -> None:
    """It hangs, is shown to be away, dies, and is started again."""
    gateway = system.serving("gateway")[0]
    gateway.suspend()
    await page.get_by_text("This page retries by itself.").wait_for()
    assert await page.locator("[data-worker]").count() >= 4  # what was known stays; those that died may be among them
    gateway.kill()
    await page.get_by_test_id("stAlertContentError").wait_for(state="detached")
    await page.locator('[data-standing="serving"]').nth(3).wait_for()
