"""The admission mode over the control API: live, versioned, kept, and the same at all gateways of a ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.errors import Incompatible
from halfmoon.ledger.ledger import open_ledger
from tests.services.gateway.fakes import Fleet, running_fleet
from tests.services.gateway.test_gateway_admission import complete, measured


async def call(fleet: Fleet, method: str = "GET", **body: Any) -> tuple[int, Any]:
    url = f"{fleet.http}/halfmoon/v1/admission"
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body or None) as response:
        return response.status, await response.json()


async def put_class(fleet: Fleet) -> None:
    url = f"{fleet.http}/halfmoon/v1/classes/default"
    async with aiohttp.ClientSession() as session, session.put(url, json={"ttft_s": 0.5}) as response:
        assert response.status == 200


async def test_another_mode_counts_from_the_next_request_on(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        measured(fleet, prefill, 1.0)
        await put_class(fleet)
        assert (await complete(fleet))[0] == 429
        status, shown = await call(fleet, "PUT", mode="off", version=0)
        assert (status, shown["mode"], shown["set"], shown["version"]) == (200, "off", "off", 1)
        assert (await complete(fleet))[0] == 200
        _, shown = await call(fleet, "PUT", mode=None, version=1)
        assert (shown["mode"], shown["own"], shown["set"], shown["version"]) == ("predicted", "predicted", None, 2)
        assert [one["mode"] for one in shown["edits"]] == [None, "off"]
        assert (await complete(fleet))[0] == 429


async def test_it_is_there_after_a_restart_and_before_the_gateways_own(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await call(fleet, "PUT", mode="load", version=0)
    async with running_fleet(tmp_path, admission="off") as fleet:
        _, shown = await call(fleet)
    assert (shown["mode"], shown["own"]) == ("load", "off")


async def test_every_gateway_takes_it_over(tmp_path: Path) -> None:
    async with (
        running_fleet(tmp_path, ledger_poll_s=0.001) as first,
        running_fleet(tmp_path, ledger_poll_s=0.001) as second,
    ):
        await call(first, "PUT", mode="load", version=0)
        async with asyncio.timeout(60):
            while (await call(second))[1]["mode"] != "load":
                pass


async def test_a_gateway_follows_it_beside_classes_of_a_later_release(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, ledger_poll_s=0.001) as fleet:
        async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            await ledger.classes.put("newer", {"of_a_later_release": 1}, 0, lambda classes: None)
            await ledger.admission.put("off", 0)
        async with asyncio.timeout(60):
            while (await call(fleet))[1]["mode"] != "off":
                pass


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"mode": "off", "version": 3}, 409),
        ({"mode": "sometimes", "version": 0}, 400),
        ({"version": 0}, 400),
        ({"mode": "off", "version": -1}, 400),
        ({"mode": "off", "speed": 1}, 400),
    ],
)
async def test_a_wrong_edit_changes_nothing(tmp_path: Path, body: dict[str, Any], status: int) -> None:
    async with running_fleet(tmp_path) as fleet:
        assert (await call(fleet, "PUT", **body))[0] == status
        assert (await call(fleet))[1]["edits"] == []


async def test_of_two_edits_at_once_one_counts(ledger_file: str) -> None:
    async with open_ledger(ledger_file) as one, open_ledger(ledger_file) as other:
        edits = await asyncio.gather(
            *(ledger.admission.put(mode, 0) for ledger, mode in ((one, "off"), (other, "load"))), return_exceptions=True
        )
        assert sum(isinstance(edit, Incompatible) for edit in edits) == 1
        assert len(await one.admission.newest(9)) == 1


@pytest.fixture
def ledger_file(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"
