"""The queue of rows: bounded, in order, and never in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import DataError

from halfmoon.errors import Unavailable
from halfmoon.ledger.history.row_queue import RowQueue


class FakeTable:
    """Owns what was written. `outcomes` are those of the next writes: False is an outage."""

    def __init__(self, bad: frozenset[int] = frozenset(), outcomes: Sequence[bool] = ()) -> None:
        self.rows: list[int] = []
        self.largest = 0
        self._bad = bad
        self._outcomes = list(outcomes)

    async def write(self, rows: Sequence[int]) -> None:
        await asyncio.sleep(0)
        if self._outcomes and not self._outcomes.pop(0):
            raise Unavailable("away")
        if self._bad.intersection(rows):
            raise DataError("insert", {}, ValueError("no"))
        self.largest = max(self.largest, len(rows))
        self.rows += rows


def queue_to(table: FakeTable, max_queued: int = 1_000) -> RowQueue[int]:
    return RowQueue(table.write, max_queued, retry_s=(0.0,), pause_s=0.0)


@given(
    num=st.integers(0, 300),
    bad=st.frozensets(st.integers(0, 299), max_size=4),
    outcomes=st.lists(st.booleans(), max_size=8),
)
def test_all_but_refused_rows_arrive_once_and_in_order(num: int, bad: frozenset[int], outcomes: list[bool]) -> None:
    async def run() -> None:
        table = FakeTable(bad, outcomes)
        queue = queue_to(table)
        for number in range(num):
            assert queue.put(number)
        writer = asyncio.ensure_future(queue.write_behind())
        while len(queue):  # noqa: ASYNC110
            await asyncio.sleep(0)
        queue.close()
        await writer
        lost = bad & frozenset(range(num))
        assert table.rows == [number for number in range(num) if number not in lost]
        assert (queue.num_written, queue.num_lost) == (num - len(lost), len(lost))
        assert table.largest <= 100

    asyncio.run(run())


def test_a_full_queue_refuses_counts_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    queue = queue_to(FakeTable(), max_queued=2)
    assert [queue.put(number) for number in range(5)] == [True, True, False, False, False]
    assert (len(queue), queue.num_lost) == (2, 3)
    assert [record.message for record in caplog.records] == ["ledger.full"]


async def test_an_outage_that_lasts_to_the_end_is_counted() -> None:
    queue = queue_to(FakeTable(outcomes=[False] * 99))
    for number in range(3):
        queue.put(number)
    queue.close()
    await asyncio.wait_for(queue.write_behind(), 20)
    assert (queue.num_written, queue.num_lost, len(queue)) == (0, 3, 0)
    assert not queue.put(9)


async def test_a_bug_in_the_writing_does_not_end_it() -> None:
    class Odd(FakeTable):
        async def write(self, rows: Sequence[int]) -> None:
            if 1 in rows:
                raise ZeroDivisionError
            await super().write(rows)

    table = Odd()
    queue = queue_to(table)
    for number in range(3):
        queue.put(number)
    queue.close()
    await asyncio.wait_for(queue.write_behind(), 20)
    assert (table.rows, queue.num_lost) == ([0, 2], 1)


async def test_rows_that_come_during_a_write_wait_for_others() -> None:
    batches: list[list[int]] = []
    is_written = asyncio.Event()

    async def write(rows: Sequence[int]) -> None:
        batches.append(list(rows))
        if rows[0] == 0:
            queue.put(1)
            is_written.set()

    queue: RowQueue[int] = RowQueue(write, pause_s=60.0)
    queue.put(0)
    writer = asyncio.ensure_future(queue.write_behind())
    await is_written.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    queue.put(2)
    queue.close()
    await writer
    assert batches == [[0], [1, 2]]
