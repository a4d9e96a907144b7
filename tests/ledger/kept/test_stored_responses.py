"""Responses in the ledger, in both databases: chains, events, leases, age and size."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from halfmoon.errors import NotFound
from halfmoon.ledger.kept.stored_responses import StoredResponse
from halfmoon.ledger.ledger import Ledger, open_ledger

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def stored(number: int, previous: int | None = None, **changes: Any) -> StoredResponse:
    previous_id = None if previous is None else f"r{previous}"
    content: dict[str, Any] = {"output": [{"text": "\0 \ud800 é"}]}
    made = StoredResponse(
        f"r{number}", "me", previous_id, "completed", NOW, NOW + timedelta(days=1), 100, [number], content
    )
    return made._replace(**changes)


async def ids_of(ledger: Ledger, last: int, most: int = 1_000, now: datetime = NOW) -> list[str]:
    return [one.id for one in await ledger.responses.chain(f"r{last}", "me", now, most)]


async def test_a_chain_is_a_tenants_own_oldest_first(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        for number in range(120):
            await ledger.responses.put(stored(number, number - 1 if number else None))
        assert await ids_of(ledger, 119) == [f"r{number}" for number in range(120)]
        assert await ids_of(ledger, 119, most=3) == ["r117", "r118", "r119"]
        assert (await ledger.responses.get("r5", "me", NOW)).response == stored(5).response
        assert await ledger.responses.chain("r5", "other", NOW, 9) == []
        await ledger.responses.delete("r60", "me", NOW)
        assert (await ids_of(ledger, 119))[0] == "r61"
        for missing in (ledger.responses.get("r5", "other", NOW), ledger.responses.delete("r60", "me", NOW)):
            with pytest.raises(NotFound):
                await missing


async def test_a_circle_of_turns_ends(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        for number in range(3):
            await ledger.responses.put(stored(number, (number + 2) % 3))
        assert len(await ids_of(ledger, 0, most=10)) == 10


async def test_a_conversation_that_goes_on_keeps_its_turns(ledger_url: str) -> None:
    later = NOW + timedelta(days=2)
    async with open_ledger(ledger_url) as ledger:
        await ledger.responses.put(stored(0))
        await ledger.responses.put(stored(1, 0, expires_at=later + timedelta(days=1)), renewed=["r0"])
        await ledger.responses.put(stored(2))
        assert await ledger.responses.expire(later, 1 << 30) == 1
        assert await ids_of(ledger, 1, now=later) == ["r0", "r1"]
        with pytest.raises(NotFound):
            await ledger.responses.get("r2", "me", NOW)


async def test_what_is_too_much_goes_from_whoever_has_most(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        await ledger.responses.put(stored(0, tenant="small"))
        for number in range(1, 11):
            expires_at = NOW + timedelta(days=1, seconds=number)
            await ledger.responses.put(stored(number, num_bytes=10_000, expires_at=expires_at))
        while await ledger.responses.expire(NOW, 50_000):
            pass
        left = [number for number in range(1, 11) if await ids_of(ledger, number)]
        assert left == [7, 8, 9, 10]
        await ledger.responses.get("r0", "small", NOW)


async def test_events_are_read_from_any_on_and_written_once(ledger_url: str) -> None:
    events = [{"sequence_number": number} for number in range(10)]
    async with open_ledger(ledger_url) as ledger:
        assert not await ledger.responses.add_events("r0", 0, events)
        await ledger.responses.put(stored(0, status="in_progress", job={}))
        for first, last in ((0, 3), (3, 7), (0, 5), (5, 10)):
            assert await ledger.responses.add_events("r0", first, events[first:last])
        for start in range(11):
            assert await ledger.responses.events("r0", start) == events[start:]
        assert await ledger.responses.num_events("r0") == 10
        await ledger.responses.forget_events(NOW + timedelta(days=9))
        assert await ledger.responses.num_events("r0") == 10  # it is not finished
        await ledger.responses.delete("r0", "me", NOW)
        assert await ledger.responses.num_events("r0") == 0


async def test_events_of_old_responses_go(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        for number, status in enumerate(("completed", "in_progress")):
            await ledger.responses.put(stored(number, status=status, job={}))
            await ledger.responses.add_events(f"r{number}", 0, [{"sequence_number": 0}])
        await ledger.responses.forget_events(NOW)
        assert await ledger.responses.num_events("r0") == 1
        await ledger.responses.forget_events(NOW + timedelta(days=1))
        assert [await ledger.responses.num_events(one) for one in ("r0", "r1")] == [0, 1]


async def test_of_several_who_finish_it_one_does(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as one, open_ledger(ledger_url) as other:
        for number in range(5):
            await one.responses.put(stored(number, status="queued", job={}))
            both = (
                one.responses.change(f"r{number}", "cancelled", {"by": 0}),
                other.responses.change(f"r{number}", "completed", {"by": 1}),
            )
            assert sorted(await asyncio.gather(*both)) == [False, True]


async def test_each_is_leased_once(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as one, open_ledger(ledger_url) as other:
        for number in range(20):
            await one.responses.put(stored(number, status="queued", job={}))
        claims = [
            base.responses.leases.claim(name, NOW, 6) for base, name in ((one, "a"), (other, "b")) for _ in range(2)
        ]
        claimed = [response_id for ids in await asyncio.gather(*claims) for response_id in ids]
        assert len(claimed) == len(set(claimed))
        assert len(claimed) >= 6
        mine = (await one.responses.claimed(claimed[0], "a")) or (await one.responses.claimed(claimed[0], "b"))
        assert mine is not None
        assert mine.num_claims == 1
        assert await other.responses.leases.renew(claimed, "nobody", NOW) == []
