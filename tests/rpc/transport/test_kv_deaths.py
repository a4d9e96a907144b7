"""The other process is killed: one clear error here, nothing held, and no shared memory left anywhere."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from halfmoon.errors import Unavailable
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transfer import transfer_to
from halfmoon.rpc.transport.link import KVLink, LinkSettings
from halfmoon.rpc.transport.shm import SharedMemoryInlet
from tests.rpc.transport.conftest import LAYERS, LAYOUT, WHOLE, ends, kv_of, raising, until

ROOT = Path(__file__).parents[3]
SENDER = """
import asyncio, sys
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transfer import transfer_to
from halfmoon.rpc.transport.link import KVLink, LinkSettings
from tests.rpc.transport.conftest import LAYERS, LAYOUT, WHOLE, kv_of

async def main():
    link = KVLink(Peer(sys.argv[1]), LinkSettings(transports=("shm",)))
    async with transfer_to(link, LAYOUT, deadline_s=60) as transfer:
        await transfer.open(WHOLE, b"doomed")
        await transfer.data(LAYERS[0], kv_of(1)[0].tobytes())
        await transfer.buffer(1000)
        print(transfer.transport, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
RECEIVER = """
import asyncio
from tests.rpc.transport.conftest import ends

async def main():
    async with ends() as it:
        print(it.link.peer.address, flush=True)
        it.sink.gates[b"doomed"] = asyncio.Event()
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def child(code: str, *arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """A Python process and its first line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *arguments, stdout=PIPE, env=environment)
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def mapped_segments() -> int:
    """Of how many of our segments this process has memory."""
    gc.collect()  # of other tests
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd:halfmoon-kv" in line})  # by inode


async def test_a_killed_sender() -> None:
    inlet = SharedMemoryInlet()
    before = mapped_segments()
    async with ends(inlets=[inlet]) as it, child(SENDER, it.link.peer.address) as (sender, transport):
        assert transport == "shm"
        await until(lambda: 0 in it.sink.arrived.get(b"doomed", {}))
        assert mapped_segments() == before + 1
        sender.send_signal(signal.SIGKILL)
        await until(lambda: not it.sink.running)
        await until(lambda: mapped_segments() == before)
    assert not [name for name in os.listdir("/dev/shm") if "halfmoon" in name]


@pytest.mark.parametrize("transports", [(), ("shm",)], ids=["grpc", "shm"])
async def test_a_killed_receiver(transports: tuple[str, ...]) -> None:
    before = mapped_segments()
    async with child(RECEIVER) as (receiver, address):
        link = KVLink(Peer(address), LinkSettings(transports=transports))
        async with transfer_to(link, LAYOUT, deadline_s=60) as transfer:
            await transfer.open(WHOLE, b"doomed")
            await transfer.data(LAYERS[0], kv_of(1)[0].tobytes())
            receiver.send_signal(signal.SIGKILL)
            with raising(Unavailable, "."):
                await transfer.until_broken()
            with raising(Unavailable, "."):
                await transfer.data(LAYERS[1], kv_of(1)[1].tobytes())
        assert link.window.free_bytes == link.window.limit_bytes
        await link.close()
        del link, transfer
    assert mapped_segments() == before
