"""Responses in the background: queued, streamed, cancelled, deleted, and gone on with by another gateway."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import pytest

from halfmoon.errors import NoCapacity
from halfmoon.ledger.kept.stored_responses import StoredResponse, expiry
from halfmoon.ledger.ledger import open_ledger
from services.gateway.responses import background
from tests.services.gateway.fakes import MODEL, Fleet, Script, running_fleet, soon


async def ended(fleet: Fleet, response_id: str) -> Any:
    """The response once it is finished: whoever asks has to ask again."""
    async with asyncio.timeout(40):
        while True:
            response = await fleet.client.responses.retrieve(response_id)
            if response.status not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0)


async def test_it_is_queued_and_then_completed(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        queued = await fleet.client.responses.create(model=MODEL, input="a", background=True)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        done = await ended(fleet, queued.id)
        assert (done.id, done.status, done.output_text, done.background) == (queued.id, "completed", "ok", True)
        assert done.created_at == queued.created_at
        await fleet.client.responses.create(model=MODEL, input="b", previous_response_id=queued.id)


async def test_what_fails_says_so(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        queued = await fleet.client.responses.create(model=MODEL, input="x" * 300, background=True)
        done = await ended(fleet, queued.id)
        assert (done.status, done.error.code) == ("failed", "context_length_exceeded")
        with pytest.raises(openai.BadRequestError, match="failed"):
            await fleet.client.responses.create(model=MODEL, input="b", previous_response_id=queued.id)


async def test_what_has_no_room_waits(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("ok"))
        worker.refuse = [NoCapacity("full", retry_after_ms=1) for _ in range(12)]
        queued = await fleet.client.responses.create(model=MODEL, input="a", background=True)
        assert (await ended(fleet, queued.id)).output_text == "ok"


async def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never removed for want of room, so that many large ones would fill the ledger."""
    monkeypatch.setattr(background, "_MOST_UNFINISHED_BYTES", 2_000)
    async with running_fleet(tmp_path) as fleet:  # there is no worker
        create = fleet.client.responses.create
        with pytest.raises(openai.RateLimitError):
            await create(model=MODEL, input="a" * 3_000, background=True)
        first = await create(model=MODEL, input="a", background=True)
        with pytest.raises(openai.RateLimitError):
            await create(model=MODEL, input="a" * 1_000, background=True)
        await fleet.client.responses.cancel(first.id)
        await create(model=MODEL, input="a" * 100, background=True)


async def test_waiting_costs_its_tenant_no_tokens(tmp_path: Path) -> None:
    tenants = {"acme": {"keys": ["key-of-acme"], "tokens_per_minute": 150}}
    async with running_fleet(tmp_path, tenants=tenants) as fleet:
        worker = await fleet.add("b0", "both", Script("ok"))
        worker.refuse = [NoCapacity("full", retry_after_ms=1) for _ in range(30)]
        fleet.client.api_key = "key-of-acme"
        queued = await fleet.client.responses.create(model=MODEL, input="a", background=True, max_output_tokens=20)
        assert (await ended(fleet, queued.id)).output_text == "ok"


async def test_a_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello"))
        stream = await fleet.client.responses.create(model=MODEL, input="a", background=True, stream=True)
        events: list[Any] = [event async for event in stream]
        response_id = events[0].response.id
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        rest = await fleet.client.responses.retrieve(response_id, stream=True, starting_after=3)
        assert [event.model_dump() async for event in rest] == [event.model_dump() for event in events[4:]]
        assert (await ended(fleet, response_id)).output_text == "hello"


async def test_a_client_that_leaves_its_stream_ends_nothing(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello", decode_gate=gate))
        stream = await fleet.client.responses.create(model=MODEL, input="a", background=True, stream=True)
        first: Any = await anext(aiter(stream))
        await stream.close()
        gate.set()
        assert (await ended(fleet, first.response.id)).output_text == "hello"


@pytest.mark.parametrize("by", ["the same gateway", "another"])
@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_one_that_runs_is_ended(tmp_path: Path, how: str, by: str) -> None:
    async with running_fleet(tmp_path) as fleet, running_fleet(tmp_path) as other:
        prefill, decode = await fleet.pair(Script("hello", decode_gate=asyncio.Event()))
        queued = await fleet.client.responses.create(model=MODEL, input="a", background=True)
        await soon(prefill.calls.prefill_came.wait())
        client = (fleet if by == "the same gateway" else other).client.responses
        if how == "cancel":
            assert (await client.cancel(queued.id)).status == "cancelled"
            assert (await client.cancel(queued.id)).status == "cancelled"
        else:
            await client.delete(queued.id)
        await soon(decode.calls.cancel_came.wait())
        await fleet.until_idle()
        if how == "cancel":
            assert (await client.retrieve(queued.id)).status == "cancelled"


async def test_one_that_has_ended_stays_as_it_is(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        queued = await fleet.client.responses.create(model=MODEL, input="a", background=True)
        await ended(fleet, queued.id)
        assert (await fleet.client.responses.cancel(queued.id)).status == "completed"


async def test_cancelling_while_it_completes_has_one_outcome(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        for _ in range(10):
            queued = await fleet.client.responses.create(model=MODEL, input="a", background=True)
            said = (await fleet.client.responses.cancel(queued.id)).status
            assert (await ended(fleet, queued.id)).status == said


async def test_the_next_gateway_goes_on(tmp_path: Path) -> None:
    """A gateway that stops leaves its response; the workers hold what there was of it."""
    gate = asyncio.Event()
    async with running_fleet(tmp_path) as one, running_fleet(tmp_path) as other:
        prefill, decode = await one.pair(Script("hello", decode_gate=gate, tokens_before_gate=1))
        queued = await one.client.responses.create(model=MODEL, input="a", background=True)
        await soon(prefill.calls.prefill_came.wait())
        await one.stop()
        await other.join(prefill, decode)
        gate.set()
        done = await ended(other, queued.id)
    assert (done.status, done.output_text) == ("completed", "hello")


async def test_a_response_that_ends_every_gateway_fails_at_last(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    job = {"body": {"model": MODEL, "input": "a", "background": True}, "class": "default", "stream": False}
    poison = StoredResponse("resp_p", "", None, "queued", now, expiry(now, 1), 0, [], {"status": "queued"}, job, 5)
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        await ledger.responses.put(poison)
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        assert (await ended(fleet, "resp_p")).status == "failed"


def _holder(tmp_path: Path) -> str | None:
    """Who runs the one response; not for the gateway's own loop, as it waits for the ledger's lock."""
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as ledger:
        (holder,) = ledger.execute("SELECT holder FROM stored_responses").fetchone()
    return None if holder is None else str(holder)


async def test_gateways_that_stop_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_MOST_CLAIMS", 1)
    async with running_fleet(tmp_path) as fleet:
        queued = await fleet.client.responses.create(model=MODEL, input="a", background=True)  # there is no worker
    for _ in range(3):
        async with running_fleet(tmp_path):
            while await asyncio.to_thread(_holder, tmp_path) is None:
                pass
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        assert (await ended(fleet, queued.id)).output_text == "ok"


async def test_events_of_a_flush_that_is_broken_off_are_written_at_the_end() -> None:
    class Stuck:
        """A ledger that does not finish its first write: a transaction that is given up changes nothing."""

        def __init__(self) -> None:
            self.begun, self.written = asyncio.Event(), list[dict[str, Any]]()

        async def add_events(self, response_id: str, first: int, events: list[dict[str, Any]]) -> bool:
            if not self.begun.is_set():
                self.begun.set()
                await asyncio.Event().wait()
            assert first == len(self.written)
            self.written += events
            return True

    stuck: Any = Stuck()
    log_of = background._EventLog(stuck, "resp_a")
    take, events = log_of.begin(), [{"sequence_number": number} for number in range(3)]
    take(events[:2])
    await soon(stuck.begun.wait())
    take(events[2:])
    await log_of.finish({"status": "completed"})
    assert stuck.written == events
