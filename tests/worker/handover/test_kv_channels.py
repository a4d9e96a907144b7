"""Channels to decode workers are kept while used, and do not pile up."""

from __future__ import annotations

import asyncio

from halfmoon.worker.handover.kv_channels import KVChannels


async def test_a_channel_is_used_again() -> None:
    channels = KVChannels()
    with channels.to("127.0.0.1:1") as first, channels.to("127.0.0.1:1") as second:
        assert first is second
    await channels.close_idle(0)
    with channels.to("127.0.0.1:1") as third:
        assert third is not first
    await channels.close_idle(0)


async def test_only_the_longest_unused_ones_are_closed() -> None:
    channels = KVChannels()
    with channels.to("127.0.0.1:1") as in_use:
        peers = []
        for port in (2, 3, 4):
            with channels.to(f"127.0.0.1:{port}") as peer:
                peers.append(peer)
        await channels.close_idle(1)
        with (
            channels.to("127.0.0.1:1") as same,
            channels.to("127.0.0.1:4") as newest,
            channels.to("127.0.0.1:2") as new,
        ):
            assert same is in_use
            assert newest is peers[2]
            assert new is not peers[0]
    await channels.close_idle(0)


async def test_those_to_workers_that_have_left_are_closed_at_once() -> None:
    channels = KVChannels()
    with channels.to("127.0.0.1:1") as gone, channels.to("127.0.0.1:2") as member:
        await channels.close_idle(has_left=lambda address: True)
        with channels.to("127.0.0.1:1") as in_use:
            assert in_use is gone
    await channels.close_idle(has_left=lambda address: address.endswith(":1"))
    with channels.to("127.0.0.1:1") as anew, channels.to("127.0.0.1:2") as same:
        assert anew is not gone
        assert same is member
    await channels.close_idle(0)


async def test_closing_several_leaves_those_alone_that_are_used_meanwhile() -> None:
    channels, is_closing, go_on = KVChannels(), asyncio.Event(), asyncio.Event()

    async def close_slowly() -> None:
        is_closing.set()
        await go_on.wait()

    with channels.to("127.0.0.1:1") as first, channels.to("127.0.0.1:2"):
        first.close = close_slowly  # type: ignore[method-assign]
    closing = asyncio.create_task(channels.close_idle(0))
    await is_closing.wait()
    with channels.to("127.0.0.1:2") as used:
        go_on.set()
        await closing
        with channels.to("127.0.0.1:2") as same:
            assert same is used
    await channels.close_idle(0)
