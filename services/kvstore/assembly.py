"""Builds a pool and its services from settings, open for as long as the store runs."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass

import grpc

from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.host_limits import free_memory_bytes
from halfmoon.pb import kvstore_pb2_grpc
from halfmoon.rpc.breaker import CircuitBreaker
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.transfer import KVIntake
from halfmoon.rpc.transport.memfd import SharedSegment, host_id
from services.kvstore.bytes_servicer import KVBytesServicer
from services.kvstore.movement.incoming import Arrivals
from services.kvstore.movement.replication import Replicator
from services.kvstore.movement.shared_memory_get import SharedMemoryGet
from services.kvstore.movement.shared_memory_put import SharedMemoryPut
from services.kvstore.pool import Pool
from services.kvstore.servicer import KVStoreAdminServicer, KVStoreServicer
from services.kvstore.settings import KVStoreSettings
from services.kvstore.tiers.cold import ColdClient, ColdTier
from services.kvstore.tiers.disk import DiskTier
from services.kvstore.tiers.disk_room import DiskRoom
from services.kvstore.tiers.seal import Seal

log = logging.getLogger(__name__)

_MAX_COLD_FAILURES = 3
_PREDECESSOR_S, _RETRY_S = 10.0, 0.1  # how long a store of the same directory may take to end
_REDIS = ("redis", "rediss", "valkey", "valkeys")


@dataclass(frozen=True, slots=True)
class Store:
    """The running pool and its services."""

    pool: Pool
    registrations: Sequence[Callable[[grpc.aio.Server], None]]


@asynccontextmanager
async def running_store(settings: KVStoreSettings, credential: Credential | None = None) -> AsyncIterator[Store]:
    """Opens the tiers; blocks on disk are served at once. Raises InvalidRequest if a tier cannot be opened.

    Without a block key in the credential, blocks at rest have a checksum that anybody can compute.
    """
    block_key = b"" if credential is None else credential.block_key
    options, seal = settings.pool_options(), Seal(block_key or None)
    if not block_key and (settings.disk_dir or settings.cold_url):
        log.warning("blocks.not_sealed", extra={"reason": "no cluster secret: who can write to the tiers can forge KV"})
    with ExitStack() as stack:
        segment, memory = _arena(int(settings.dram_bytes))
        if segment is not None:
            stack.enter_context(closing(segment))
        intake = stack.enter_context(closing(KVIntake()))
        cold = _cold(settings, options.retry_pause_s, seal)
        disk = None if settings.disk_dir is None else await _disk(settings, seal)
        pool = Pool(memory, options, disk, cold)
        name = None if segment is None else f"{host_id()}/{segment.name}"
        replicator, arrivals = Replicator(pool, credential, settings.peers), Arrivals(pool)
        shared_memory_put = stack.enter_context(closing(SharedMemoryPut(pool, arrivals)))
        control = KVStoreServicer(pool, SharedMemoryGet(pool, settings.lease_s, name), shared_memory_put, replicator)
        admin = KVStoreAdminServicer(pool)
        async with pool.running(replicator.run()):
            yield Store(
                pool,
                (
                    lambda server: kvstore_pb2_grpc.add_KVStoreServicer_to_server(control, server),
                    lambda server: kvstore_pb2_grpc.add_KVStoreAdminServicer_to_server(admin, server),
                    KVBytesServicer(pool, arrivals, intake, settings.lease_s).registration(),
                ),
            )


def _arena(num_bytes: int) -> tuple[SharedSegment | None, memoryview]:
    """Allocates memory that other processes can map, or private memory where the system has none."""
    if num_bytes > (free_bytes := free_memory_bytes()):
        log.warning("arena.exceeds_memory", extra={"dram_bytes": num_bytes, "free_bytes": free_bytes})
    try:
        segment = SharedSegment(num_bytes)
    except (OSError, AttributeError) as err:
        log.warning("arena.not_shared", extra={"reason": str(err)})
        return None, memoryview(bytearray(num_bytes))
    return segment, segment.memory


async def _disk(settings: KVStoreSettings, seal: Seal) -> DiskTier:
    """Waits for a store before this one that is still about to end, such as that of a killed `halfmoon up`."""
    assert settings.disk_dir is not None
    give_up_s = time.monotonic() + _PREDECESSOR_S
    while True:
        try:
            room = DiskRoom(int(settings.disk_bytes), settings.disk_reserve_bytes)
            return await asyncio.to_thread(DiskTier, settings.disk_dir, room, seal)
        except OSError as err:
            if err.errno != errno.EBUSY or time.monotonic() > give_up_s:
                why = f"the disk tier in {settings.disk_dir} cannot be used: {err}"
                raise InvalidRequest(why, param="disk_dir") from err
        await asyncio.sleep(_RETRY_S)


def _cold(settings: KVStoreSettings, pause_s: float, seal: Seal) -> ColdTier | None:
    if settings.cold_url is None:
        return None
    client = cold_client(settings.cold_url, settings.cold_timeout_s)
    breaker = CircuitBreaker(_MAX_COLD_FAILURES, pause_s)
    return ColdTier(client, int(settings.cold_bytes), settings.cold_timeout_s, breaker, seal)


def cold_client(url: str, timeout_s: float) -> ColdClient:
    """Client for a cold tier's URL. Raises InvalidRequest for an unusable URL, Incompatible if a package is missing."""
    try:
        if url.partition("://")[0] in _REDIS:
            from services.kvstore.tiers.cold_redis import RedisClient

            return RedisClient(url, timeout_s)
        from services.kvstore.tiers.cold_objects import ObjectStoreClient

        return ObjectStoreClient(url)
    except ImportError as err:
        raise Incompatible(f"a cold tier needs halfmoon[kvstore]: {err.name} is not installed") from err
