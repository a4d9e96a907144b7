"""Shared memory comes only from whom it should, whole and sealed, and goes with its owner."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable

import pytest

from halfmoon.errors import HalfmoonError, Incompatible, Unavailable
from halfmoon.rpc.transport.memfd import SharedSegment, host_id, receive_segment
from halfmoon.rpc.transport.shm import SharedMemoryInlet
from halfmoon.rpc.transport.slots import Reference
from tests.rpc.transport.conftest import raising, until


async def test_both_ends_see_the_same_memory_and_the_reader_cannot_write() -> None:
    segment = SharedSegment(8192)
    memory, connection = await asyncio.to_thread(receive_segment, segment.name)
    segment.memory[5000:5003] = b"abc"
    assert bytes(memory[5000:5003]) == b"abc"
    assert memory.readonly
    assert memory.nbytes == 8192
    connection.close()
    segment.close()
    segment.close()


async def test_a_segment_that_nobody_could_ask_for_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without abstract sockets: it is tried again and again."""

    def refuses(self: socket.socket, address: object) -> None:
        raise PermissionError("no sockets of this kind here")

    monkeypatch.setattr("socket.socket.bind", refuses)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PermissionError):
        SharedSegment(4096)
    assert os.listdir("/proc/self/fd") == before


async def test_the_reader_sees_its_owner_go() -> None:
    segment, inlet = SharedSegment(4096), SharedMemoryInlet()
    offer = f"{host_id()}/{segment.name}".encode()
    source = await inlet.join(offer)
    assert await inlet.join(offer) is source
    segment.memory[:3] = b"abc"
    view = await source.fetch(Reference(0).encoded(), 3)
    segment.close()
    await until(lambda: not inlet._segments)
    assert bytes(view) == b"abc"  # what is still looked at stays
    with raising(Unavailable, "cannot get"):
        await inlet.join(offer)
    inlet.close()


async def test_a_second_reader_gets_it_too() -> None:
    segment, first, second = SharedSegment(4096), SharedMemoryInlet(), SharedMemoryInlet()
    offer = f"{host_id()}/{segment.name}".encode()
    await first.join(offer)
    first.close()  # as when the receiver is started again
    await second.join(offer)
    second.close()
    segment.close()


async def test_another_host_is_not_even_asked() -> None:
    inlet = SharedMemoryInlet()
    with raising(Incompatible, "different hosts"):
        await inlet.join(b"elsewhere/halfmoon-kv-1")


def _hand_over_nothing(connection: socket.socket) -> None:
    connection.sendall(b"\0")


def _hand_over_unsealed(connection: socket.socket) -> None:
    file = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 4096)
    socket.send_fds(connection, [b"\0"], [file])
    os.close(file)


def _hang_up(connection: socket.socket) -> None:
    del connection


@pytest.mark.parametrize(
    ("serve", "error", "match"),
    [
        (_hand_over_nothing, Unavailable, "did not hand"),
        (_hang_up, Unavailable, "did not hand"),
        (_hand_over_unsealed, Incompatible, "not sealed"),
    ],
)
def test_what_is_no_segment_is_refused(
    serve: Callable[[socket.socket], None], error: type[HalfmoonError], match: str
) -> None:
    name = f"halfmoon-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                serve(connection)

        async def both() -> None:
            await asyncio.gather(asyncio.to_thread(answer), asyncio.to_thread(receive_segment, name))

        with raising(error, match):
            asyncio.run(both())


async def test_somebody_elses_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = SharedSegment(4096)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with raising(Incompatible, "another user"):
        await asyncio.to_thread(receive_segment, segment.name)
    segment.close()
