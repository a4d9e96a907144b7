"""Both ends together measure the round trip of OPEN and ACCEPT without what the receiver did meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfmoon.kv.frame import FrameKind, decode_frame, encode_frame
from halfmoon.kv.negotiation import Acceptance, decode_accept
from halfmoon.kv.receiver import Effect, Reserve, TransferReceiver
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transfer import KVIntake, TransferSender
from halfmoon.rpc.transport import receiving
from halfmoon.rpc.transport.link import KVLink, LinkSettings
from tests.rpc.transport.conftest import LAYERS, LAYOUT, WHOLE, Wire

PAYLOAD = bytes(LAYERS[0].num_bytes(LAYOUT))


class _Clock:
    """Stands still until the test moves it."""

    now_s = 100.0

    def time(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here is limited")


async def test_what_the_receiver_needed_is_not_the_links() -> None:
    wire, receiver, clock = Wire(), TransferReceiver(LAYOUT), _Clock()
    async with Peer("127.0.0.1:1") as peer:
        link = KVLink(peer, LinkSettings(transports=()))
        link.clock = clock
        sender = TransferSender(cast(Any, wire), link, LAYOUT)
        opening = asyncio.create_task(sender.open(WHOLE, b""))
        receiver.handle(decode_frame(await wire.sent.get()))
        clock.now_s += 0.31
        wire.answers.put_nowait(encode_frame(receiver.accept(Acceptance("grpc", taken_us=300_000))))
        await opening
        await sender.data(LAYERS[0], PAYLOAD)
        receiver.handle(decode_frame(await wire.sent.get()))
        clock.now_s += 0.11
        wire.answers.put_nowait(encode_frame(receiver.credit(1)))
        wire.answers.put_nowait(b"not an answer")
        with pytest.raises(Exception, match="magic"):
            await sender.until_broken()
        await sender.close()
        found = link.estimator.estimate
    assert found is not None
    assert found.latency_s == pytest.approx(0.01)
    assert found.bandwidth_bytes_per_s == pytest.approx(len(PAYLOAD) / 0.1)


async def test_a_receiver_says_how_long_it_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, now_s = Wire(), 7.0
    monkeypatch.setattr(receiving, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def act(effect: Effect) -> None:
        nonlocal now_s
        assert isinstance(effect, Reserve)
        now_s += 0.25

    async with Peer("127.0.0.1:1") as peer:
        sender = TransferSender(cast(Any, wire), KVLink(peer, LinkSettings(transports=())), LAYOUT)
        opening = asyncio.create_task(sender.open(WHOLE, b""))
        intake = KVIntake()
        answers = intake.receive(wire.messages(), LAYOUT, act, 10)
        accept = decode_frame(await anext(answers))
        assert accept.kind is FrameKind.ACCEPT
        assert decode_accept(accept.payload).taken_us == pytest.approx(250_000, abs=1)
        wire.answers.put_nowait(encode_frame(accept))
        await opening
        await answers.aclose()
        await sender.close()
        intake.close()
