"""The window is never overdrawn, nobody is forgotten, and sitting on a share does not starve the next."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import Cancelled, DeadlineExceeded
from halfmoon.rpc.transport.window import Share, Window

FOREVER_S = 1000.0


async def test_a_share_may_grow_to_what_it_leaves_free() -> None:
    window, first, second = Window(8), Share(), Share()
    for _ in range(4):
        await window.take(first, 1, FOREVER_S)
    more = asyncio.ensure_future(window.take(first, 1, FOREVER_S))
    for _ in range(2):
        await window.take(second, 1, FOREVER_S)
    await asyncio.sleep(0)
    assert not more.done()
    for _ in range(2):
        window.give_back(first, 1)
    await more
    assert (first.held_bytes, second.held_bytes, window.free_bytes) == (3, 2, 3)


async def test_however_many_sit_on_their_shares_the_next_finds_room() -> None:
    window = Window(64)
    for num_held in (32, 16, 8, 4, 2, 1):
        greedy = Share()
        for _ in range(num_held):
            await window.take(greedy, 1, FOREVER_S)
        with pytest.raises(DeadlineExceeded):
            await window.take(greedy, 1, 0.001)
        assert greedy.held_bytes == num_held
    assert window.free_bytes == 1


async def test_a_window_without_progress_is_a_stalled_link() -> None:
    window, holder, waiting = Window(4), Share(), Share()
    await window.take(holder, 4, FOREVER_S)
    with pytest.raises(DeadlineExceeded, match="no progress"):
        await window.take(waiting, 1, 0.001)
    window.give_back(holder, 4)
    await window.take(waiting, 4, 0.001)


async def test_who_is_cancelled_holds_nothing() -> None:
    window, holder, waiting = Window(4), Share(), Share()
    await window.take(holder, 4, FOREVER_S)
    taking = asyncio.ensure_future(window.take(waiting, 4, FOREVER_S))
    await asyncio.sleep(0)
    window.give_back(holder, 4)  # grants it
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert (waiting.held_bytes, window.free_bytes) == (0, 4)


async def test_a_failed_transfer_stops_waiting() -> None:
    window, holder, waiting = Window(4), Share(), Share()
    await window.take(holder, 4, FOREVER_S)
    taking = asyncio.ensure_future(window.take(waiting, 4, FOREVER_S))
    await asyncio.sleep(0)
    window.fail(waiting, Cancelled("over"))
    with pytest.raises(Cancelled):
        await taking
    window.give_back(holder, 4)
    assert window.free_bytes == 4


async def waits(window: Window, share: Share, num_bytes: int, stall_s: float = FOREVER_S) -> asyncio.Future[None]:
    taking = asyncio.ensure_future(window.take(share, num_bytes, stall_s))
    await asyncio.sleep(0)
    return taking


async def test_small_frames_do_not_pass_a_large_one_for_ever() -> None:
    window, small = Window(8), [Share() for _ in range(8)]
    for share in small:
        await window.take(share, 1, FOREVER_S)
    large = await waits(window, Share(), 4)
    for number in range(100):
        if large.done():
            break
        share = small[number % len(small)]
        window.give_back(share, 1)
        await waits(window, share, 1)  # the next frame of the same transfer comes at once
    assert large.done()
    assert number <= 5  # the four frames that made room for it, and a turn of the loop


async def test_a_full_share_holds_nobody_back() -> None:
    window, slow, quick = Window(8), Share(), Share()
    await window.take(slow, 4, FOREVER_S)
    sitting = await waits(window, slow, 4)
    for _ in range(20):
        await window.take(quick, 4, FOREVER_S)
        window.give_back(quick, 4)
    assert not sitting.done()
    window.give_back(slow, 4)
    await sitting


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_those_behind_one_that_gives_up_go_on(how: str) -> None:
    window, holder, large = Window(8), Share(), Share()
    await window.take(holder, 4, FOREVER_S)
    first, second = await waits(window, large, 8), await waits(window, Share(), 1)
    assert not second.done()
    if how == "cancelled":
        first.cancel()
    else:
        window.fail(large, Cancelled("over"))
    await second
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else Cancelled):
        await first


async def test_of_two_that_stall_the_one_that_holds_bytes_fails() -> None:
    window, holder, other = Window(8), Share(), Share()
    await window.take(holder, 4, FOREVER_S)
    first, second = await waits(window, other, 8, 0.05), await waits(window, holder, 4, 0.05)
    with pytest.raises(DeadlineExceeded):
        await second
    assert not first.done()
    window.give_back(holder, 4)
    await first


async def test_who_alone_stalls_fails_alone() -> None:
    window, stalled, quick = Window(8), Share(), Share()
    await window.take(stalled, 4, FOREVER_S)
    sitting = await waits(window, stalled, 4, 0.01)
    async with asyncio.timeout(20):
        while not sitting.done():
            await window.take(quick, 4, FOREVER_S)
            await asyncio.sleep(0)
            window.give_back(quick, 4)
    with pytest.raises(DeadlineExceeded, match="others passed"):
        await sitting


async def test_who_waits_behind_others_on_a_slow_link_does_not_fail() -> None:
    window, patient, others = Window(8), Share(), Share()
    await window.take(patient, 4, FOREVER_S)
    await window.take(others, 4, FOREVER_S)
    waiting = await waits(window, patient, 4, 0.05)
    for _ in range(4):  # less than a window, over several times the patience
        await asyncio.wait({waiting}, timeout=0.03)
        window.give_back(others, 1)
    window.give_back(patient, 4)
    await waiting


@given(st.integers(4, 30), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=40))
def test_takes_and_returns_in_any_order_add_up(limit: int, takes: list[tuple[int, int]]) -> None:
    async def run() -> None:
        window, shares = Window(limit), [Share() for _ in range(4)]

        async def one(share: Share, num_bytes: int) -> None:
            await window.take(share, num_bytes, FOREVER_S)
            assert sum(share.held_bytes for share in shares) + window.free_bytes == limit
            assert window.free_bytes >= 0
            await asyncio.sleep(0)
            window.give_back(share, num_bytes)

        async with asyncio.timeout(20):
            await asyncio.gather(*(one(shares[index], num_bytes) for index, num_bytes in takes))
        assert window.free_bytes == limit

    asyncio.run(run())
