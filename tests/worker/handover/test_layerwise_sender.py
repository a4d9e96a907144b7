"""What of a prompt's KV is sent when: not before a batch is together, and nothing that a preemption took back."""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np
import pytest

from halfmoon.background import running
from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.kv_memory.kv_access import NotWritten
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.rpc.transfer import transfer_to
from halfmoon.rpc.transport.link import LinkSettings
from halfmoon.worker.handover.layerwise_sender import LayerwiseSender
from tests.rpc.transport.conftest import LAYOUT, TOKENS, WHOLE, ends, until


class PreemptedEngine:
    """Has a prompt's KV only once it is computed again."""

    def __init__(self) -> None:
        self.was_asked = asyncio.Event()
        self.is_computed = False

    async def kv_read(self, request_id: str, part: KVSlice, out: memoryview, codec: Codec) -> memoryview:
        self.was_asked.set()
        if not self.is_computed:
            raise NotWritten("preempted")
        np.frombuffer(out, np.uint8)[:] = 7
        return out


@pytest.mark.parametrize("transports", [(), ("shm",)], ids=["grpc", "shm"])
async def test_who_was_preempted_waits_without_room(transports: tuple[str, ...]) -> None:
    """Prompts that are computed hold their memory until they are sent: they must find room."""
    engine = PreemptedEngine()
    async with (
        ends(LinkSettings(transports=transports)) as it,
        transfer_to(it.link, LAYOUT, deadline_s=30) as transfer,
    ):
        outflow = LayerwiseSender(cast(AsyncEngine, engine), transfer, LAYOUT, "r", TOKENS, Codec.RAW)
        async with running(outflow.open(b"1")) as opening, outflow.running(opening) as sending:
            outflow.on_kv(Written(TOKENS))
            await engine.was_asked.wait()
            await until(lambda: it.link.window.free_bytes == it.link.window.limit_bytes)
            assert not sending.done()
            engine.is_computed = True
            outflow.on_kv(Written(TOKENS))
            await sending
            await transfer.commit(b"")
        assert b"".join(it.sink.arrived[b"1"].values()) == bytes([7]) * WHOLE.num_bytes(LAYOUT)


async def test_nothing_leaves_before_a_batch_is_together() -> None:
    """A link whose speed is known: what takes it less than `batch_s` waits for more, or for the end."""
    engine = PreemptedEngine()
    engine.is_computed = True
    async with ends(LinkSettings(transports=(), batch_s=2.0)) as it:
        assert it.link.batch_bytes == 0
        it.link.estimator.sent(4 * MAX_PAYLOAD_BYTES, 0.0)
        it.link.estimator.consumed(4 * MAX_PAYLOAD_BYTES, 4.0)
        assert it.link.batch_bytes == 2 * MAX_PAYLOAD_BYTES
        async with transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
            outflow = LayerwiseSender(cast(AsyncEngine, engine), transfer, LAYOUT, "r", TOKENS, Codec.RAW)
            async with running(outflow.open(b"1")) as opening, outflow.running(opening) as sending:
                await opening
                outflow.on_kv(Written(0, TOKENS, 3))
                await asyncio.sleep(0.05)
                assert not engine.was_asked.is_set()
                outflow.on_kv(Written(TOKENS))
                await sending
                await transfer.commit(b"")
        assert b"".join(it.sink.arrived[b"1"].values()) == bytes([7]) * WHOLE.num_bytes(LAYOUT)


async def test_a_slow_link_gets_each_frame_at_once() -> None:
    async with ends(LinkSettings(transports=(), batch_s=1.0)) as it:
        it.link.estimator.sent(MAX_PAYLOAD_BYTES, 0.0)
        it.link.estimator.consumed(MAX_PAYLOAD_BYTES, 1.0)
        assert it.link.batch_bytes == 0


async def test_a_batch_is_no_larger_than_what_may_be_under_way() -> None:
    async with ends(LinkSettings(transports=(), batch_s=1e9)) as it:
        it.link.estimator.sent(1 << 20, 0.0)
        it.link.estimator.consumed(1 << 20, 1e-9)
        assert it.link.batch_bytes == it.link.settings.window_bytes
