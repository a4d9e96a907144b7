"""What the stores beside the workers hold, for the block index: each is watched as long as a worker uses it."""

from __future__ import annotations

import asyncio
import logging

from halfmoon.errors import HalfmoonError
from halfmoon.pb.kvstore_pb2 import BlockEvent, WatchResponse
from halfmoon.policy.view.block_index import SHORT_KEY_BYTES, BlockEvents, short_keys
from halfmoon.rpc.kvstore_client import KVStoreClient
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.membership import Membership

log = logging.getLogger(__name__)

_AGAIN_S = 0.5  # after a store went away


class StoreWatch:
    """Owns one watch of each store. A store that is away holds nothing; nothing else suffers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def follow_members(self) -> None:
        """Watches the stores that they use, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                changed = self._cluster.until_changed()
                used = self._cluster.membership.stores
                for address in self._watches.keys() - used:
                    self._watches.pop(address).cancel()
                for address in used - self._watches.keys():
                    self._watches[address] = group.create_task(self._watch(address))
                await changed

    async def _watch(self, address: str) -> None:
        """One store, again after every loss."""
        membership = self._cluster.membership
        told = ""  # why it was away last
        while True:
            client, is_there = KVStoreClient(address), False
            try:
                is_there = await _read(client, address, membership)
                log.info("store_watch.ended", extra={"store": address, "missed_events": is_there})
            except HalfmoonError as error:
                if membership.num_stored(address) or error.message != told:  # once, however long it is away
                    log.info("store_watch.lost", extra={"store": address, "reason": error.message})
                told = error.message
            except Exception as error:  # a bug of ours must not leave the index with blocks that nobody has
                log.error("store_watch.failed", exc_info=error)
            finally:
                await client.close()
            if not is_there:
                membership.note_stored(address, BlockEvents(0, is_snapshot=True))
            await asyncio.sleep(_AGAIN_S)


async def _read(client: KVStoreClient, address: str, membership: Membership) -> bool:
    """Until the store ends the stream, or (True) events are missing: then what is known stays, as the better guess."""
    last: int | None = None  # the store's number of the last event; None: a snapshot has to come
    in_snapshot = False
    async with client.watch() as messages:
        number = 0  # of the messages to the index
        async for message in messages:
            if not message.is_snapshot and message.sequence - len(message.events) != last:
                return True
            number += 1
            begins = message.is_snapshot and not in_snapshot
            if not membership.note_stored(address, _changes(message, number, is_snapshot=begins)):
                return True
            in_snapshot = message.is_snapshot and not message.is_last_part
            last = message.sequence
    return False


def _changes(message: WatchResponse, number: int, *, is_snapshot: bool) -> BlockEvents:
    """A message as the index takes it: of each block what became of it last."""
    held = {place.key[:SHORT_KEY_BYTES]: True for place in message.blocks}
    held |= {event.block.key[:SHORT_KEY_BYTES]: event.kind != BlockEvent.EVICTED for event in message.events}
    stored, evicted = ([key for key, is_held in held.items() if is_held is wanted] for wanted in (True, False))
    return BlockEvents(number, short_keys(stored), short_keys(evicted), is_snapshot)
