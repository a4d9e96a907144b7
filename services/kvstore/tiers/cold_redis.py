"""The cold tier in Redis or Valkey: one string per block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from halfmoon.errors import InvalidRequest, NotFound


class RedisClient:
    """Owns a connection pool. A server that evicts keys itself does no harm: a missing block is a miss."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """url: redis:// or rediss://. Raises InvalidRequest for other schemes."""
        address = url.replace("valkey", "redis", 1) if url.startswith("valkey") else url
        try:
            self._redis: Any = Redis.from_url(
                address,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),  # the breaker decides when to try again
            )
        except ValueError as err:
            raise InvalidRequest(f"the cold tier's URL {url!r} cannot be used: {err}", param="cold_url") from err

    async def put(self, name: str, data: bytes) -> None:
        """See ColdClient."""
        await self._redis.set(name, data)

    async def get(self, name: str) -> bytes:
        """See ColdClient."""
        data: bytes | None = await self._redis.get(name)
        if data is None:
            raise NotFound("the server has no such block")
        return data

    async def delete(self, name: str) -> None:
        """See ColdClient."""
        await self._redis.unlink(name)

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """See ColdClient. SCAN may return a key twice."""
        seen: set[bytes] = set()
        async for key in self._redis.scan_iter(match=f"{prefix}*", count=1000):
            if key not in seen:
                seen.add(key)
                yield key.decode(errors="replace"), int(await self._redis.strlen(key))

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()
