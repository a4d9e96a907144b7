"""Moves a running answer to another decode worker, while it goes on: its blocks first, and then the answer itself.

The new worker loads whole blocks from the present one ahead of time. Just after another block is whole, it computes the
tokens behind it while the present one decodes on, until it lacks two or three. Then the answer changes over as a
failover does, and the step that its client waits for is hardly longer than any other. It does so just behind a token:
between two, what the present worker has of its running step would be lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from halfmoon.errors import HalfmoonError, NotFound
from halfmoon.kv.owner import KVOwner
from halfmoon.pb.prefill_pb2 import KVSource
from halfmoon.policy.placement.move import SHORT_TAIL, tail_tokens, whole_blocks
from halfmoon.policy.values import Placement
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.prefix_replication import PromptBlocks, copy_prompt
from services.gateway.cluster.token_router import Event, Moving
from services.gateway.cluster.worker import Worker
from services.gateway.routing.hot_spots import HotSpotWatch
from services.gateway.routing.request_routing import RequestRouting

log = logging.getLogger(__name__)

_COPY_S = 30.0  # deadline of one copy
_LOOK_S = 1.0  # between looks for a worker with room
_NEAR_BLOCKS = 1  # blocks that may be computed instead of being loaded
_NUM_TRIES = 3  # copies that may fail
_FEW_TOKENS = 2  # that are not worth computing ahead: as many come meanwhile
_NUM_ROUNDS = 3  # of computing ahead, where that takes so long that many tokens come meanwhile
_LATE_GAPS = 2.0  # a token that takes so many usual gaps is not waited for: the answer may be paused


@dataclass(frozen=True, slots=True)
class DecodeMoves:
    """Begins moves. Owns nothing."""

    cluster: Cluster
    routing: RequestRouting
    hot_spots: HotSpotWatch

    def begin(self, source: Worker, put: Callable[[Event], None], target: Placement | None = None) -> DecodeMove:
        """Prepares a move away from `source`; `put` takes the event that ends the present attempt.

        With a `target`, the answer moves there or stays; without one, to any worker, until `source` has left.
        """
        move = DecodeMove(self.cluster, self.routing, source, put, target)
        move.task = self.cluster.spawn(move.run())
        return move


class DecodeMove:
    """Owns the preparation of one answer's move: where to, how many blocks are there, and the task that does it."""

    def __init__(
        self,
        cluster: Cluster,
        routing: RequestRouting,
        source: Worker,
        put: Callable[[Event], None],
        target: Placement | None,
    ) -> None:
        self._cluster = cluster
        self._routing = routing
        self._source = source
        self._put = put
        self._block_tokens = source.member.identity.layout.block_tokens
        self._target = target
        self._only = None if target is None else target.decode.worker_id
        self._num_copied = 0  # leading blocks that the target has, or would rather compute
        self._num_there = 0  # leading tokens whose KV it has
        self._num_failed = 0
        self._block_ended = asyncio.Event()
        self._token_came = asyncio.Event()
        self.loaded_tokens = 0
        self.task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is prepared any more."""
        return self.task is None or self.task.done()

    def note_token(self) -> None:
        """Notes that the answer has another token."""
        self._token_came.set()
        if self._tail == 1:
            self._block_ended.set()

    def cancel(self) -> None:
        """Ends the preparation."""
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Ends the present attempt once the answer can go on elsewhere. Leaves it where it is if that does not pay."""
        try:
            outcome = await self._prepare()
            if outcome == "moved":
                await self._next_token()
        except HalfmoonError as error:
            log.warning("move.failed", extra={"worker_id": self._source.member.worker_id, "reason": error.message})
            outcome = "failed"
        self._routing.note_move(outcome, is_hot=self._only is not None)
        if outcome == "moved" and self._target is not None:
            self._put(Moving(self._target, self._from_source, self.loaded_tokens, self._num_there))

    async def _prepare(self) -> str:
        """Returns what became of it, one of the reasons of the decision `move`."""
        most_tail = SHORT_TAIL // 2  # before a block has ended; behind one, more only if copying takes so long
        while (self._source.member.is_leaving or self._only is not None) and not self._source.gone.done():
            if self._source.member.is_leaving:
                self._only = None
            if self._routing.room_tokens <= self._block_tokens:
                return "ends_soon"
            async with self._source.move_turns:
                self._choose_target()
                if self._only is not None and (self._target is None or self._target.decode.worker_id != self._only):
                    return "stays"
                target = self._target
                is_there = target is not None and await self._is_there(target, most_tail)
            if target is not None and is_there and await self._has_caught_up(target):
                return "moved"
            if self._num_failed >= _NUM_TRIES:
                return "not_loaded"
            if self._target is None:
                await self._cluster.router.pause(_LOOK_S, until=self._cluster.until_changed())
            else:
                most_tail = SHORT_TAIL
                if not self._has_just_ended_block:
                    self._block_ended.clear()
                    await self._block_ended.wait()
        return "stays"

    async def _next_token(self) -> None:
        """Waits for a token, which comes within a usual gap where the answer is not held up."""
        self._token_came.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LATE_GAPS * (self._routing.output.progress.mean_arrival_gap_s or 0.0)):
                await self._token_came.wait()

    @property
    def _has_just_ended_block(self) -> bool:
        """Whether a block ended while others were copied: it alone is left to copy."""
        is_behind = whole_blocks(self._num_tokens, self._block_tokens) == self._num_copied + 1
        return is_behind and self._tail <= SHORT_TAIL // 2

    def _choose_target(self) -> None:
        """Another worker than before only if that one no longer takes answers."""
        before, self._target = self._target, self._routing.move_target(self._source.member, self._target)
        if before is None or self._target is None or before.decode.worker_id != self._target.decode.worker_id:
            self._num_copied = self._num_there = 0

    async def _is_there(self, target: Placement, most_tail: int) -> bool:
        """Has the target load what it lacks, and returns whether a tail of at most `most_tail` tokens is left then."""
        num_blocks = whole_blocks(self._num_tokens, self._block_tokens)
        if num_blocks > self._num_copied:
            num_held = num_blocks
            try:
                await self._copy(target, num_blocks)
            except NotFound:  # it has them already, or would rather compute them
                num_held = min(self._routing.held_blocks(target.decode.holder), num_blocks)
                if num_blocks - max(self._num_copied, num_held) > _NEAR_BLOCKS:
                    self._num_failed += 1
                    return False
            except HalfmoonError as error:
                self._note_failed(target, error)
                return False
            self._num_copied = num_blocks
            self._num_there = max(self._num_there, num_held * self._block_tokens)
        has_all = whole_blocks(self._num_tokens, self._block_tokens) == self._num_copied
        return has_all and self._tail <= most_tail

    async def _has_caught_up(self, target: Placement) -> bool:
        """Has the target compute what lies behind the whole blocks, while the answer goes on, until it lacks little.

        What a worker does not keep, as of the release before, or with vLLM, it computes when the answer is there.
        Returns False if the target failed.
        """
        for _ in range(_NUM_ROUNDS):
            if self._num_tokens - self._num_there <= _FEW_TOKENS:
                break
            await self._next_token()  # in the middle of a step, a token less would be computed
            num_tokens = self._num_tokens
            try:
                await self._copy(target, None)
            except NotFound:
                break
            except HalfmoonError as error:
                self._note_failed(target, error)
                return False
            self._num_there = num_tokens
        return True

    def _note_failed(self, target: Placement, error: HalfmoonError) -> None:
        log.info("move.copy_failed", extra={"target": target.decode.worker_id, "reason": error.message})
        self._num_failed += 1

    async def _copy(self, target: Placement, num_blocks: int | None) -> None:
        """Has the target load the leading blocks. Raises what the worker raises, NotFound if it loads nothing.

        num_blocks: None: it also computes what lies behind them. Raises NotFound then if it keeps whole blocks only.
        """
        worker, output = self._cluster.worker(target.decode.worker_id), self._routing.output
        owner = KVOwner(output.tenant.name, output.tenant.kv_bytes or 0)
        layout = self._source.member.layout
        blocks = PromptBlocks((), layout, output.tenant_salt, owner, self._routing.token_ids)
        fingerprint = self._cluster.membership.model_fingerprint
        prompt = copy_prompt(fingerprint, blocks, num_blocks, [self._from_source], output.priority)
        async with worker.peer.stream(worker.prefill.Prefill, prompt, deadline_s=_COPY_S) as events:
            async for event in events:
                self.loaded_tokens += event.first_token.num_loaded_tokens
                return  # the call ends a step later

    @property
    def _from_source(self) -> KVSource:
        num_blocks = whole_blocks(self._num_tokens, self._block_tokens)
        address = self._source.member.identity.address
        return KVSource(address=address, kind=KVSource.WORKER, num_blocks=num_blocks)

    @property
    def _num_tokens(self) -> int:
        return self._routing.num_tokens

    @property
    def _tail(self) -> int:
        return tail_tokens(self._num_tokens, self._block_tokens)
