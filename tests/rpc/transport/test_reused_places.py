"""A place that is filled again while a receiver reads it never becomes part of a transfer that counts."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc

from halfmoon.errors import DataLoss
from halfmoon.kv.negotiation import Acceptance
from halfmoon.kv.receiver import Commit, Effect, Write
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transfer import KVIntake, TransferSender
from halfmoon.rpc.transport.link import KVLink, LinkSettings
from tests.rpc.transport.conftest import LAYERS, LAYOUT, Wire, raising


async def test_a_sender_that_gives_up_while_its_receiver_reads_has_not_committed() -> None:
    wire, intake = Wire(), KVIntake()
    copied, committed = b"", False
    async with Peer("127.0.0.1:1") as peer:
        link = KVLink(peer, LinkSettings(transports=("shm",)))
        sender = TransferSender(cast(Any, wire), link, LAYOUT)

        async def act(effect: Effect) -> None:
            nonlocal copied, committed
            committed |= isinstance(effect, Commit)
            if isinstance(effect, Write):
                committing = asyncio.create_task(sender.commit(b""))
                for _ in range(10):  # COMMIT does not wait for the credit
                    await asyncio.sleep(0)
                committing.cancel()
                await sender.close()
                link.chosen(Acceptance("shm")).hold(memoryview(bytes(len(payload))))  # the next transfer's frame
                copied = bytes(effect.payload)

        async def receive() -> None:
            async for answer in intake.receive(wire.messages(), LAYOUT, act, 10):
                wire.answers.put_nowait(answer)
            wire.answers.put_nowait(cast(bytes, grpc.aio.EOF))

        receiving = asyncio.create_task(receive())
        await sender.open(LAYERS[0], b"")
        payload = b"\1" * LAYERS[0].num_bytes(LAYOUT)
        await sender.data(LAYERS[0], payload)
        with raising(DataLoss, "was used again"):
            await asyncio.wait_for(receiving, 10)
        await link.close()
        intake.close()
    assert copied != payload, "the race that this test is about did not happen"
    assert not committed
