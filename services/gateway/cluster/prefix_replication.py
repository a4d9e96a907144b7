"""Replicates hot prefixes between stores (Mooncake, section 6.2).

A prompt may go to a worker with little of its prefix because the worker with more of it is busy; others will follow.
So the store of the chosen worker is asked to copy the prefix from the store of the other one, in the background, if
best prefix / local prefix is above the balancing threshold.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import HalfmoonError
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.owner import SHARED, KVOwner
from halfmoon.policy.view.worker_view import WorkerView
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.kvstore_client import KVStoreClient
from services.gateway.cluster.member import Member
from services.gateway.cluster.membership import Membership

log = logging.getLogger(__name__)

_MAX_WAITING = 32
_REMEMBERED = 1024  # requested prefixes
_AGAIN_S = 60.0  # minimum time between requests for the same prefix
_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt's full blocks in order, under its tenant's salt."""

    keys: Sequence[bytes]
    layout: KVLayout
    tenant_salt: bytes = b""
    owner: KVOwner = SHARED


@dataclass(frozen=True, slots=True)
class _Copy:
    target: str
    source: str
    blocks: PromptBlocks


class StoreCopies:
    """Owns the copies that are still to be requested. Copying never delays a request to generate."""

    def __init__(self, membership: Membership, threshold: float | None, credential: Credential | None = None) -> None:
        """`threshold`: best / local prefix above which a prefix is copied; None copies nothing."""
        self._membership = membership
        self._threshold = threshold
        self._credential = credential
        self._waiting: asyncio.Queue[_Copy] = asyncio.Queue(_MAX_WAITING)
        self._requested_s: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.num_copies: Counter[str] = Counter()  # by outcome: asked, failed, dropped

    def consider(
        self, chosen: WorkerView, cached_blocks: NDArray[np.int64], blocks: PromptBlocks, now_s: float
    ) -> None:
        """Requests a copy if it pays for a prompt that was placed. `cached_blocks`: leading blocks of each holder."""
        number = self._membership.store_number
        own = self._store_of(lambda member: member.worker_id == chosen.worker_id)
        local = max(_held(chosen.holder, cached_blocks), _held(number(own) if own else -1, cached_blocks))
        best = int(cached_blocks.max())
        if self._threshold is None or best <= self._threshold * local:
            return
        target = own
        stores = (store for store in self._membership.stores if _held(number(store), cached_blocks) == best)
        source = next(stores, "") or self._store_of(lambda member: _held(member.holder, cached_blocks) == best)
        if not target or not source or source == target:
            return
        name = target, blocks.keys[best - 1]
        if now_s - self._requested_s.get(name, -_AGAIN_S) < _AGAIN_S:
            return
        self._requested_s[name] = now_s
        self._requested_s.move_to_end(name)
        if len(self._requested_s) > _REMEMBERED:
            self._requested_s.popitem(last=False)
        try:
            self._waiting.put_nowait(_Copy(target, source, replace(blocks, keys=blocks.keys[:best])))
        except asyncio.QueueFull:
            self.num_copies["dropped"] += 1
        else:
            self._is_idle.clear()

    @property
    def is_idle(self) -> bool:
        """Whether all copies have been requested."""
        return self._is_idle.is_set()

    async def ask_all(self) -> None:
        """Requests the copies one after the other, forever."""
        while True:
            copy = await self._waiting.get()
            blocks = copy.blocks
            client = KVStoreClient(copy.target, blocks.tenant_salt, credential=self._credential)
            try:
                num_coming = await client.replicate(
                    copy.source, blocks.keys, blocks.layout, blocks.owner, deadline_s=_DEADLINE_S
                )
            except HalfmoonError as error:
                self.num_copies["failed"] += 1
                log.info("store_copy.failed", extra={"target": copy.target, "reason": error.message})
            else:
                self.num_copies["asked"] += 1
                log.info("store_copy.asked", extra={"target": copy.target, "num_blocks": num_coming})
            finally:
                await client.close()
                if self._waiting.empty():
                    self._is_idle.set()

    def _store_of(self, matches: Callable[[Member], bool]) -> str:
        return next((member.identity.kv_store for member in self._membership.members() if matches(member)), "")


def _held(holder: int, cached_blocks: NDArray[np.int64]) -> int:
    """Leading blocks that the holder has."""
    return int(cached_blocks[holder]) if 0 <= holder < len(cached_blocks) else 0
