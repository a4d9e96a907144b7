"""Has hot prefixes copied to where they will be asked for, to stores or workers: a shell around `Replication`."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halfmoon.errors import HalfmoonError, NotFound, Unavailable
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.owner import SHARED, KVOwner
from halfmoon.pb.prefill_pb2 import KVSource, PrefillRequest
from halfmoon.pb.prefill_pb2_grpc import PrefillStub
from halfmoon.pb.types_pb2 import Generation, SamplingParams
from halfmoon.policy.forecast.ttft import MAX_SOURCES, best_sources
from halfmoon.policy.placement.replication import MIN_USES_OF_WORKERS, CopyDecision, Replication, next_holder
from halfmoon.policy.values import Placement, PlacementRequest
from halfmoon.policy.view.block_index import short_keys
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from services.gateway.cluster.member import Member
from services.gateway.cluster.membership import Membership

log = logging.getLogger(__name__)

_MAX_WAITING = 32
_DEADLINE_S = 2.0
_LOAD_DEADLINE_S = 30.0  # of a worker
_AT_ONCE = 4  # copies that are waited for
_NUM_TRIES = 2  # of a copy to a worker, each with other holders
_LAST = 1 << 40  # the priority of a prompt that nobody waits for


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Leading blocks of a prompt, under its tenant's salt, and at least one token more."""

    keys: Sequence[bytes]
    layout: KVLayout
    tenant_salt: bytes = b""
    owner: KVOwner = SHARED
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _StoreCopy:
    target: str
    sources: Sequence[str]
    blocks: PromptBlocks

    async def ask(self, credential: Credential | None) -> None:
        """Has the store copy the blocks; returns at once."""
        blocks = self.blocks
        client = KVStoreClient(self.target, blocks.tenant_salt, credential=credential)
        try:
            for source in self.sources:
                await client.replicate(source, blocks.keys, blocks.layout, blocks.owner, deadline_s=_DEADLINE_S)
        finally:
            await client.close()


@dataclass(frozen=True, slots=True)
class _WorkerCopy:
    target: str
    prompts: Sequence[PrefillRequest]  # the same one, from the best holders and from the next ones

    async def ask(self, credential: Credential | None) -> None:
        """Has the worker load the prefix; returns when it has it. Where all holders fail, asks for it from the next."""
        async with Peer(self.target, credential, "worker") as peer:
            call = PrefillStub(peer.channel).Prefill
            for prompt in self.prompts:
                try:
                    async with peer.stream(call, prompt, deadline_s=_LOAD_DEADLINE_S) as events:
                        async for _ in events:
                            pass
                    return
                except (NotFound, Unavailable):
                    if prompt is self.prompts[-1]:
                        raise


def copy_prompt(
    model_fingerprint: str,
    blocks: PromptBlocks,
    num_blocks: int | None,
    sources: Sequence[KVSource],
    priority: int = _LAST,
) -> PrefillRequest:
    """The first blocks, and the token that a prompt computes in any case, as a prompt that nobody waits for.

    num_blocks: None: all tokens, the last of which lie in a partial block.
    """
    num_tokens = None if num_blocks is None else num_blocks * blocks.layout.block_tokens + 1
    generation = Generation(
        request_id=f"copy-{secrets.token_hex(8)}",
        model_fingerprint=model_fingerprint,
        prompt_token_ids=blocks.token_ids[:num_tokens],
        sampling=SamplingParams(max_tokens=1, top_p=1.0, repetition_penalty=1.0),
        priority=priority,
        tenant_salt=blocks.tenant_salt,
        tenant=blocks.owner.tenant,
        tenant_kv_quota_bytes=blocks.owner.quota_bytes,
    )
    return PrefillRequest(generation=generation, sources=sources, is_copy=True, keeps_partial=num_blocks is None)


class PrefixCopies:
    """Owns the copies that are still to be requested. Copying never delays a request to generate."""

    def __init__(self, membership: Membership, bytes_per_s: float, credential: Credential | None = None) -> None:
        """bytes_per_s: most bytes of copies in the long run; 0: nothing is copied."""
        self._membership = membership
        self._replication = Replication(bytes_per_s) if bytes_per_s else None
        self._credential = credential
        self._waiting: asyncio.Queue[_StoreCopy | _WorkerCopy] = asyncio.Queue(_MAX_WAITING)
        self._num_pending = 0
        self.num_copies: Counter[str] = Counter()  # by outcome: asked, failed, dropped

    def consider(self, near: str, num_uses: float, blocks: PromptBlocks, now_s: float) -> CopyDecision | None:
        """Requests a copy if it pays for a prompt that was placed near a store; `num_uses` of its prefix `blocks`.

        Returns the decision; None where nothing can be copied.
        """
        if self._replication is None or not blocks.keys:
            return None
        if not self._replication.is_hot(num_uses):  # the usual case costs nothing more
            return "cold"
        keys, index, number = short_keys(blocks.keys), self._membership.index, self._membership.stores.number
        missing, sources = np.zeros(len(keys), dtype=np.bool_), list[str]()
        wanted = ~index.holds(keys, number(near))
        for store in sorted(self._membership.stores.addresses - {near}):
            found = wanted & ~missing & index.holds(keys, number(store))
            if found.any():
                sources.append(store)
                missing |= found
        num_bytes = float(missing.sum()) * blocks.layout.block_bytes
        decision = self._replication.decide(near, int(keys[-1]), num_bytes, now_s)
        if decision == "copy":
            self._request(_StoreCopy(near, sources, blocks))
        return decision

    def spread(
        self, request: PlacementRequest, placement: Placement, num_uses: float, blocks: PromptBlocks, now_s: float
    ) -> CopyDecision | None:
        """Requests a copy to one more worker if that pays for a prompt that was placed where no store is.

        Returns as `consider`.
        """
        if self._replication is None or not blocks.keys:
            return None
        if not self._replication.is_hot(num_uses, MIN_USES_OF_WORKERS):
            return "cold"
        view = self._membership.view()
        same_kv = np.zeros(view.num_rows, dtype=np.bool_)
        alike = [one.worker_id for one in view.workers if self._membership.layout_of(one.worker_id) == blocks.layout]
        same_kv[view.rows_of(alike)] = True
        target = next_holder(view, request, placement, same_kv)
        if target is None or target.num_blocks > len(blocks.keys):  # blocks of an answer are not counted as a prefix
            return "here"
        worker, key = view.worker(target.row), int(short_keys([blocks.keys[target.num_blocks - 1]])[0])
        num_bytes = target.num_missing * blocks.layout.block_bytes
        decision = self._replication.decide(worker.worker_id, key, num_bytes, now_s)
        if decision == "copy":
            holders = best_sources(view, target.row, request, 1.0, 0.0, _NUM_TRIES * MAX_SOURCES)
            tries = [holders[first : first + MAX_SOURCES] for first in range(0, len(holders), MAX_SOURCES)]
            sources = [self._membership.worker_sources(some, request.cached_blocks) for some in tries]
            fingerprint = self._membership.model_fingerprint
            prompts = [copy_prompt(fingerprint, blocks, target.num_blocks, some) for some in sources if some]
            if prompts:
                self._request(_WorkerCopy(worker.address, prompts))
        return decision

    def bring(self, source: Member, target: Member, blocks: PromptBlocks, now_s: float) -> CopyDecision | None:
        """Requests a copy of what one worker has to another that is likely to need it next. Returns as `consider`."""
        can_copy = source.identity.can_fetch and target.identity.can_fetch
        if self._replication is None or not blocks.keys or not can_copy:
            return None
        keys, num_blocks = short_keys(blocks.keys), len(blocks.keys)
        num_missing = num_blocks - int(self._membership.index.match(keys)[target.holder])
        num_bytes = num_missing * blocks.layout.block_bytes
        decision = self._replication.decide(target.worker_id, int(keys[-1]), num_bytes, now_s)
        if decision == "copy":
            holder = KVSource(address=source.identity.address, kind=KVSource.WORKER, num_blocks=num_blocks)
            prompt = copy_prompt(self._membership.model_fingerprint, blocks, num_blocks, [holder])
            self._request(_WorkerCopy(target.identity.address, [prompt]))
        return decision

    @property
    def is_idle(self) -> bool:
        """Whether all copies have been requested."""
        return not self._num_pending

    async def ask_all(self) -> None:
        """Requests copies, some at once, forever."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_AT_ONCE):
                tasks.create_task(self._ask_in_turn())

    async def _ask_in_turn(self) -> None:
        while True:
            copy = await self._waiting.get()
            try:
                await copy.ask(self._credential)
            except HalfmoonError as error:
                self.num_copies["failed"] += 1
                log.info("prefix_copy.failed", extra={"target": copy.target, "reason": error.message})
            else:
                self.num_copies["asked"] += 1
                log.info("prefix_copy.asked", extra={"target": copy.target})
            finally:
                self._num_pending -= 1

    def _request(self, copy: _StoreCopy | _WorkerCopy) -> None:
        try:
            self._waiting.put_nowait(copy)
        except asyncio.QueueFull:
            self.num_copies["dropped"] += 1
        else:
            self._num_pending += 1
