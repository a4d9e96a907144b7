"""The cold tier: whole records in an object store that outlives this host and may be shared with other stores.

An object's name contains the block's id and its predecessor's, so a listing suffices to know what is there. It begins
with the id of the key that sealed it, so clusters that share an object store do not see each other's blocks. Every
operation has a time limit, and at most a few run at once. A breaker pauses the use of a store that keeps failing:
serving never waits longer than that, and goes on without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol, TypeVar

from halfmoon.catalog.block_identity import ID_BYTES, TAG_BYTES, BlockMeta
from halfmoon.errors import NotFound, Unavailable
from halfmoon.rpc.breaker import CircuitBreaker
from services.kvstore.outage import Outage
from services.kvstore.tiers.record import Record, decode_record
from services.kvstore.tiers.seal import Seal

PREFIX = "halfmoon-kv-v2/"
_MAX_FORGOTTEN = 65_536  # ids to be deleted; blocks beyond it stay until the next listing
_MAX_AT_ONCE = 8
_ROOT = "first"

Result = TypeVar("Result")


class ColdClient(Protocol):
    """An object store. Raises NotFound for an absent object, any other exception for a failure."""

    async def put(self, name: str, data: bytes) -> None:
        """Stores an object as a whole or not at all."""

    async def get(self, name: str) -> bytes:
        """Reads the object."""

    async def delete(self, name: str) -> None:
        """Deletes the object if it exists."""

    def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """Yields (name, bytes) of every object whose name begins with `prefix`."""

    async def close(self) -> None:
        """Closes the connections."""


class ColdTier:
    """Owns how the object store is used. The catalog decides which block is evicted when."""

    def __init__(
        self, client: ColdClient, budget_bytes: int, timeout_s: float, breaker: CircuitBreaker, seal: Seal | None = None
    ) -> None:
        self._client = client
        self.seal = seal or Seal()
        self._prefix = f"{PREFIX}{self.seal.key_id.hex()}/"
        self.budget_bytes = budget_bytes
        self._timeout_s = timeout_s
        self.breaker = breaker
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        self._forgotten: dict[str, None] = {}
        self._deleting = ""  # name whose deletion is in progress
        self._deletion = asyncio.Lock()
        self._is_listing = False
        self._deleted_of_late: set[str] = set()  # deleted during the present listing, which may still name them
        self.outage = Outage("cold.failing")

    async def put(self, meta: BlockMeta, data: bytes) -> None:
        """Stores one record. Raises Unavailable."""
        name = self.name_of(meta)
        was_forgotten = name in self._forgotten
        self._forgotten.pop(name, None)
        if name == self._deleting:
            async with self._deletion:
                pass  # the deletion must not arrive after this put
        try:
            await self._run(self._client.put(name, data))
        except BaseException:
            if was_forgotten:
                self.forget(meta)
            raise

    async def get(self, meta: BlockMeta) -> Record:
        """Reads a record. Raises NotFound, Unavailable, or DataLoss if the object is not of this block."""
        data = await self._run(self._client.get(self.name_of(meta)))
        record = await asyncio.to_thread(decode_record, data, meta.id, self.seal)
        record.check_is(meta)
        return record

    def name_of(self, meta: BlockMeta) -> str:
        """Name of the block's object."""
        return self._prefix + object_name(meta)

    def forget(self, meta: BlockMeta) -> None:
        """Notes that the block has left this tier according to the catalog; `sweep` deletes it."""
        if len(self._forgotten) < _MAX_FORGOTTEN:
            self._forgotten[self.name_of(meta)] = None

    async def sweep(self) -> None:
        """Deletes forgotten blocks. Raises Unavailable; the rest is tried again next time."""
        while self._forgotten or self._deleting:  # by somebody else
            async with self._deletion:
                if not self._forgotten:
                    return  # somebody else has deleted the last one
                self._deleting = name = next(iter(self._forgotten))
                del self._forgotten[name]
                if self._is_listing:
                    self._deleted_of_late.add(name)
                try:
                    await self._run(self._client.delete(name))
                except BaseException:
                    self._forgotten[name] = None
                    raise
                finally:
                    self._deleting = ""

    async def list(self, max_s: float) -> list[tuple[BlockMeta, int]]:
        """All blocks there with their sizes, each after its parent. Raises Unavailable; stops after `max_s`."""
        blocks: list[tuple[BlockMeta, int]] = []
        self._is_listing = True

        async def collect() -> None:
            async for name, num_bytes in self._client.list(self._prefix):
                meta = parse_name(name.removeprefix(self._prefix))
                if meta is not None:
                    blocks.append((meta, num_bytes))

        try:
            await self._run(collect(), max_s)
        finally:
            gone = self._deleted_of_late | set(self._forgotten) | {self._deleting}
            self._is_listing, self._deleted_of_late = False, set()
        return sorted((item for item in blocks if self.name_of(item[0]) not in gone), key=lambda item: item[0].depth)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def _run(self, work: Awaitable[Result], timeout_s: float | None = None) -> Result:
        """The only path to the client: raises NotFound for absent objects and Unavailable for every failure."""
        if not self.breaker.allows(time.monotonic()):
            _discard(work)
            raise Unavailable("the cold tier is not used for a while: it keeps failing")
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s):
                async with self._slots:
                    result = await work
        except NotFound:
            self._works()
            raise
        except Exception as err:  # the clients' errors have no common base
            self.breaker.failed(time.monotonic())
            if self.breaker.state == "open":
                self.outage.failed(f"{type(err).__name__}: {err}")
            raise Unavailable(f"the cold tier failed: {type(err).__name__}") from err
        except BaseException:
            if self.breaker.state == "trying":  # cancelled before the outcome was known
                self.breaker.failed(time.monotonic())
            raise
        finally:
            _discard(work)
        self._works()
        return result

    def _works(self) -> None:
        self.breaker.succeeded()
        self.outage.succeeded()


def object_name(meta: BlockMeta) -> str:
    """Name of a block's object, after the prefix of its key."""
    parent = _ROOT if meta.parent is None else meta.parent[TAG_BYTES:].hex()
    return f"{meta.id[:TAG_BYTES].hex()}/{meta.id[TAG_BYTES:].hex()}-{parent}-{meta.depth}"


def parse_name(name: str) -> BlockMeta | None:
    """Block that `object_name` gave this name; None if it gave it to none."""
    try:
        tag, rest = name.split("/")
        key, parent, depth = rest.split("-")
        block = bytes.fromhex(tag + key)
        before = None if parent == _ROOT else bytes.fromhex(tag + parent)
        meta = BlockMeta(block, before, int(depth))
    except ValueError:
        return None
    return meta if object_name(meta) == name and len(block) == ID_BYTES else None


def _discard(work: object) -> None:
    close = getattr(work, "close", None)  # closes a coroutine that was never awaited, which would warn
    if close is not None:
        close()
