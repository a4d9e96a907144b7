"""The cold tier against real stores: a folder, an S3 server and a Redis server that the test starts."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.errors import InvalidRequest, NotFound, Unavailable
from halfmoon.rpc.breaker import CircuitBreaker
from halfmoon.up.this_host.reserved_ports import ReservedPorts
from services.kvstore.assembly import cold_client, running_store
from services.kvstore.settings import KVStoreSettings
from services.kvstore.tiers.cold import PREFIX, ColdClient, ColdTier
from tests.services.kvstore.blocks import content, is_right, key, meta, put, put_chain

KEYS = [key(n) for n in range(8)]
IDS = [block_id(one) for one in KEYS]


@asynccontextmanager
async def process(*command: str, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server, from when its port answers to its end."""
    quiet = asyncio.subprocess.DEVNULL
    running = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    assert running.returncode is None, "the server did not start"
                    await asyncio.sleep(0.05)
                    continue
                writer.close()
                await writer.wait_closed()
                break
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


@asynccontextmanager
async def folder(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    pytest.importorskip("obstore")
    yield f"file://{directory}/a%20folder"


@asynccontextmanager
async def s3(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """moto's server: S3's protocol over HTTP, objects in its memory."""
    pytest.importorskip("obstore")
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        pytest.skip("moto is not installed")
    with ReservedPorts() as ports:
        port = ports.port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }.items():
            monkeypatch.setenv(name, value)
        command = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
        async with process(*command, port=port):
            await make_bucket(port, "blocks")
            yield "s3://blocks"


async def make_bucket(port: int, name: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"PUT /{name} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    assert b" 200 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


@asynccontextmanager
async def redis(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    pytest.importorskip("redis")
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    with ReservedPorts() as ports:
        port = ports.port()
        command = (program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory))
        async with process(*command, port=port):
            yield f"redis://127.0.0.1:{port}/0"


def client(url: str) -> ColdClient:
    return cold_client(url, timeout_s=20.0)


Server = Callable[[Path, pytest.MonkeyPatch], AbstractAsyncContextManager[str]]
SERVERS = pytest.mark.parametrize("server", [folder, s3, redis], ids=["folder", "s3", "redis"])


@SERVERS
async def test_a_client_keeps_to_its_protocol(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with server(tmp_path, monkeypatch) as url:
        it = client(url)
        assert [name async for name, _ in it.list(PREFIX)] == []
        with pytest.raises(NotFound):
            await it.get(f"{PREFIX}none")
        await it.delete(f"{PREFIX}none")
        big = os.urandom(6 << 20)
        await it.put(f"{PREFIX}a/x-y-1", b"first")
        await it.put(f"{PREFIX}a/x-y-1", big)
        await it.put("else/where", b"not ours")
        assert await it.get(f"{PREFIX}a/x-y-1") == big
        assert [item async for item in it.list(PREFIX)] == [(f"{PREFIX}a/x-y-1", len(big))]
        await it.delete(f"{PREFIX}a/x-y-1")
        assert [name async for name, _ in it.list(PREFIX)] == []
        await it.close()


@SERVERS
async def test_a_wiped_host_gets_its_blocks_back(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path, monkeypatch) as url:
        for host in ("one", "two"):
            settings = KVStoreSettings(
                dram_bytes=1 << 20,
                disk_dir=tmp_path / host,
                cold_url=url,
                cold_codec="zstd",
                cold_timeout_s=20,
            )
            async with running_store(settings) as store:
                if host == "one":
                    await put_chain(store.pool, KEYS)
                    await store.pool.settled()
                reader = store.pool.events.subscribe()
                while len(store.pool.match(IDS)) < len(IDS):
                    await reader.next()
                reader.close()
                assert [await is_right(store.pool, block) for block in IDS] == [True] * len(IDS)
                from_cold = store.pool.counts.by_tier[Tier.COLD]["hits"]
                assert from_cold == (0 if host == "one" else len(IDS))


async def test_a_server_that_dies_is_an_outage_not_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    with ReservedPorts() as ports:
        port = ports.port()
        command = (program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path))
        settings = KVStoreSettings(dram_bytes=1 << 20, cold_url=f"redis://127.0.0.1:{port}/0")
        async with running_store(settings) as store:  # it is down when the store starts
            pool = store.pool
            await put_chain(pool, KEYS[:2])
            assert await is_right(pool, IDS[1])
            async with process(*command, port=port) as server:
                await pool.settled()
                await put(pool, meta(IDS[2], IDS[1], 2))  # brings along what met the start of the server
                await pool.settled()
                assert pool.catalog.is_in(IDS[1], Tier.COLD)
                server.kill()
                await server.wait()
                pool.catalog.lose(IDS[1], Tier.DRAM)
                with pytest.raises(Unavailable):
                    await pool.acquire(IDS[1])
                assert pool.catalog.is_in(IDS[1], Tier.COLD)
                assert await is_right(pool, IDS[0])


async def test_objects_that_were_tampered_with_are_misses(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    it = ColdTier(client(f"file://{tmp_path}"), 1 << 20, 5.0, CircuitBreaker())
    settings = KVStoreSettings(dram_bytes=1 << 20, cold_url=f"file://{tmp_path}")
    async with running_store(settings) as store:
        await put_chain(store.pool, KEYS[:1])
        await store.pool.settled()
    [(found, num_bytes)] = await it.list(5.0)
    assert found.id == IDS[0]
    assert num_bytes > len(content(KEYS[0]))
    flip_last_byte(tmp_path)
    async with running_store(settings) as store:
        reader = store.pool.events.subscribe()
        while IDS[0] not in store.pool.catalog:
            await reader.next()
        reader.close()
        assert await store.pool.verify([Tier.COLD]) == {Tier.COLD: (1, 1)}
        assert IDS[0] not in store.pool.catalog


def flip_last_byte(directory: Path) -> None:
    [file] = [path for path in directory.rglob("*") if path.is_file()]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("url", ["nowhere://x", "ftp://host/x", "redis://host:port"])
def test_urls_that_name_no_store(url: str) -> None:
    with pytest.raises(InvalidRequest):
        client(url)
