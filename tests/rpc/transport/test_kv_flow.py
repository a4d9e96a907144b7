"""A slow receiver slows its own transfer; the link's window bounds what is under way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from halfmoon.errors import DeadlineExceeded, Unavailable
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES, KVRange
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.transfer import TransferSender, transfer_to
from halfmoon.rpc.transport.link import LinkSettings
from tests.rpc.transport.conftest import Ends, ends, raising, until

LAYOUT = KVLayout(64, 1, 64, "float32", 64)
TOKENS = 2048
WHOLE = KVRange(0, 64, 0, 1, 0, TOKENS)
LAYER_BYTES = TOKENS * LAYOUT.token_layer_bytes  # 1 MiB
WINDOW_BYTES = 16 * MAX_PAYLOAD_BYTES

BOTH = pytest.mark.parametrize("transports", [(), ("shm",)], ids=["grpc", "shm"])


async def send_layers(transfer: TransferSender, sent: list[int], num_layers: int) -> None:
    for layer in range(num_layers):
        await transfer.data(KVRange(layer, layer + 1, 0, 1, 0, TOKENS), bytes(LAYER_BYTES))
        sent.append(layer)


async def stalled(
    it: Ends, transfer: TransferSender, name: bytes, stall_s: float = 1000
) -> tuple[asyncio.Task[None], list[int]]:
    """A transfer whose receiver takes nothing; gives the sender and what it got rid of. `stall_s` counts from OPEN."""
    it.sink.gates[name] = asyncio.Event()
    await transfer.open(WHOLE, name)
    it.link.settings = replace(it.link.settings, stall_s=stall_s)
    sent: list[int] = []
    return asyncio.create_task(send_layers(transfer, sent, 64)), sent


@BOTH
async def test_a_slow_receiver_slows_its_sender_and_nobody_else(transports: tuple[str, ...]) -> None:
    async with ends(LinkSettings(transports=transports, window_bytes=WINDOW_BYTES)) as it:
        it.sink.layout = LAYOUT
        async with (
            transfer_to(it.link, LAYOUT, deadline_s=60) as slow,
            transfer_to(it.link, LAYOUT, deadline_s=60) as quick,
        ):
            sending, sent = await stalled(it, slow, b"slow")
            half = WINDOW_BYTES // 2
            await until(lambda: it.link.window.free_bytes <= half)
            await quick.open(WHOLE, b"quick")
            await send_layers(quick, [], 64)
            await quick.commit(b"")
            assert len(it.sink.arrived[b"quick"]) == 64
            assert not sending.done()
            assert it.link.window.free_bytes == half
            assert len(sent) <= half // LAYER_BYTES
            it.sink.gates[b"slow"].set()
            await sending
            await slow.commit(b"")
        assert len(it.sink.arrived[b"slow"]) == 64


@BOTH
async def test_a_link_that_stalls_fails_at_both_ends(transports: tuple[str, ...]) -> None:
    settings = LinkSettings(transports=transports, window_bytes=2 * MAX_PAYLOAD_BYTES)
    async with ends(settings) as it:
        it.sink.layout = LAYOUT
        async with transfer_to(it.link, LAYOUT, deadline_s=60) as transfer:
            sending, _ = await stalled(it, transfer, b"1", stall_s=0.2)
            with raising(DeadlineExceeded, "no progress"):
                await sending
        await until(lambda: not it.sink.running)
        assert it.link.window.free_bytes == it.link.window.limit_bytes


@BOTH
async def test_who_waits_for_the_window_hears_that_the_receiver_has_gone(transports: tuple[str, ...]) -> None:
    settings = LinkSettings(transports=transports, window_bytes=2 * MAX_PAYLOAD_BYTES)
    async with ends(settings) as it:
        it.sink.layout = LAYOUT
        async with transfer_to(it.link, LAYOUT, deadline_s=60) as transfer:
            sending, _ = await stalled(it, transfer, b"1")
            await until(lambda: it.link.window.free_bytes <= MAX_PAYLOAD_BYTES)
            await it.link.peer.close()
            with raising(Unavailable, "."):
                await asyncio.wait_for(sending, 20)
        await until(lambda: not it.sink.running)


async def test_a_receiver_that_never_answers_is_a_stall() -> None:
    async with ends() as it:
        it.sink.layout = LAYOUT
        it.sink.gates[b"1"] = asyncio.Event()
        async with transfer_to(it.link, LAYOUT, deadline_s=60) as transfer:
            await transfer.open(KVRange(0, 1, 0, 1, 0, TOKENS), b"1")
            it.link.settings = replace(it.link.settings, stall_s=0.05)
            await transfer.data(KVRange(0, 1, 0, 1, 0, TOKENS), bytes(LAYER_BYTES))
            with raising(DeadlineExceeded, "did not answer"):
                await transfer.commit(b"")
        await until(lambda: not it.sink.running)


async def test_a_silent_sender_is_a_stall() -> None:
    async with ends(lease_s=0.05) as it:
        it.sink.layout = LAYOUT
        async with transfer_to(it.link, LAYOUT, deadline_s=60) as transfer:
            await transfer.open(WHOLE, b"1")
            with raising(DeadlineExceeded, "silent"):
                await transfer.until_broken()
        assert not it.sink.running
        assert [type(error) for error in it.sink.errors] == [DeadlineExceeded]
