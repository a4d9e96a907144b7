"""Has hot prefixes copied to the stores nearest to where they are asked for: a shell around `Replication`."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halfmoon.errors import HalfmoonError
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.owner import SHARED, KVOwner
from halfmoon.policy.placement.replication import CopyDecision, Replication
from halfmoon.policy.view.block_index import short_keys
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from services.gateway.cluster.membership import Membership

log = logging.getLogger(__name__)

_MAX_WAITING = 32
_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Leading blocks of a prompt, under its tenant's salt."""

    keys: Sequence[bytes]
    layout: KVLayout
    tenant_salt: bytes = b""
    owner: KVOwner = SHARED


@dataclass(frozen=True, slots=True)
class _Copy:
    target: str
    sources: Sequence[str]
    blocks: PromptBlocks


class PrefixCopies:
    """Owns the copies that are still to be requested. Copying never delays a request to generate."""

    def __init__(self, membership: Membership, bytes_per_s: float, credential: Credential | None = None) -> None:
        """bytes_per_s: most bytes of copies in the long run; 0: nothing is copied."""
        self._membership = membership
        self._replication = Replication(bytes_per_s) if bytes_per_s else None
        self._credential = credential
        self._waiting: asyncio.Queue[_Copy] = asyncio.Queue(_MAX_WAITING)
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.num_copies: Counter[str] = Counter()  # by outcome: asked, failed, dropped

    def consider(self, near: str, num_uses: float, blocks: PromptBlocks, now_s: float) -> CopyDecision | None:
        """Requests a copy if it pays for a prompt that was placed near a store; `num_uses` of its prefix `blocks`.

        Returns the decision; None where nothing can be copied.
        """
        if self._replication is None or not blocks.keys:
            return None
        if not self._replication.is_hot(num_uses):  # the usual case costs nothing more
            return "cold"
        keys, index, number = short_keys(blocks.keys), self._membership.index, self._membership.store_number
        missing, sources = np.zeros(len(keys), dtype=np.bool_), list[str]()
        wanted = ~index.holds(keys, number(near))
        for store in sorted(self._membership.stores - {near}):
            found = wanted & ~missing & index.holds(keys, number(store))
            if found.any():
                sources.append(store)
                missing |= found
        num_bytes = float(missing.sum()) * blocks.layout.block_bytes
        decision = self._replication.decide(near, int(keys[-1]), num_uses, num_bytes, now_s)
        if decision == "copy":
            self._request(_Copy(near, sources, blocks))
        return decision

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
                for source in copy.sources:
                    num_coming = await client.replicate(
                        source, blocks.keys, blocks.layout, blocks.owner, deadline_s=_DEADLINE_S
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

    def _request(self, copy: _Copy) -> None:
        try:
            self._waiting.put_nowait(copy)
        except asyncio.QueueFull:
            self.num_copies["dropped"] += 1
        else:
            self._is_idle.clear()
