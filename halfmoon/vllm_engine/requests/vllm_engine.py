"""A `ServingEngine` that lets vLLM compute. Its KV comes and goes through memory shared with our connector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from halfmoon.background import cancelled
from halfmoon.engine.engine_stats import EngineStats
from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.prefix_cache import CacheChanges
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import InvalidRequest, NoCapacity, NotFound
from halfmoon.vllm_engine.frontend.block_events import BlockNames
from halfmoon.vllm_engine.frontend.sampling import vllm_sampling
from halfmoon.vllm_engine.frontend.token_source import TokenSource
from halfmoon.vllm_engine.messages import Keep, KVOrder, Report
from halfmoon.vllm_engine.requests.generation import Generation
from halfmoon.vllm_engine.requests.kept_answers import KeptAnswers
from halfmoon.vllm_engine.requests.prefix_loading import PrefixLoading
from halfmoon.vllm_engine.requests.present_requests import PresentRequest, PresentRequests
from halfmoon.vllm_engine.requests.report_handler import ReportHandler
from halfmoon.vllm_engine.requests.shared_blocks import SharedBlocks
from halfmoon.vllm_engine.requests.staged_kv import StagedKV
from halfmoon.vllm_engine.requests.step_results import StepResults
from halfmoon.vllm_engine.staging import StagingMemory

_RETRY_MS = 200


class VllmEngine(StagedKV):
    """Owns what becomes of each request. Event-loop thread only.

    A request's shared blocks are free again once it has left here and vLLM's connector touches them no more.
    """

    def __init__(
        self,
        source: TokenSource,
        memory: StagingMemory,
        limits: RequestLimits,
        eos_token_ids: frozenset[int],
        on_step: Callable[[StepResult], None],
        on_death: Callable[[BaseException], None],
        drain: Callable[[], None],
        root: Callable[[bytes], bytes],
        num_ranks: int = 1,
        fingerprint: str = "",
        step_tokens: int = 512,
        *,
        is_on_cpu: bool = False,
    ) -> None:
        """limits: of vLLM. drain: handles the reports that have been sent by now.

        root: the parent of a tenant's first block keys, from its salt; fingerprint: of the model; step_tokens: most
        prompt tokens of a step.
        """
        blocks, size = SharedBlocks(memory, root, num_ranks), memory.layout.block_tokens
        answers, results = KeptAnswers(blocks, size), StepResults(on_step)
        requests = PresentRequests(blocks, answers)
        super().__init__(memory, blocks, requests)
        self.fingerprint = fingerprint
        self.step_tokens = self.chunk_tokens = step_tokens
        self.computes_while_loading = False  # vLLM computes behind a prefix that is whole
        self.keeps_partial_blocks = False  # vLLM caches whole blocks
        self.layer_loading: None = None
        self._source = source
        self._limits = limits
        self._is_on_cpu = is_on_cpu
        self._eos_token_ids = eos_token_ids
        self._on_death = on_death
        self._names = BlockNames(root, size)
        self._results = results
        self._reports = ReportHandler(source, requests, blocks, answers, results, num_ranks, limits.num_blocks)
        self._generation = Generation(source, requests, blocks, results, eos_token_ids, drain, self.die)

    async def __aenter__(self) -> VllmEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._dead = self._dead or RuntimeError("the engine was closed")
        for entry in self._requests:
            if entry.task is not None:
                await cancelled(entry.task)
        await asyncio.to_thread(self._copies.shutdown)

    async def add(self, request: EngineRequest, on_kv: OnKV | None = None, order: RestoreOrder | None = None) -> None:
        """See `AsyncEngine.add`. With an order, vLLM gets the request once no block of it is awaited."""
        entry, sampling = self._admit(request, on_kv)
        num_blocks = self.layout.num_blocks(len(entry.sequence.token_ids))
        if on_kv is None and order is None and not self._blocks.has_room(num_blocks):
            num_blocks = 0  # nobody needs its KV here
        self._blocks.check_fits(num_blocks)
        if order is not None:
            entry.loading = PrefixLoading(order, self.layout.block_tokens)
            entry.sequence.restore = entry.loading.blocks
        entry.task = asyncio.create_task(self._generation.compute(entry, sampling, num_blocks))
        self._requests.put(entry)

    async def reserve(self, request: EngineRequest, on_kv: OnKV | None = None) -> int:
        """See `AsyncEngine.reserve`. What vLLM's cache evicts before the start is computed then."""
        entry, _ = self._admit(request, on_kv)
        num_blocks = self.layout.num_blocks(len(entry.sequence.token_ids))
        self._blocks.check_fits(num_blocks)
        if not self._blocks.has_room(num_blocks) or num_blocks > self.stats_now().num_free_blocks:
            raise NoCapacity("this decode worker has no room for another prompt now", retry_after_ms=_RETRY_MS)
        entry.sequence.blocks = self._blocks.take(entry.use, num_blocks)
        entry.sequence.num_cached = self._names.depth(entry.sequence.token_ids, request.tenant_salt)
        entry.sequence.state = "reserved"
        self._requests.put(entry)
        return entry.sequence.num_cached

    async def start(self, request_id: str, first_token_id: int, *, is_private: bool = False) -> None:
        """See `AsyncEngine.start`."""
        entry = self._requests.find(request_id)
        sequence = entry.sequence
        if sequence.state != "reserved":
            raise NotFound(f"request {request_id} is not reserved here")
        self._limits.check_token_ids((first_token_id,), "first_token_id")
        num_tokens = len(sequence.token_ids)
        blocks, num_held = tuple(sequence.blocks), sequence.num_cached
        order = KVOrder(request_id, entry.use, blocks, num_tokens, num_held, is_kept=not is_private)
        sequence.token_ids.append(first_token_id)
        if not num_held and not is_private:
            self._blocks.insert(sequence, num_tokens)
        with sequence.kv_lock:
            sequence.state = "running"
        if sequence.finish_reason(self._eos_token_ids) is not None:
            await self.cancel(request_id)
            raise InvalidRequest("the first token ends the request; there is nothing to decode", param="first_token_id")
        entry.on_kv = None
        sampling = self._sampling(sequence)
        entry.task = asyncio.create_task(self._generation.generate(entry, sampling, order))

    async def forget_prefixes(self) -> CacheChanges:
        """See `AsyncEngine.forget_prefixes`; vLLM's own events report what is gone. Shared blocks go, too."""
        await self._source.empty_cache()
        self._blocks.forget_idle()
        return CacheChanges()

    async def cancel(self, request_id: str) -> bool:
        """See `AsyncEngine.cancel`."""
        entry = self._requests.pop(request_id)
        if entry is None:
            return False
        await asyncio.to_thread(entry.remove)  # waits for a copy
        if entry.on_kv is not None:
            entry.on_kv(None)
        if entry.is_with_vllm:
            self._requests.leave(entry)
            await self._source.abort(request_id)
        else:
            if entry.task is not None:
                await cancelled(entry.task)
            self._blocks.give_back(entry.use)
        return True

    def note_loaded(self, request_id: str, loaded: SequenceOf[int], given_up: SequenceOf[int] = ()) -> None:
        """See `AsyncEngine.note_loaded`."""
        entry = self._requests.get(request_id)
        if entry is None or entry.loading is None or entry.loading.is_over:
            return
        entry.loading.note(loaded, given_up)
        entry.tell_loaded()

    async def move_fence(self, request_id: str, fence: int) -> int:
        """See `AsyncEngine.move_fence`."""
        entry = self._requests.find(request_id)
        if entry.loading is None:
            raise NotFound(f"request {request_id} awaits no blocks")
        fence = entry.loading.move_fence(fence)
        entry.tell_loaded()
        return fence

    def stats_now(self) -> EngineStats:
        """See `AsyncEngine.stats_now`. Cached blocks count as free and are not counted apart.

        vLLM counts when a step begins, and none follows the one that frees the last request's blocks: without requests
        all are free.
        """
        sequences = [entry.sequence for entry in self._requests]
        states = [sequence.state for sequence in sequences]
        is_idle = states.count("reserved") == len(states)
        num_free = self._limits.num_blocks if is_idle else self._reports.num_free_blocks
        reserved = sum(len(sequence.blocks) for sequence in sequences if sequence.state == "reserved")
        return EngineStats(
            num_blocks=self._limits.num_blocks,
            num_free_blocks=max(0, num_free - reserved),
            num_cached_blocks=0,
            num_running=states.count("running"),
            num_waiting=states.count("waiting"),
            num_reserved=states.count("reserved"),
            num_held=states.count("held"),
            num_waiting_tokens=sum(sequence.num_uncomputed for sequence in sequences if sequence.state == "waiting"),
            decode_context_tokens=sum(len(one.token_ids) for one in sequences if one.state == "running"),
        )

    def die(self, reason: BaseException) -> None:
        """Ends everything: vLLM is gone."""
        if self._dead is None:
            self._dead = reason
            self._on_death(reason)

    def handle(self, report: Report) -> Keep | None:
        """Takes a report of the connector; returns the answer to it, if there is one."""
        return self._reports.handle(report)

    def note_blocks(self, events: Iterable[Any] | None) -> None:
        """Takes events of vLLM's prefix cache; None: some were lost."""
        self._results.put_blocks(self._names.forget() if events is None else self._names.apply(events))

    def _admit(self, request: EngineRequest, on_kv: OnKV | None) -> tuple[PresentRequest, dict[str, Any]]:
        """Refuses, before any KV moves, what cannot run here. Returns the request and its sampling in vLLM's words."""
        self.check_open()
        if self._requests.get(request.request_id) is not None:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        use = self._requests.new_use()
        sequence = Sequence(request, use)
        self._limits.check(sequence)
        sampling = self._sampling(sequence)
        self._source.check(sampling)
        return PresentRequest(sequence, use, on_kv), sampling

    def _sampling(self, sequence: Sequence) -> dict[str, Any]:
        return vllm_sampling(sequence.request, self._eos_token_ids, sequence.num_output, is_on_cpu=self._is_on_cpu)
