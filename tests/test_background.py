"""Work beside a call ends with it, and its failure is heard at once."""

from __future__ import annotations

import asyncio

import pytest

from halfmoon.background import cancelled, first_result, logged, running
from halfmoon.errors import DataLoss


async def forever() -> None:
    await asyncio.Event().wait()


async def failing() -> None:
    raise DataLoss("lost")


async def test_work_does_not_outlive_its_block() -> None:
    async with running(forever()) as task:
        await asyncio.sleep(0)
        assert not task.done()
    assert task.cancelled()


async def test_a_failure_beside_ends_the_wait() -> None:
    wanted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with running(forever()) as endless, running(failing()) as broken:
        with pytest.raises(DataLoss):
            await first_result(wanted, endless, broken)


async def test_what_has_ended_beside_is_no_failure_and_what_is_there_is_given() -> None:
    wanted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def give() -> None:
        wanted.set_result(7)

    async with running(asyncio.sleep(0)) as short, running(give()):
        assert await first_result(wanted, short) == 7
    async with running(failing()) as broken:
        await asyncio.wait({broken})
        assert await first_result(wanted, broken) == 7


async def test_cancelling_waits_for_the_end() -> None:
    ended = []

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    task = asyncio.create_task(slow_to_end())
    await asyncio.sleep(0)
    await cancelled(task)
    assert ended


async def test_a_failure_of_which_nobody_asks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with running(logged(failing())) as task:
        await asyncio.wait({task})
    assert [(one.getMessage(), one.exc_info is not None) for one in caplog.records] == [("task.failed", True)]
