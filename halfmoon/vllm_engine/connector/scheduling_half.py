"""The connector beside vLLM's scheduler: decides which tokens are copied around each step, and reports the steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from halfmoon.vllm_engine.messages import Finished, KVOrder, Stepped
from halfmoon.vllm_engine.reports import ReportSender

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens `start`..`end` of one request, in vLLM's blocks and in those of the arena."""

    order: KVOrder
    pages: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepOrders(KVConnectorMetadata):
    """What the computing halves do around one step."""

    loads: tuple[Copy, ...] = ()
    saves: tuple[Copy, ...] = ()
    late_saves: tuple[Copy, ...] = ()  # of tokens that earlier steps computed
    ended: tuple[KVOrder, ...] = ()
    released: tuple[str, ...] = ()  # vLLM's ids of requests whose pages are free after this step


class StepEnd(KVConnectorWorkerMetadata):
    """Comes back from the model's processes after each step."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepEnd:
        """One for all ranks."""
        return self


@dataclass(slots=True)
class _Followed:
    """A request with an order, as vLLM's scheduler has it."""

    order: KVOrder
    pages: list[int] = field(default_factory=list)
    num_loading: int = 0  # tokens to be loaded before its next step
    saved: int = 0  # tokens below this one are in the arena
    has_ended: bool = False  # nothing is left to be copied


@dataclass(frozen=True, slots=True)
class _Held:
    """A request that has ended, whose pages vLLM keeps until the worker has said where they go."""

    request_id: str  # vLLM's
    pages: tuple[int, ...]


class SchedulingHalf:
    """Owns which pages of vLLM's belong to requests with orders."""

    def __init__(self, reports: ReportSender, block_tokens: int) -> None:
        self.pool: BlockPool | None = None
        self._reports = reports
        self._block_tokens = block_tokens
        self._followed: dict[str, _Followed] = {}  # by vLLM's request id
        self._held: dict[int, _Held] = {}  # by use
        self._ended: list[KVOrder] = []
        self._steps: deque[Stepped] = deque()
        self._num_free = -1  # as last reported

    def num_loadable(self, request: Request, num_computed: int) -> int:
        """How many tokens behind the `num_computed` the arena has.

        A preempted request's KV is computed again, and so is everything if vLLM has evicted what was left out of the
        hand-over.
        """
        order = KVOrder.of(request.kv_transfer_params)
        if order is None or request.num_preemptions or num_computed < order.load_from:
            return 0
        num_loadable: int = min(order.load_tokens, request.num_tokens - 1) - num_computed
        return max(0, num_loadable)

    def note_load(self, request: Request, num_tokens: int) -> None:
        """Notes that vLLM has pages for this many tokens of the arena."""
        order = KVOrder.of(request.kv_transfer_params)
        if order is not None:
            followed = self._followed.setdefault(request.request_id, _Followed(order))
            followed.num_loading = num_tokens

    def step(self, output: SchedulerOutput) -> StepOrders:
        """The copies that belong to this step."""
        cached = output.scheduled_cached_reqs
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            if new.req_id in self._followed:
                self._followed[new.req_id].pages = list(new.block_ids[0])
        for request_id, pages, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            starts[request_id] = start
            followed = self._followed.get(request_id)
            if followed is not None and request_id in cached.resumed_req_ids:
                followed.pages = []
            if followed is not None and pages is not None:
                followed.pages += pages[0]
        loads, saves, late_saves = [], [], []
        for request_id, start in starts.items():
            followed = self._followed.get(request_id)
            if followed is None:
                continue
            order, pages_now = followed.order, tuple(followed.pages)
            if followed.num_loading:
                loads.append(Copy(order, pages_now, start - followed.num_loading, start))
                followed.num_loading = 0
            end = start + output.num_scheduled_tokens[request_id]
            end = min(end, order.save_tokens)
            if order.is_watched and end > followed.saved:
                saves.append(Copy(order, pages_now, followed.saved, end))
                followed.saved = end
            elif followed.saved < order.save_tokens <= start:  # its first token is not to wait for the copy
                late_saves.append(Copy(order, pages_now, followed.saved, order.save_tokens))
                followed.saved = order.save_tokens
            elif followed.saved >= order.save_tokens and not followed.has_ended:
                followed.has_ended = True
                self._ended.append(order)
        self._begin_step(output, starts)
        kept, released = self._keep()
        ended, self._ended = tuple(self._ended), []
        return StepOrders(tuple(loads), tuple(saves), (*late_saves, *kept), ended, released)

    def finish(self, request: Request, pages: Sequence[int]) -> bool:
        """Reports, once no step uses the blocks, that the request has ended. Returns whether vLLM has to hold `pages`.

        It then makes steps without tokens until they are released.
        """
        followed = self._followed.pop(request.request_id, None)
        order = KVOrder.of(request.kv_transfer_params)
        if order is None:
            return False
        if followed is None or not followed.has_ended:
            self._ended.append(order)
        if not order.is_kept:
            return False
        size = self._block_tokens
        num_whole = min(request.num_computed_tokens, request.num_tokens - 1) // size  # the last token was never run
        num_known = max(order.load_tokens, 0 if followed is None else followed.saved)
        num_whole = num_whole if num_whole > num_known // size else 0
        answer = request.all_token_ids[request.num_prompt_tokens : num_whole * size]
        self._reports.send(Finished(order.request_id, order.use, num_whole * size, tuple(answer)))
        if num_whole:
            self._held[order.use] = _Held(request.request_id, tuple(pages[:num_whole]))
        return num_whole > 0

    def _keep(self) -> tuple[tuple[Copy, ...], tuple[str, ...]]:
        """Copies of ended requests for which the worker has answered, and vLLM's ids of these requests."""
        copies, released = [], []
        for keep in self._reports.answers():
            held = self._held.pop(keep.finished_use)
            released.append(held.request_id)
            if keep.blocks:
                order = KVOrder(held.request_id, keep.use, keep.blocks)
                pages = held.pages[keep.first : keep.first + len(keep.blocks)]
                copies.append(Copy(order, pages, 0, len(pages) * self._block_tokens))
                self._ended.append(order)
        return tuple(copies), tuple(released)

    def _begin_step(self, output: SchedulerOutput, starts: Mapping[str, int]) -> None:
        counts = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        decoding = {
            request_id for request_id, made in zip(cached.req_ids, cached.num_output_tokens, strict=True) if made
        }
        decoding |= {
            new.req_id
            for new in output.scheduled_new_reqs
            if new.req_id in self._followed
            and not self._followed[new.req_id].order.save_tokens
            and 0 < self._followed[new.req_id].order.load_tokens <= new.num_computed_tokens
        }
        prefills = {
            self._followed[name].order.request_id if name in self._followed else name: (start, counts[name])
            for name, start in starts.items()
            if name not in decoding
        }
        now_s = time.monotonic()
        self._steps.append(
            Stepped(
                began_s=now_s,
                ended_s=now_s,
                prefill_tokens=prefills,
                num_decode_seqs=len(decoding),
                decode_context_tokens=sum(starts[name] + counts[name] for name in decoding),
                num_free_blocks=0 if self.pool is None else self.pool.get_num_free_blocks(),
                num_preempted=len(output.preempted_req_ids or ()),
            )
        )

    def end_step(self) -> None:
        """Reports the oldest step under way."""
        if not self._steps:
            return
        step = self._steps.popleft()
        if step.prefill_tokens or step.num_decode_seqs or step.num_free_blocks != self._num_free:
            self._num_free = step.num_free_blocks
            self._reports.send(replace(step, ended_s=time.monotonic()))
