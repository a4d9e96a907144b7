"""What the console is told: series, placements, timelines, edits of classes, previews; and who may ask."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.services.gateway.fakes import Fleet, running_fleet
from tests.services.gateway.test_gateway_admission import PROMPT, complete, measured

STRICT: dict[str, Any] = {"ttft_s": 0.5, "rules": [{"kind": "header", "header": "X-Customer-Tier", "value": "strict"}]}


async def ask(fleet: Fleet, path: str, method: str = "GET", *, token: str = "", **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, f"{fleet.http}/halfmoon/v1/{path}", json=body or None) as response,
    ):
        return response.status, await response.json()


async def test_a_placement_says_why(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair()
        measured(fleet, prefill, 0.01)
        assert (await complete(fleet))[0] == 200
        (placement,) = (await ask(fleet, "placements"))[1]
        (candidate,) = placement["candidates"]
        assert (placement["prefill_worker"], placement["decode_worker"]) == (prefill.worker_id, decode.worker_id)
        assert candidate["worker_id"] == prefill.worker_id
        assert candidate["compute_s"] == pytest.approx(0.01 * len(PROMPT), rel=0.1)
        parts = candidate["queue_s"] + candidate["restore_s"] + candidate["compute_s"]
        assert parts == pytest.approx(placement["predicted"]["ttft_s"], rel=0.01)
        assert placement["measured"]["status"] == "ok"
        assert placement["measured"]["ttft_s"] > 0


async def test_a_request_has_a_timeline(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        await complete(fleet)
        (request_id,) = [one["request_id"] for one in (await ask(fleet, "placements"))[1]]
        found = await _until_written(fleet, request_id)
        spans = found["timeline"]
        assert [(span["service"], span["name"]) for span in spans] == [
            ("gateway", "admission"), ("p0", "queue"), ("p0", "prefill"), ("gateway", "first token"), ("d0", "decode"),
        ]  # fmt: skip
        assert all(one["end_s"] == two["start_s"] for one, two in itertools.pairwise(spans))
        assert spans[-1]["end_s"] == found["request"]["e2e_s"]
        assert found["request"]["predicted_prefill_s"] is not None
        assert (await ask(fleet, "requests/nobody"))[0] == 404


async def _until_written(fleet: Fleet, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {"request": None}

    async def is_written() -> bool:
        nonlocal found
        _, found = await ask(fleet, f"requests/{request_id}")
        return found["request"] is not None

    while not await is_written():
        pass
    return found


async def test_series_count_what_ended(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        await complete(fleet)
        measured(fleet, prefill, 1.0)
        assert (await ask(fleet, "classes/strict", "PUT", **STRICT))[0] == 200
        assert (await complete(fleet, "strict"))[0] == 429
        status, _ = await ask(fleet, "series?minutes=31")
        assert status == 400
        series = fleet.gateway.routing.telemetry.series
        shown = series.shown(fleet.cluster.clock() + 10, 600)
        assert shown["together"]["classes"] == {
            "default": {"ended": 1, "good": 1, "refused": 0, "failed": 0},
            "strict": {"ended": 1, "good": 0, "refused": 1, "failed": 0},
        }
        assert sum(shown["refusals"]["ttft"]) > 0
        assert shown["together"]["ttft_s"]["p50"] > 0


async def test_edits_are_remembered_whole(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await ask(fleet, "classes/strict", "PUT", **STRICT)
        await ask(fleet, "classes/strict", "PUT", **{**STRICT, "ttft_s": 2.0, "version": 1})
        async with aiohttp.ClientSession() as session:
            await session.delete(f"{fleet.http}/halfmoon/v1/classes/strict?version=2")
        edits = (await ask(fleet, "class_edits"))[1]
        told = [
            (one["version"], *((one[side] or {}).get("ttft_s") for side in ("before", "definition"))) for one in edits
        ]
        assert told == [(2, 2.0, None), (2, 0.5, 2.0), (1, None, 0.5)]
        assert len((await ask(fleet, "class_edits?limit=1"))[1]) == 1


async def test_a_preview_replays_the_last_hour(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        measured(fleet, prefill, 1.0)
        await ask(fleet, "classes/strict", "PUT", **STRICT)
        assert (await complete(fleet, "strict"))[0] == 429
        await ask(fleet, "classes/strict", "PUT", **{**STRICT, "ttft_s": 500.0, "version": 1})
        assert (await complete(fleet, "strict"))[0] == 200
        request_id = (await ask(fleet, "placements"))[1][0]["request_id"]
        await _until_written(fleet, request_id)
        _, preview = await ask(fleet, "class_previews/strict", "POST", **STRICT)
        assert preview["num_requests"] == 2
        assert (preview["num_refused"], preview["num_would_be_refused"]) == (1, 2)
        status, answer = await ask(fleet, "class_previews/strict", "POST", ttft_s=-1.0)
        assert (status, answer["error"]["param"]) == (400, "ttft_s")
        assert (await ask(fleet, "classes"))[1]["classes"][0]["ttft_s"] == 500.0  # nothing has changed


async def test_what_workers_have_cached_and_stores_of_which_there_may_be_none(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        _, cache = await ask(fleet, "cache")
        assert {one["worker_id"]: one["cached_blocks"] for one in cache["workers"]} == {"p0": 0, "d0": 0}
        assert (await ask(fleet, "stores"))[1] == []
    async with running_fleet(tmp_path, kv_store=("127.0.0.1:1",)) as fleet:
        (store,) = (await ask(fleet, "stores"))[1]
        assert (store["state"], store["address"]) == ("away", "127.0.0.1:1")


async def test_the_operator_token(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, operator_token="o", api_key=("k",)) as fleet:
        for given, wanted in (("", 401), ("k", 401), ("o", 200)):
            assert (await ask(fleet, "placements", token=given))[0] == wanted
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer o"}) as session:
            assert (await session.get(f"{fleet.http}/v1/models")).status == 401  # it is no API key


async def test_beyond_loopback_the_control_api_is_closed_without_a_token(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, host="0.0.0.0") as fleet:
        status, answer = await ask(fleet, "placements")
        assert (status, "no operator token" in answer["error"]["message"]) == (401, True)
        async with aiohttp.ClientSession() as session:
            assert (await session.get(f"{fleet.http}/v1/models")).status == 200
