"""A transfer arrives the same whatever lies under it; what cannot be used is declined and gRPC does it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from importlib.util import find_spec

import numpy as np
import pytest

from halfmoon.errors import DataLoss, Incompatible, InvalidRequest
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.negotiation import Acceptance
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transfer import KVIntake, TransferSender, transfer_to
from halfmoon.rpc.transport.link import KVLink, LinkSettings
from halfmoon.rpc.transport.protocol import StagingBuffer
from halfmoon.rpc.transport.shm import SharedMemoryOutlet
from tests.rpc.transport.conftest import LAYERS, LAYOUT, WHOLE, Ends, ends, kv_of, raising, until

GRPC, SHM, NIXL = (LinkSettings(transports=names) for names in ((), ("shm",), ("nixl",)))
WITH_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
BOTH = pytest.mark.parametrize(
    "settings",
    [pytest.param(GRPC, id="grpc"), pytest.param(SHM, id="shm"), pytest.param(NIXL, id="nixl", marks=WITH_NIXL)],
)


def name_of(settings: LinkSettings) -> str:
    return settings.transports[0] if settings.transports else "grpc"


async def staged(transfer: TransferSender, layer: int, kv: np.ndarray) -> StagingBuffer:
    buffer = await transfer.buffer(kv[layer].nbytes)
    np.copyto(np.frombuffer(buffer.view, np.uint8), kv[layer])
    return buffer


async def whole_transfer(it: Ends, name: bytes, seed: int, *, staging: bool) -> str:
    kv = kv_of(seed)
    async with transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
        await transfer.open(WHOLE, name)
        for layer, part in enumerate(LAYERS):
            await transfer.data(part, await staged(transfer, layer, kv) if staging else kv[layer].tobytes())
            await transfer.renew()
        await transfer.commit(b"")
        assert (it.sink.got(name) == kv).all()
        return transfer.transport


@BOTH
@pytest.mark.parametrize("staging", [False, True], ids=["copied", "staged"])
async def test_what_is_sent_arrives(settings: LinkSettings, staging: bool) -> None:
    async with ends(settings) as it:
        for number in range(5):
            used = await whole_transfer(it, b"%d" % number, number, staging=staging)
            assert used == name_of(settings)
        await until(lambda: it.link.window.free_bytes == it.link.window.limit_bytes)
        assert not it.declined
        assert not it.sink.errors


@BOTH
async def test_many_transfers_at_once_share_a_small_window(settings: LinkSettings) -> None:
    small = LinkSettings(transports=settings.transports, window_bytes=2 * MAX_PAYLOAD_BYTES)
    async with ends(small) as it:
        names = [b"%d" % number for number in range(20)]
        sending = [whole_transfer(it, name, int(name), staging=bool(int(name) % 2)) for name in names]
        assert set(await asyncio.gather(*sending)) == {name_of(settings)}
        assert it.link.window.free_bytes == it.link.window.limit_bytes


async def test_a_receiver_without_the_transport_gets_messages(caplog: pytest.LogCaptureFixture) -> None:
    async with ends(SHM, inlets=[]) as it:
        with caplog.at_level(logging.INFO, "halfmoon.rpc.transport.link"):
            for name in (b"1", b"2"):
                assert await whole_transfer(it, name, 1, staging=True) == "grpc"
        assert it.declined == ["shm"]  # the second transfer did not offer it again
        assert [record.message for record in caplog.records] == ["kv.fallback"]


class _Later:
    """A clock that is some seconds ahead."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def time(self) -> float:
        return time.monotonic() + self._ahead_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def test_what_was_declined_is_offered_again_later() -> None:
    async with ends(SHM, inlets=[]) as it:
        assert await whole_transfer(it, b"1", 1, staging=True) == "grpc"
        it.sink.intake = KVIntake()  # another process at the same address
        assert await whole_transfer(it, b"2", 1, staging=True) == "grpc"
        it.link.clock = _Later(61)
        assert await whole_transfer(it, b"3", 1, staging=True) == "shm"


async def test_a_receiver_that_was_started_again_joins_the_same_memory() -> None:
    async with ends(SHM) as it:
        assert await whole_transfer(it, b"1", 1, staging=True) == "shm"
        it.sink.intake.close()
        it.sink.intake = KVIntake()
        assert await whole_transfer(it, b"2", 2, staging=True) == "shm"
        assert not it.declined


class _BrokenInlet:
    name = "shm"

    async def join(self, parameters: bytes) -> None:
        raise Incompatible("the two ends are on different hosts")

    def close(self) -> None: ...


async def test_a_transport_that_cannot_be_joined_falls_back() -> None:
    async with ends(SHM, inlets=[_BrokenInlet()]) as it:  # type: ignore[list-item]
        assert await whole_transfer(it, b"1", 1, staging=False) == "grpc"
        assert it.declined == ["shm"]


@pytest.mark.skipif(find_spec("nixl") is not None, reason="nixl is installed")
async def test_nixl_without_its_extra_is_not_offered() -> None:
    async with ends(LinkSettings(transports=("nixl", "shm"))) as it:
        assert await whole_transfer(it, b"1", 1, staging=False) == "shm"
        assert it.declined == ["nixl"]


async def test_a_transport_that_this_host_lacks_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, flags: int) -> int:
        raise OSError("no such thing here")

    monkeypatch.setattr("os.memfd_create", fails)
    async with ends(SHM) as it:
        assert await whole_transfer(it, b"1", 1, staging=False) == "grpc"
        assert it.declined == ["shm"]


async def test_a_transport_that_takes_long_to_make_does_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    going_on, made = threading.Event(), []

    class Slow(SharedMemoryOutlet):
        name = "nixl"

        def __init__(self, num_slots: int, slot_bytes: int) -> None:
            made.append(going_on.wait(5))
            raise Incompatible("nothing works here")

    monkeypatch.setattr("halfmoon.rpc.transport.link.NixlOutlet", Slow)
    async with ends(NIXL) as it:
        asyncio.get_running_loop().call_soon(going_on.set)
        assert set(await asyncio.gather(*(whole_transfer(it, b"%d" % n, n, staging=True) for n in range(3)))) == {
            "grpc"
        }
        assert made == [True]  # once, while the loop went on
        assert it.declined == ["nixl"]


async def test_a_choice_that_was_not_offered_is_incompatible() -> None:
    async with Peer("127.0.0.1:1") as peer:
        with raising(Incompatible, "not offered"):
            KVLink(peer, GRPC).chosen(Acceptance("nixl"))


def test_settings_are_checked() -> None:
    with raising(InvalidRequest, "carrier pigeon"):
        LinkSettings(transports=("carrier pigeon",))
    with raising(InvalidRequest, "window"):
        LinkSettings(window_bytes=MAX_PAYLOAD_BYTES)


@BOTH
async def test_too_long_a_payload_is_refused_here(settings: LinkSettings) -> None:
    async with ends(settings) as it, transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
        await transfer.open(WHOLE, b"1")
        with raising(InvalidRequest, "over the limit"):
            await transfer.buffer(MAX_PAYLOAD_BYTES + 1)


@pytest.mark.parametrize("settings", [SHM, pytest.param(NIXL, marks=WITH_NIXL)], ids=name_of)
async def test_a_slot_that_was_overwritten_is_found(settings: LinkSettings) -> None:
    async with ends(settings) as it, transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
        await transfer.open(WHOLE, b"1")
        buffer = await staged(transfer, 0, kv_of(1))
        await transfer.data(LAYERS[0], buffer)
        buffer.view[100] ^= 1  # sent, not taken yet
        with raising(DataLoss, "digest"):
            await transfer.until_broken()
        await until(lambda: not it.sink.running)
        assert [type(error) for error in it.sink.errors] == [DataLoss]


@BOTH
async def test_a_window_is_whole_again_after_a_transfer_that_failed(settings: LinkSettings) -> None:
    async with ends(settings) as it:
        it.sink.gates[b"1"] = asyncio.Event()
        async with transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
            await transfer.open(WHOLE, b"1")
            await transfer.data(LAYERS[0], await staged(transfer, 0, kv_of(1)))
            await transfer.buffer(1000)  # never sent
            assert it.link.window.free_bytes < it.link.window.limit_bytes
        assert it.link.window.free_bytes == it.link.window.limit_bytes
        await until(lambda: not it.sink.running)
        assert await whole_transfer(it, b"2", 2, staging=True)


@BOTH
async def test_a_window_is_whole_again_after_a_transfer_whose_end_was_cancelled(settings: LinkSettings) -> None:
    """As when a receiver's refusal and the client's leaving come at the same moment."""
    ending = asyncio.Event()

    async def send(it: Ends) -> None:
        async with transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
            await transfer.open(WHOLE, b"1")
            await transfer.data(LAYERS[0], await staged(transfer, 0, kv_of(1)))
            await transfer.buffer(1000)  # never sent
            ending.set()

    async with ends(settings) as it:
        it.sink.gates[b"1"] = asyncio.Event()
        sending = asyncio.create_task(send(it))
        await ending.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert it.link.window.free_bytes == it.link.window.limit_bytes


async def test_a_slot_that_is_still_being_filled_waits_for_its_writer() -> None:
    async with ends(SHM) as it:
        async with transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
            await transfer.open(WHOLE, b"1")
            writer = np.frombuffer((await transfer.buffer(1000)).view, np.uint8)
        assert it.link.window.free_bytes < it.link.window.limit_bytes
        del writer
        assert await whole_transfer(it, b"2", 2, staging=True) == "shm"
        assert it.link.window.free_bytes == it.link.window.limit_bytes


@BOTH
async def test_another_layout_is_refused_at_both_ends(settings: LinkSettings) -> None:
    async with ends(settings) as it, transfer_to(it.link, LAYOUT, deadline_s=30) as transfer:
        it.sink.layout = KVLayout(4, 2, 32, "float16", 64)
        with raising(Incompatible, "layouts differ"):
            await transfer.open(WHOLE, b"1")
        assert [type(error) for error in it.sink.errors] == [Incompatible]
