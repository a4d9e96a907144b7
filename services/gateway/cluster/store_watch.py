"""Keeps the block index up to date with the stores: each is watched as long as a worker uses it."""

from __future__ import annotations

import asyncio
import logging

from halfmoon.errors import HalfmoonError
from halfmoon.pb.kvstore_pb2 import BlockEvent, WatchResponse
from halfmoon.policy.view.block_index import SHORT_KEY_BYTES, BlockEvents, short_keys
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.pooled_stores import PooledStores

log = logging.getLogger(__name__)

_AGAIN_S = 0.5  # after a store became unavailable


class StoreWatch:
    """Owns one watch for each store. The index holds nothing of a store that is unavailable."""

    def __init__(self, cluster: Cluster, credential: Credential | None = None) -> None:
        self._cluster = cluster
        self._credential = credential
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def follow_members(self) -> None:
        """Watches the pool's stores, forever."""
        async with asyncio.TaskGroup() as group:
            while True:
                changed = self._cluster.until_changed()
                used = self._cluster.membership.stores.addresses
                for address in self._watches.keys() - used:
                    self._watches.pop(address).cancel()
                for address in used - self._watches.keys():
                    self._watches[address] = group.create_task(self._watch(address))
                await changed

    async def _watch(self, address: str) -> None:
        """Watches one store, and reconnects after every loss."""
        stores = self._cluster.membership.stores
        last_reason = ""
        while True:
            client, is_there = KVStoreClient(address, credential=self._credential), False
            try:
                is_there = await _read(client, address, stores)
                log.info("store_watch.ended", extra={"store": address, "missed_events": is_there})
            except HalfmoonError as error:
                if stores.num_blocks(address) or error.message != last_reason:  # once an outage
                    log.info("store_watch.lost", extra={"store": address, "reason": error.message})
                last_reason = error.message
            except Exception as error:  # our own bug must not leave blocks in the index that no store has
                log.error("store_watch.failed", exc_info=error)
            finally:
                await client.close()
            if not is_there:
                stores.note_blocks(address, BlockEvents(0, is_snapshot=True))
            await asyncio.sleep(_AGAIN_S)


async def _read(client: KVStoreClient, address: str, stores: PooledStores) -> bool:
    """Reads until the store ends the stream (False) or events are missing (True: the index keeps its best guess)."""
    last: int | None = None  # sequence number of the last event; None: a snapshot must come first
    in_snapshot = False
    async with client.watch() as messages:
        number = 0  # of messages passed to the index
        async for message in messages:
            if not message.is_snapshot and message.sequence - len(message.events) != last:
                return True
            number += 1
            begins = message.is_snapshot and not in_snapshot
            if not stores.note_blocks(address, _changes(message, number, is_snapshot=begins)):
                return True
            in_snapshot = message.is_snapshot and not message.is_last_part
            last = message.sequence
    return False


def _changes(message: WatchResponse, number: int, *, is_snapshot: bool) -> BlockEvents:
    """Converts a message for the index: the last event of each block counts."""
    held = {place.key[:SHORT_KEY_BYTES]: True for place in message.blocks}
    held |= {event.block.key[:SHORT_KEY_BYTES]: event.kind != BlockEvent.EVICTED for event in message.events}
    stored, evicted = ([key for key, is_held in held.items() if is_held is stays] for stays in (True, False))
    return BlockEvents(number, short_keys(stored), short_keys(evicted), is_snapshot)
