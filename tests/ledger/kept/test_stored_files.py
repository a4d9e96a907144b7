"""Files and batches in the ledger, in both databases."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from halfmoon.background import running
from halfmoon.errors import HalfmoonError, InvalidRequest, NotFound
from halfmoon.ledger.kept import stored_files
from halfmoon.ledger.kept.batches import Batch, LineResult
from halfmoon.ledger.kept.pages import Page
from halfmoon.ledger.kept.stored_files import StorageFull, StoredFile
from halfmoon.ledger.ledger import Ledger, open_ledger

NOW = datetime.now(UTC)


async def written(ledger: Ledger, file_id: str, *chunks: bytes, max_bytes: int | None = None) -> None:
    expires_at = NOW + timedelta(days=1)
    await ledger.files.begin(StoredFile(file_id, "me", "", "batch", 0, NOW, expires_at))
    for number, data in enumerate(chunks):
        await ledger.files.append(file_id, number, data, max_bytes)
    await ledger.files.finish(file_id, "name", expires_at)


def batch_of(file_id: str, number: int = 0) -> Batch:
    times = (NOW, NOW + timedelta(hours=24))
    return Batch(f"b{number}", "me", "validating", "/v1/x", file_id, None, None, *times, {}, {}, [], 0, 0, 0)


async def test_bytes_come_back_and_count(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        await written(ledger, "f0", b"abc\0", bytes(range(256)))
        assert b"".join([data async for data in ledger.files.chunks("f0")]) == b"abc\0" + bytes(range(256))
        assert (await ledger.files.get("f0", "me", NOW)).num_bytes == 260
        with pytest.raises(StorageFull):
            await written(ledger, "f1", b"x" * 100, max_bytes=300)
        assert [one.id for one in await ledger.files.page("me", NOW, Page(9))] == ["f0"]
        assert await ledger.files.page("other", NOW, Page(9)) == []
        await ledger.files.discard("f1")
        await written(ledger, "f2", b"x" * 40, max_bytes=300)
        with pytest.raises(NotFound):
            await ledger.files.get("f0", "me", NOW + timedelta(days=2))


async def test_a_file_is_not_deleted_under_a_new_batch(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as one, open_ledger(ledger_url) as other:
        for number in range(5):
            await written(one, f"f{number}", b"x")
            both = await asyncio.gather(
                one.files.delete(f"f{number}", "me", NOW),
                other.batches.create(batch_of(f"f{number}", number), NOW),
                return_exceptions=True,
            )
            failures = [failure for failure in both if failure is not None]
            assert len(failures) == 1
            assert isinstance(failures[0], InvalidRequest | NotFound | HalfmoonError)


async def test_results_are_counted_with_their_lines(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        await written(ledger, "f0", b"x")
        await ledger.batches.create(batch_of("f0"), NOW)
        assert await ledger.batches.leases.claim("one", NOW, 1) == ["b0"]
        results = [LineResult(number, number % 3 == 0, b"%d" % number) for number in range(120)]
        for start in range(0, 120, 40):
            assert await ledger.batches.add_results("b0", "one", results[start : start + 40])
        assert not await ledger.batches.add_results("b0", "other", [LineResult(500, False, b"")])
        batch = await ledger.batches.get("b0", "me")
        assert (batch.num_completed, batch.num_failed) == (80, 40)
        assert await ledger.batches.done("b0") == set(range(120))
        read: list[LineResult] = []
        while page := await ledger.batches.results("b0", is_error=False, after=read[-1].number if read else -1):
            read += page
        assert read == [result for result in results if not result.is_error]
        await ledger.batches.forget_results("b0")
        assert await ledger.batches.done("b0") == set()


async def test_what_is_old_goes_but_not_what_a_batch_reads(ledger_url: str) -> None:
    long_ago = NOW - timedelta(days=40)
    async with open_ledger(ledger_url) as ledger, asyncio.timeout(50):
        for number in range(3):
            await written(ledger, f"f{number}", b"x")
        for number, file_id in enumerate(("f0", "f1")):
            old = batch_of(file_id, number)._replace(created_at=long_ago)
            await ledger.batches.create(old, NOW)
        await ledger.batches.leases.claim("one", NOW, 5)
        assert await ledger.batches.change(batch_of("f1", 1), "one", ["validating"], status="completed")
        for number in range(3):
            await ledger.files.finish(f"f{number}", "name", long_ago)
        await ledger.files.begin(StoredFile("left", "me", "", "batch", 0, long_ago, NOW + timedelta(days=9)))
        await ledger.files.append("left", 0, b"x")
        async with running(ledger.files.keep()), running(ledger.batches.keep(30)):
            for file_id in ("f1", "f2", "left"):
                while [data async for data in ledger.files.chunks(file_id)]:
                    pass
            while [one.id for one in await ledger.batches.page("me", Page(9))] != ["b0"]:
                pass
        assert [data async for data in ledger.files.chunks("f0")] == [b"x"]


async def test_a_cancelled_batch_is_still_leased_to_be_ended(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        await written(ledger, "f0", b"x")
        await ledger.batches.create(batch_of("f0"), NOW)
        assert (await ledger.batches.cancel("b0", "me", NOW)).status == "cancelling"
        assert await ledger.batches.leases.claim("one", NOW, 1) == ["b0"]
        batch = await ledger.batches.claimed("b0", "one")
        assert batch is not None
        assert await ledger.batches.change(batch, "one", ["cancelling"], status="cancelled")
        assert (await ledger.batches.cancel("b0", "me", NOW)).status == "cancelled"
        assert await ledger.batches.claimed("b0", "one") is None
        await ledger.files.delete("f0", "me", NOW)


async def test_a_batch_that_is_cancelled_as_it_begins_keeps_its_times(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as one, open_ledger(ledger_url) as other:
        await written(one, "f0", b"x")
        for number in range(20):
            batch = batch_of("f0", number)
            await one.batches.create(batch, NOW)
            await one.batches.leases.claim("one", NOW, 1)
            begun = {"status": "in_progress", "times": {"in_progress_at": 1}}
            cancelled, has_begun = await asyncio.gather(
                other.batches.cancel(batch.id, "me", NOW), one.batches.change(batch, "one", ["validating"], **begun)
            )
            assert cancelled.status == "cancelling"
            assert set(cancelled.times) == {"cancelling_at", *(["in_progress_at"] if has_begun else [])}


async def test_any_number_of_expired_files_goes_at_once(ledger_url: str) -> None:
    """They count towards what their tenant may keep."""
    num_files = 2 * stored_files._EXPIRED_FILES + 1
    async with open_ledger(ledger_url) as ledger, asyncio.timeout(50):
        for number in range(num_files):
            await ledger.files.begin(StoredFile(f"f{number}", "me", "", "batch", 0, NOW, NOW))
            await ledger.files.append(f"f{number}", 0, b"x")
        async with running(ledger.files.keep()):
            for number in range(num_files):
                while [data async for data in ledger.files.chunks(f"f{number}")]:
                    pass
        await written(ledger, "new", b"x", max_bytes=1)


async def test_pages_read_their_own_rows_alone(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        for number in range(7):
            made = NOW + timedelta(seconds=number // 3)  # some at the same moment
            await ledger.files.begin(StoredFile(f"f{number}", "me", "", "batch", 0, made, NOW + timedelta(days=1)))
            await ledger.files.finish(f"f{number}", "name", NOW + timedelta(days=1))
        await written(ledger, "other")
        for is_newest_first in (True, False):
            read: list[str] = []
            while True:
                page = Page(3, is_newest_first, read[-1] if read else None)
                rows = await ledger.files.page("me", NOW, page, "batch")
                read += [row.id for row in rows[:3]]
                if len(rows) <= 3:
                    break
                assert len(rows) == 4
            whole = [*(f"f{number}" for number in range(7)), "other"]
            assert sorted(read) == sorted(whole)
            times = [(NOW if one == "other" else NOW + timedelta(seconds=int(one[1]) // 3), one) for one in read]
            assert times == sorted(times, reverse=is_newest_first)
        with pytest.raises(InvalidRequest, match="after"):
            await ledger.files.page("me", NOW, Page(3, after="gone"))


async def test_tenants_share_the_leases_and_rows_take_turns(ledger_url: str) -> None:
    """The one of many batches waits behind others' first; what is given back goes behind those that wait."""
    times = [NOW + timedelta(seconds=number) for number in range(20)]
    async with open_ledger(ledger_url) as ledger:
        await written(ledger, "f0", b"x")
        for number in range(6):
            await ledger.batches.create(batch_of("f0", number)._replace(created_at=times[number]), NOW)
        others = batch_of("f0", 6)._replace(created_at=times[6], tenant="other", input_file_id="f1")
        await ledger.files.begin(StoredFile("f1", "other", "", "batch", 0, NOW, NOW + timedelta(days=1)))
        await ledger.files.finish("f1", "name", NOW + timedelta(days=1))
        await ledger.batches.create(others, NOW)
        leases = ledger.batches.leases
        assert set(await leases.claim("one", times[7], 2)) == {"b0", "b6"}
        assert await leases.claim("one", times[8], 1) == ["b1"]
        await leases.release("one", times[9], "b0")
        await leases.release("one", times[9], "b6")
        assert await leases.claim("one", times[10], 1) == ["b6"]
        assert set(await leases.claim("one", times[11], 9)) == {"b0", "b2", "b3", "b4", "b5"}


async def test_what_is_given_back_is_no_claim(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        await written(ledger, "f0", b"x")
        await ledger.batches.create(batch_of("f0"), NOW)
        leases, seconds = ledger.batches.leases, 0
        for is_given_back, num_claims in ((True, 1), (True, 1), (False, 1), (True, 2), (True, 2)):
            seconds += 60
            assert await leases.claim("one", NOW + timedelta(seconds=seconds), 1) == ["b0"]
            assert (await ledger.batches.get("b0", "me")).num_claims == num_claims
            if is_given_back:
                await leases.release("one", NOW + timedelta(seconds=seconds))


async def test_results_that_are_files_by_now_go(ledger_url: str) -> None:
    """Whoever was to remove them may have been ended before."""
    async with open_ledger(ledger_url) as ledger, asyncio.timeout(50):
        await written(ledger, "f0", b"x")
        for number in range(2):
            await ledger.batches.create(batch_of("f0", number), NOW)
        await ledger.batches.leases.claim("one", NOW, 2)
        for number in range(2):
            await ledger.batches.add_results(f"b{number}", "one", [LineResult(0, False, b"")])
        assert await ledger.batches.change(batch_of("f0"), "one", ["validating"], status="completed")
        async with running(ledger.batches.keep(30)):
            while await ledger.batches.done("b0"):
                pass
        assert await ledger.batches.done("b1") == {0}
