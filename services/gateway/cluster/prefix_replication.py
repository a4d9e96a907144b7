"""Hot prefixes come to where they are wanted: stores copy from each other what a placement did not find near.

A prompt that goes to a worker with little of its prefix, because the worker with more of it is busy, will not be the
last one. So the store beside the chosen worker is asked to copy the prefix from the store beside the other (Mooncake,
section 6.2), behind the request, when best prefix / local prefix is above the balancing threshold.
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
from halfmoon.policy.view.worker_view import WorkerView
from halfmoon.rpc.kvstore_client import KVStoreClient
from services.gateway.cluster.member import Member
from services.gateway.cluster.membership import Membership

log = logging.getLogger(__name__)

_MAX_WAITING = 32
_REMEMBERED = 1024  # prefixes asked for
_AGAIN_S = 60.0  # a prefix is not asked for more often
_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt's whole blocks, from the first on, as its tenant has them."""

    keys: Sequence[bytes]
    layout: KVLayout
    tenant_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class _Copy:
    target: str
    source: str
    blocks: PromptBlocks


class StoreCopies:
    """Owns what is to be asked of stores. Whether a prefix is copied never delays a request."""

    def __init__(self, membership: Membership, threshold: float | None) -> None:
        """threshold: best / local prefix above which it is copied; None: nothing is."""
        self._membership = membership
        self._threshold = threshold
        self._waiting: asyncio.Queue[_Copy] = asyncio.Queue(_MAX_WAITING)
        self._asked_s: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.num_copies: Counter[str] = Counter()  # by what became of them: asked, failed, dropped

    def consider(self, chosen: WorkerView, depths: NDArray[np.int64], blocks: PromptBlocks, now_s: float) -> None:
        """A prompt with these blocks was placed; depths: leading blocks that each holder has."""
        local, best = max(_held(chosen.holder, depths), _held(chosen.store_holder, depths)), int(depths.max())
        if self._threshold is None or best <= self._threshold * local:
            return
        target = self._store_beside(lambda member: member.worker_id == chosen.worker_id)
        source = self._store_beside(lambda member: _held(member.store_holder, depths) == best) or self._store_beside(
            lambda member: _held(member.holder, depths) == best
        )
        if not target or not source or source == target:
            return
        name = target, blocks.keys[best - 1]
        if now_s - self._asked_s.get(name, -_AGAIN_S) < _AGAIN_S:
            return
        self._asked_s[name] = now_s
        self._asked_s.move_to_end(name)
        if len(self._asked_s) > _REMEMBERED:
            self._asked_s.popitem(last=False)
        try:
            self._waiting.put_nowait(_Copy(target, source, replace(blocks, keys=blocks.keys[:best])))
        except asyncio.QueueFull:
            self.num_copies["dropped"] += 1
        else:
            self._is_idle.clear()

    @property
    def is_idle(self) -> bool:
        """Whether everything that was to be asked has been."""
        return self._is_idle.is_set()

    async def ask_all(self) -> None:
        """Asks the stores, one after the other, for ever."""
        while True:
            copy = await self._waiting.get()
            client, blocks = KVStoreClient(copy.target, copy.blocks.tenant_salt), copy.blocks
            try:
                num_coming = await client.replicate(copy.source, blocks.keys, blocks.layout, deadline_s=_DEADLINE_S)
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

    def _store_beside(self, is_wanted: Callable[[Member], bool]) -> str:
        return next((member.identity.kv_store for member in self._membership.members() if is_wanted(member)), "")


def _held(holder: int, depths: NDArray[np.int64]) -> int:
    """Leading blocks that it has."""
    return int(depths[holder]) if 0 <= holder < len(depths) else 0
