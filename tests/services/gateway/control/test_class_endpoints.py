"""The control API's classes: edited live, versioned, there after a restart."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from halfmoon.ledger.ledger import open_ledger
from halfmoon.pb.gateway_pb2 import LatencyProfile
from halfmoon.policy.values import UnloadedLatency
from tests.services.gateway.fakes import Fleet, Script, running_fleet
from tests.services.gateway.test_gateway_admission import PROMPT, complete, measured

GOLD = {
    "priority": -1,
    "ttft_s": 0.5,
    "rules": [{"kind": "header", "header": "X-Customer-Tier", "value": "gold"}],
    "degradation": ["cap_max_tokens"],
}


async def call(fleet: Fleet, method: str, path: str = "", **body: Any) -> tuple[int, Any]:
    url = f"{fleet.http}/halfmoon/v1/classes{path}"
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body or None) as response:
        return response.status, None if response.status == 204 else await response.json()


async def test_an_edit_is_in_force_with_the_next_request(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        measured(fleet, prefill, 1.0)
        assert (await complete(fleet, "gold"))[0] == 200
        status, made = await call(fleet, "PUT", "/gold", **GOLD)
        assert (status, made["version"], made["reserved"]) == (200, 1, 0.0)
        assert (await complete(fleet, "gold"))[0] == 429
        status, _ = await call(fleet, "PUT", "/gold", **{**GOLD, "ttft_s": 500.0, "version": 1})
        assert status == 200
        assert (await complete(fleet, "gold"))[0] == 200


async def test_a_stale_edit_changes_nothing(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await call(fleet, "PUT", "/gold", **GOLD)
        status, body = await call(fleet, "PUT", "/gold", **{**GOLD, "ttft_s": 9.0})
        assert (status, body["error"]["code"]) == (409, "version_conflict")
        assert (await call(fleet, "DELETE", "/gold?version=7"))[0] == 409
        (stored,) = (await call(fleet, "GET"))[1]["classes"]
        assert (stored["name"], stored["version"], stored["ttft_s"]) == ("gold", 1, 0.5)


async def test_beside_classes_of_a_later_release_edits_are_refused(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        await ledger.classes.put("newer", {"of_a_later_release": 1}, 0, lambda classes: None)
        status, answer = await call(fleet, "PUT", "/gold", **GOLD)
        assert (status, answer["error"]["code"]) == (409, "of_a_later_release")
        assert "of_a_later_release" in answer["error"]["message"]
        assert [stored.name for stored in (await ledger.classes.all()).classes] == ["newer"]


async def test_wrong_classes_are_refused_whole(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await call(fleet, "PUT", "/half", reserved=0.6)
        for path, body, param in (
            ("/gold", {"reserved": 0.5}, "reserved"),
            ("/gold", {"ttft_s": -1.0}, "ttft_s"),
            ("/gold", {"speed": 3}, "speed"),
            ("/gold", {"degradation": ["panic"]}, "degradation"),
        ):
            status, answer = await call(fleet, "PUT", path, **body)
            assert (status, param in str(answer["error"]["param"])) == (400, True), answer
        assert (await call(fleet, "DELETE", "/half"))[0] == 400
        assert [one["name"] for one in (await call(fleet, "GET"))[1]["classes"]] == ["half"]


MALFORMED: tuple[tuple[str, str | None], ...] = (
    ('{"ttft_s": NaN}', None),
    ('{"ttft_s": 1e999}', "ttft_s"),
    ('{"ttft_s": 0}', "ttft_s"),
    ('{"ttft_s": 1e300}', "ttft_s"),
    ('{"tbt_s": -0.0}', "tbt_s"),
    ('{"tbt_s": "0.1"}', "tbt_s"),
    ('{"priority": 1.5}', "priority"),
    ('{"priority": 123456789012345678901234567890}', "priority"),
    ('{"capped_tokens": 0}', "capped_tokens"),
    ('{"kv_policy": "sinks:4"}', "kv_policy"),
    ('{"kv_policy": 4}', "kv_policy"),
    ('{"capped_tokens": 123456789012345678901234567890}', "capped_tokens"),
    ('{"attainment": 1.01}', "attainment"),
    ('{"reserved": -0.1}', "reserved"),
    ('{"version": -1}', "version"),
    ('{"name": "gold"}', "name"),
    ('{"applied_ttft_s": 1}', "applied_ttft_s"),
    ('{"rules": [{"kind": "header", "value": "gold"}]}', "rules"),
    ('{"rules": [{"kind": "api_key", "value": ""}]}', "rules"),
    ('{"rules": [{"kind": "api_key", "value": "key "}]}', "rules[0].value"),
    ('{"rules": [{"kind": "header", "header": "x-tier:", "value": "gold"}]}', "rules[0].header"),
    ('{"rules": [{"kind": "header", "header": "x tier", "value": "gold"}]}', "rules[0].header"),
    ('{"rules": [{"kind": "header", "header": "x-tier", "value": "a\\nb"}]}', "rules[0].value"),
    ('{"rules": [{"kind": "cookie", "value": "x"}]}', "rules[0].kind"),
    ('{"rules": [{"kind": "model", "value": "' + "x" * 5_000 + '"}]}', "rules[0].value"),
    ('{"rules": [' + ",".join(['{"kind": "model", "value": "x"}'] * 300) + "]}", "rules"),
    ('{"degradation": ["cap_max_tokens", "cap_max_tokens"]}', "degradation"),
    ("[" * 5_000, None),
    ("null", None),
    ("", None),
)


async def test_malformed_classes_are_refused_by_name(fleet: Fleet) -> None:
    for raw, param in MALFORMED:
        url = f"{fleet.http}/halfmoon/v1/classes/gold"
        async with (
            aiohttp.ClientSession() as session,
            session.put(url, data=raw, headers={"Content-Type": "application/json"}) as response,
        ):
            answer = await response.json()
        assert (response.status, answer["error"]["param"]) == (400, param), answer
        assert len(answer["error"]["message"]) < 500
    assert (await call(fleet, "GET"))[1]["classes"] == []


async def test_a_name_that_no_url_says_or_that_means_no_class_is_refused(fleet: Fleet) -> None:
    for name in ("%20", "%20gold", "gold%20", "%2e", "%2e%2e", "%00", "none"):
        url = URL(f"{fleet.http}/halfmoon/v1/classes/{name}", encoded=True)
        async with aiohttp.ClientSession() as session, session.put(url, json={"ttft_s": 1.0}) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["param"]) == (400, "name"), (name, answer)
    assert (await call(fleet, "PUT", "/gold%20tier", ttft_s=1.0))[0] == 200
    assert [one["name"] for one in (await call(fleet, "GET"))[1]["classes"]] == ["gold tier"]


async def test_a_stored_class_of_an_odd_name_stays_and_can_go(tmp_path: Path) -> None:
    rules = [{"kind": "header", "header": "x tier:", "value": "gold"}]
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        await ledger.classes.put(" ", {"rules": rules, "ttft_s": 1.0}, 0, lambda classes: None)
    async with running_fleet(tmp_path) as fleet:
        assert [one.name for one in fleet.gateway.routing.admission.classes.classes] == [" "]
        assert (await call(fleet, "PUT", "/%20", version=1))[0] == 400
        assert (await call(fleet, "DELETE", "/%20?version=1"))[0] == 204


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path) as fleet:
        yield fleet


async def test_targets_are_shown_as_they_are_applied(fleet: Fleet) -> None:
    prefill, _ = await fleet.pair()
    measured(fleet, prefill, 1e-6)
    await call(fleet, "PUT", "/gold", **{**GOLD, "tbt_s": 0.25})
    admission, now_s = fleet.gateway.routing.admission, fleet.cluster.clock()
    (gold,) = admission.classes.classes
    for _ in range(30):
        admission._feedback.add(gold, 0.75, 0.1, UnloadedLatency(), now_s, now_s)
    assert (await complete(fleet, "gold"))[0] == 200
    (shown,) = (await call(fleet, "GET"))[1]["classes"]
    assert (shown["ttft_s"], shown["applied_ttft_s"], shown["measured_ttft_s"]) == (0.5, 0.45, 0.75)
    assert (shown["tbt_s"], shown["applied_tbt_s"], shown["measured_tbt_s"]) == (0.25, 0.25, None)


async def test_classes_survive_a_restart(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await call(fleet, "PUT", "/gold", **GOLD)
        await call(fleet, "PUT", "/lead", priority=3)
        assert (await call(fleet, "DELETE", "/lead?version=1"))[0] == 204
    async with running_fleet(tmp_path) as fleet:
        assert [one.name for one in fleet.gateway.routing.admission.classes.classes] == ["gold"]
        assert [one["name"] for one in (await call(fleet, "GET"))[1]["classes"]] == ["gold"]


async def test_two_gateways_share_their_classes(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"ledger_url": f"sqlite:///{tmp_path / 'shared.db'}", "ledger_poll_s": 0.05}
    async with running_fleet(tmp_path, **shared) as here, running_fleet(tmp_path, **shared) as there:
        await call(here, "PUT", "/gold", **GOLD)
        admission = there.gateway.routing.admission
        await there.until_told(lambda: [one.name for one in admission.classes.classes] == ["gold"])
        assert (await call(there, "PUT", "/gold", **{**GOLD, "priority": 5}))[0] == 409
        assert (await call(there, "PUT", "/gold", **{**GOLD, "priority": 5, "version": 1}))[0] == 200
        assert (await call(there, "PUT", "/half", reserved=0.6))[0] == 200
        assert (await call(here, "PUT", "/more", reserved=0.5))[0] == 400  # together more than everything
        assert (await call(here, "DELETE", "/gold?version=1"))[0] == 409
        await here.until_told(
            lambda: [one.priority for one in here.gateway.routing.admission.classes.classes] == [0, 5]
        )
        assert (await call(here, "DELETE", "/gold?version=2"))[0] == 204
        await there.until_told(lambda: [one.name for one in admission.classes.classes] == ["half"])


async def test_classes_stay_in_force_while_the_ledger_is_away(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, ledger_poll_s=0.01) as fleet:
        await call(fleet, "PUT", "/gold", **GOLD)
        prefill, _ = await fleet.pair()
        measured(fleet, prefill, 1.0)
        ledger = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None, check_same_thread=False)
        # In threads: the gateway's own transactions end on this loop.
        await asyncio.to_thread(ledger.execute, "alter table class_revision rename to away")
        assert (await complete(fleet, "gold"))[0] == 429
        assert (await complete(fleet))[0] == 200
        assert (await call(fleet, "GET"))[0] == 503
        assert (await call(fleet, "PUT", "/lead", priority=3))[0] == 503
        await asyncio.to_thread(ledger.execute, "alter table away rename to class_revision")
        ledger.close()
        assert (await call(fleet, "PUT", "/lead", priority=3))[0] == 200


async def test_outputs_of_before_are_known_after_a_restart(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello"))
        for _ in range(8):
            assert (await complete(fleet, max_tokens=64))[0] == 200
    async with running_fleet(tmp_path) as fleet:
        assert fleet.gateway.routing.admission.lengths.predict("default", len(PROMPT), 64) == 6  # with its end


async def test_what_workers_measured_of_themselves_is_kept(tmp_path: Path) -> None:
    profile = LatencyProfile(kind="prefill cpu", prefill=[0.1, 0.2, 0.3])
    async with running_fleet(tmp_path, ledger_poll_s=0.001) as fleet:
        await fleet.add("p0", "prefill", profile=profile)
        async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger, asyncio.timeout(20):
            while not (stored := await ledger.profiles.all()):  # noqa: ASYNC110
                await asyncio.sleep(0)
    assert [(one.kind, one.prefill, one.step) for one in stored] == [("prefill cpu", (0.1, 0.2, 0.3), ())]
