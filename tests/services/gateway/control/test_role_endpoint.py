"""POST /halfmoon/v1/workers/{name}/role: what is changed, refused and remembered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from halfmoon.errors import StalePlacement
from tests.services.gateway.fakes import Fleet, running_fleet
from tests.services.gateway.test_access import ask
from tests.services.gateway.test_failures import chat, last_row


async def change(fleet: Fleet, name: str, **body: Any) -> tuple[int, Any, Any]:
    return await ask(fleet, "POST", f"/halfmoon/v1/workers/{name}/role", json=body)


async def changes(fleet: Fleet) -> list[dict[str, Any]]:
    """As the ledger has them: they are written behind the answer."""
    while not (rows := (await ask(fleet, "GET", "/halfmoon/v1/worker_changes"))[2]):  # noqa: ASYNC110
        await asyncio.sleep(0)
    return list(rows)


async def test_a_decode_worker_prefills_from_now_on(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        other = await fleet.add("d1", "decode")
        status, _, said = await change(fleet, "d1", role="prefill", by="ann", epoch=0)
        assert (status, said) == (200, {"worker_id": "d1", "before": "decode", "role": "prefill", "epoch": 1})
        view = {one.worker_id: one for one in fleet.cluster.membership.view().workers}
        assert view["d1"].can_prefill
        assert not view["d1"].can_decode
        await prefill.until_told({fleet.cluster.worker("d0").member.identity.address})
        prefill.refuse = [StalePlacement("it drains")]
        assert await chat(fleet) == "hello"
        (row,) = await changes(fleet)
        _, _, cluster = await ask(fleet, "GET", "/halfmoon/v1/cluster")
        figures = await fleet.metrics()
    assert {row[name] for name in ("worker_id", "before", "after", "changed_by")} == {"d1", "decode", "prefill", "ann"}
    assert (row["epoch"], row["is_forced"]) == (1, False)
    (shown,) = [one for one in cluster["workers"] if one["worker_id"] == "d1"]
    assert (shown["role"], shown["role_epoch"]) == ("prefill", 1)
    assert 'halfmoon_worker_role_epoch{role="prefill",worker_id="d1"} 1.0' in figures
    assert not other.drains


async def test_a_prefill_worker_decodes_from_now_on(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        await fleet.add("p1", "prefill")
        assert (await change(fleet, "p1", role="decode"))[0] == 200
        await fleet.until(lambda: fleet.cluster.membership.view().num_decoding == 2)  # it listens to its tokens, too


async def test_work_that_comes_too_late_is_placed_again_and_is_no_failure(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        prefill.refuse = [StalePlacement("this worker's role was changed since then") for _ in range(5)]
        assert await chat(fleet) == "hello"
        assert not prefill.refuse
        assert (await last_row(fleet, "ok"))["num_retries"] == 5
        epochs = {(one.role_epoch, one.decode_role_epoch) for one in prefill.calls.prefills}
    assert epochs == {(0, 0)}


async def test_an_old_decision_fails(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, role_dwell_s=0.0) as fleet:
        await fleet.pair()
        await fleet.add("d1", "decode")
        assert (await change(fleet, "d1", role="both", epoch=0))[0] == 200
        status, _, said = await change(fleet, "d1", role="prefill", epoch=0)
        assert (status, said["error"]["code"]) == (409, "worker_change_refused")
        assert "it is both, epoch 1" in said["error"]["message"]
        assert (await change(fleet, "d1", role="both"))[2]["epoch"] == 1  # it is so already


async def test_it_keeps_a_role_for_a_while_unless_forced(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, role_dwell_s=1000.0) as fleet:
        await fleet.pair()
        await fleet.add("d1", "decode")
        assert (await change(fleet, "d1", role="both"))[0] == 200
        status, headers, said = await change(fleet, "d1", role="decode")
        assert status == 409
        assert 900 < int(headers["Retry-After"]) <= 1000
        assert "a moment ago" in said["error"]["message"]
        assert (await change(fleet, "d1", role="decode", force=True))[2]["epoch"] == 2


@pytest.mark.parametrize(
    ("name", "body", "status", "why"),
    [
        ("d0", {"role": "prefill"}, 409, "last worker that can decode"),
        ("p0", {"role": "decode"}, 409, "last worker that can prefill"),
        ("old", {"role": "prefill"}, 409, "cannot change roles"),
        ("leaving", {"role": "prefill"}, 409, "drains"),
        ("nobody", {"role": "prefill"}, 404, "no worker is called nobody"),
        ("d0", {"role": "cook"}, 400, "role"),
        ("d0", {}, 400, "role"),
    ],
)
async def test_refusals_say_why(tmp_path: Path, name: str, body: dict[str, Any], status: int, why: str) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        await fleet.add("old", "both", can_change_role=False)
        await fleet.add("leaving", "both")
        for leaver in ("old", "leaving") if name.endswith("0") else ("leaving",):
            await ask(fleet, "POST", f"/halfmoon/v1/workers/{leaver}/drain", json={"force": True})
        answer = await change(fleet, name, **body)
        assert (answer[0], why in answer[2]["error"]["message"]) == (status, True), answer


async def test_another_gateway_was_quicker(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        other = await fleet.add("d1", "decode")
        other.answers_orders = False
        asked = asyncio.create_task(change(fleet, "d1", role="prefill"))
        await soon_ordered(other)
        other.take_role("both", epoch=0)
        status, _, said = await asked
        assert (status, "another change came first" in said["error"]["message"]) == (409, True)


async def soon_ordered(worker: Any) -> None:
    while not worker.role_changes:  # noqa: ASYNC110
        await asyncio.sleep(0)
