"""What a batch becomes when its window ends, without a gateway."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from halfmoon.background import running
from halfmoon.errors import NoCapacity
from halfmoon.ledger.kept.batches import Batch, LineResult
from halfmoon.ledger.kept.pages import Page
from halfmoon.ledger.ledger import Ledger, open_ledger
from halfmoon.policy.admission.qos_classes import NO_PROMISES
from halfmoon.policy.admission.tenants import Tenant
from services.gateway.batches.batch_runner import BatchRunner
from services.gateway.batches.file_endpoints import new_file
from services.gateway.detached_request import DetachedRequest, OnEvents

URL = "/v1/completions"


async def stored_batch(
    ledger: Ledger, num_lines: int, now: datetime, batch_id: str = "batch_1", tenant: str = ""
) -> Batch:
    lines = [{"custom_id": f"c{one}", "method": "POST", "url": URL, "body": {}} for one in range(num_lines)]
    file = new_file(tenant, "in", "batch", now + timedelta(days=30))
    await ledger.files.begin(file)
    await ledger.files.append(file.id, 0, "\n".join(map(json.dumps, lines)).encode())
    await ledger.files.finish(file.id, "in.jsonl", file.expires_at)
    expires_at = now + timedelta(hours=24)
    times = (now, expires_at)
    batch = Batch(batch_id, tenant, "validating", URL, file.id, None, None, *times, {}, {}, [], 0, 0, 0)
    await ledger.batches.create(batch, now)
    return batch


async def test_what_is_not_done_in_time_expires(tmp_path: Path) -> None:
    now = [datetime.now(UTC)]
    is_refused = asyncio.Event()

    async def run(detached: DetachedRequest, on_events: OnEvents | None = None) -> dict[str, Any]:
        if detached.request_id.endswith("-1"):
            return {"done": True}
        is_refused.set()
        raise NoCapacity("others need the workers", retry_after_ms=1)

    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger, asyncio.timeout(50):
        await stored_batch(ledger, 3, now[0])
        runner = BatchRunner(
            *(ledger.batches, ledger.files, run, lambda: NO_PROMISES, Tenant, "gateway-1", 8, 1_000, 30),
            clock=lambda: now[0],
        )
        async with running(runner.tasks.follow()):
            await is_refused.wait()
            while (await ledger.batches.get("batch_1", "")).num_completed == 0:
                pass
            now[0] += timedelta(hours=25)
            while (batch := await ledger.batches.get("batch_1", "")).status != "expired":
                pass
        content = [
            json.loads(line)
            async for chunk in ledger.files.chunks(str(batch.error_file_id))
            for line in chunk.splitlines()
        ]
    assert (batch.num_total, batch.num_completed, batch.num_failed) == (3, 1, 2)
    assert [(line["custom_id"], line["error"]["code"]) for line in content] == [
        ("c0", "batch_expired"),
        ("c2", "batch_expired"),
    ]


async def test_a_gateway_whose_lease_has_ended_writes_nothing(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        batch = await stored_batch(ledger, 1, now)
        assert await ledger.batches.leases.claim("one", now, 5) == [batch.id]
        assert await ledger.batches.leases.claim("other", now, 5) == ()
        assert await ledger.batches.leases.claim("other", now + timedelta(minutes=1), 5) == [batch.id]
        assert await ledger.batches.leases.renew([batch.id], "one", now) == []
        assert not await ledger.batches.change(batch, "one", ["validating"], status="in_progress")
        assert not await ledger.batches.add_results(batch.id, "one", [])
        assert await ledger.batches.change(batch, "other", ["validating"], status="in_progress")


async def test_a_runner_stops_though_the_ledger_is_away(tmp_path: Path) -> None:
    """What it could not write is run again."""
    now, has_begun = datetime.now(UTC), asyncio.Event()

    async def run(detached: DetachedRequest, on_events: OnEvents | None = None) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            os.rename(path, tmp_path / "away")
        has_begun.set()
        return {"done": True}

    path = tmp_path / "ledger.db"
    async with open_ledger(f"sqlite:///{path}") as ledger, asyncio.timeout(50):
        await stored_batch(ledger, 300, now)
        arguments = (ledger.batches, ledger.files, run, lambda: NO_PROMISES, Tenant, "gateway-1", 8, 1_000, 30)
        async with running(BatchRunner(*arguments).tasks.follow()):
            await has_begun.wait()
        os.rename(tmp_path / "away", path)
        assert (await ledger.batches.get("batch_1", "")).num_completed == 0


async def test_a_gateway_that_ended_while_it_made_the_files_is_replaced(tmp_path: Path) -> None:
    now = datetime.now(UTC)

    async def run(detached: DetachedRequest, on_events: OnEvents | None = None) -> dict[str, Any]:
        raise AssertionError("a line with a result is run again")

    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger, asyncio.timeout(50):
        batch = await stored_batch(ledger, 3, now)
        await ledger.batches.leases.claim("gone", now - timedelta(minutes=5), 1)
        await ledger.batches.change(batch, "gone", ["validating"], status="in_progress", num_total=3)
        await ledger.batches.add_results(batch.id, "gone", [LineResult(one, False, b"%d" % one) for one in range(3)])
        batch = batch._replace(status="in_progress")
        times = {"ends_as": "completed"}
        assert await ledger.batches.change(batch, "gone", ["in_progress"], status="finalizing", times=times)
        await ledger.files.begin(new_file("", "half", "batch_output", now + timedelta(days=1)))
        arguments = (ledger.batches, ledger.files, run, lambda: NO_PROMISES, Tenant, "gateway-1", 8, 1_000, 30)
        async with running(BatchRunner(*arguments).tasks.follow()):
            while (batch := await ledger.batches.get("batch_1", "")).status != "completed":
                pass
            while await ledger.batches.done("batch_1"):
                pass
        content = b"".join([chunk async for chunk in ledger.files.chunks(str(batch.output_file_id))])
        assert (content, batch.error_file_id) == (b"0\n1\n2\n", None)
        assert len(await ledger.files.page("", now, Page(9))) == 2  # the half one is not seen


async def test_a_batch_that_had_its_turn_makes_room(tmp_path: Path) -> None:
    """Four large ones are all that a gateway works on at once."""
    now, line = [datetime.now(UTC)], asyncio.Semaphore(0)

    async def run(detached: DetachedRequest, on_events: OnEvents | None = None) -> dict[str, Any]:
        if detached.tenant.name == "large":
            num_begun[0] += 1
            await line.acquire()
        return {"done": True}

    num_begun = [0]
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger, asyncio.timeout(50):
        for number in range(4):
            await stored_batch(ledger, 500, now[0], f"batch_{number}", "large")
        arguments = (ledger.batches, ledger.files, run, lambda: NO_PROMISES, Tenant, "gateway-1", 8, 1_000, 30)
        async with running(BatchRunner(*arguments, clock=lambda: now[0]).tasks.follow()):
            while num_begun[0] < 8:  # noqa: ASYNC110 (the ledger has no event)
                await asyncio.sleep(0)
            await stored_batch(ledger, 3, now[0], "batch_5", "small")
            now[0] += timedelta(minutes=5)
            while (small := await ledger.batches.get("batch_5", "small")).status != "completed":
                large = [await ledger.batches.get(f"batch_{number}", "large") for number in range(4)]
                if line.locked() and sum(batch.num_completed for batch in large) < 1_000:
                    line.release()
        assert small.num_completed == 3
        assert {batch.status for batch in large} == {"in_progress"}
        assert max(batch.num_claims for batch in large) == 1
