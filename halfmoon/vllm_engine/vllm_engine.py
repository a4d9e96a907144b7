"""A `ServingEngine` that lets vLLM compute. Its KV comes and goes through memory shared with our connector."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from halfmoon.background import cancelled
from halfmoon.engine.engine_stats import EngineStats
from halfmoon.engine.kv_memory.coded_copies import read_encoded, write_decoded
from halfmoon.engine.kv_memory.kv_access import KVAccess
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.engine.request import CONSTRAINT_TOKEN_ID, ERROR_TOKEN_ID, EngineRequest, FinishReason, TokenOutput
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.step_result import BlockChain, StepResult
from halfmoon.errors import InvalidRequest, NoCapacity, NotFound, Unavailable
from halfmoon.kv.codec import Codec
from halfmoon.kv.device_bytes import KVPlace, KVSource
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.keys import adapter_of
from halfmoon.kv.kv_layout import KVDtype
from halfmoon.vllm_engine.block_events import BlockNames
from halfmoon.vllm_engine.messages import Ended, KVOrder, NotDrawn, Report, Saved, Stepped
from halfmoon.vllm_engine.prefix_loading import PrefixLoading
from halfmoon.vllm_engine.sampling import vllm_sampling
from halfmoon.vllm_engine.shared_blocks import SharedBlocks
from halfmoon.vllm_engine.staging import StagingMemory
from halfmoon.vllm_engine.step_results import StepResults
from halfmoon.vllm_engine.token_source import Drawn, Prompt, TokenSource

log = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_COPY_THREADS = 2
_RETRY_MS = 200


@dataclass(slots=True)
class _Entry:
    """One present request."""

    sequence: Sequence
    use: int
    on_kv: OnKV | None = None
    task: asyncio.Task[None] | None = None
    is_with_vllm: bool = False
    has_begun: bool = False
    loading: PrefixLoading | None = None
    saved: dict[int, Saved] = field(default_factory=dict)  # the newest report of each rank


class VllmEngine:
    """Owns the requests by id. Event-loop thread only.

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
    ) -> None:
        """limits: of vLLM. drain: handles the reports that have been sent by now.

        root: the parent of a tenant's first block keys, from its salt; fingerprint: of the model; step_tokens: most
        prompt tokens of a step.
        """
        self.layout = memory.layout
        self.fingerprint = fingerprint
        self.step_tokens = self.chunk_tokens = step_tokens
        self.computes_while_loading = False  # vLLM computes behind a prefix that is whole
        self.layer_loading: None = None
        self._source = source
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._on_death = on_death
        self._drain = drain
        self._names = BlockNames(root, self.layout.block_tokens)
        self._num_ranks = num_ranks
        self._kv = KVAccess(KVArena(self.layout, memory.num_blocks, memory.kv.dtype, "cpu", memory=memory.kv))
        self._blocks = SharedBlocks(memory, root, num_ranks)
        self._results = StepResults(on_step)
        self._entries: dict[str, _Entry] = {}
        self._num_uses = 0
        self._num_free = limits.num_blocks  # of vLLM's blocks, as of the last step
        self._aborting: set[asyncio.Task[None]] = set()
        self._dead: BaseException | None = None
        self._copies = ThreadPoolExecutor(_NUM_COPY_THREADS, thread_name_prefix="kv-copy")

    async def __aenter__(self) -> VllmEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dead = self._dead or RuntimeError("the engine was closed")
        for entry in tuple(self._entries.values()):
            if entry.task is not None:
                await cancelled(entry.task)
        await asyncio.to_thread(self._copies.shutdown)

    async def add(self, request: EngineRequest, on_kv: OnKV | None = None, order: RestoreOrder | None = None) -> None:
        """See `AsyncEngine.add`. With an order, vLLM gets the request once no block of it is awaited."""
        sampling = vllm_sampling(request, self._eos_token_ids, len(request.output_token_ids))
        entry = self._admit(request, on_kv)
        num_blocks = self.layout.num_blocks(len(entry.sequence.token_ids))
        if on_kv is None and order is None and not self._blocks.has_room(num_blocks):
            num_blocks = 0  # nobody needs its KV here
        self._blocks.check_fits(num_blocks)
        if order is not None:
            entry.loading = PrefixLoading(order, self.layout.block_tokens)
            entry.sequence.restore = entry.loading.blocks
        entry.task = asyncio.create_task(self._compute(entry, sampling, num_blocks))
        self._entries[request.request_id] = entry

    async def reserve(self, request: EngineRequest, on_kv: OnKV | None = None) -> int:
        """See `AsyncEngine.reserve`. What vLLM's cache evicts before the start is computed then."""
        entry = self._admit(request, on_kv)
        num_blocks = self.layout.num_blocks(len(entry.sequence.token_ids))
        self._blocks.check_fits(num_blocks)
        if not self._blocks.has_room(num_blocks) or num_blocks > self.stats_now().num_free_blocks:
            raise NoCapacity("this decode worker has no room for another prompt now", retry_after_ms=_RETRY_MS)
        entry.sequence.blocks = self._blocks.take(entry.use, num_blocks)
        entry.sequence.num_cached = self._names.depth(entry.sequence.token_ids, request.tenant_salt)
        entry.sequence.state = "reserved"
        self._entries[request.request_id] = entry
        return entry.sequence.num_cached

    async def start(self, request_id: str, first_token_id: int, *, is_private: bool = False) -> None:
        """See `AsyncEngine.start`."""
        entry = self._find(request_id)
        sequence = entry.sequence
        if sequence.state != "reserved":
            raise NotFound(f"request {request_id} is not reserved here")
        self._limits.check_token_ids((first_token_id,), "first_token_id")
        num_tokens = len(sequence.token_ids)
        order = KVOrder(request_id, entry.use, tuple(sequence.blocks), num_tokens, load_from=sequence.num_cached)
        sequence.token_ids.append(first_token_id)
        if not sequence.num_cached and not is_private:
            sequence.num_computed = num_tokens
            self._blocks.insert(sequence)
        with sequence.kv_lock:
            sequence.state = "running"
        if sequence.finish_reason(self._eos_token_ids) is not None:
            await self.cancel(request_id)
            raise InvalidRequest("the first token ends the request; there is nothing to decode", param="first_token_id")
        entry.on_kv = None
        sampling = vllm_sampling(sequence.request, self._eos_token_ids, sequence.num_output)
        entry.task = asyncio.create_task(self._generate(entry, sampling, order, is_private=is_private))

    async def cancel(self, request_id: str) -> bool:
        """See `AsyncEngine.cancel`."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        await asyncio.to_thread(_remove, entry.sequence)  # waits for a copy
        if entry.on_kv is not None:
            entry.on_kv(None)
        if entry.is_with_vllm:
            await self._source.abort(request_id)
        else:
            if entry.task is not None:
                await cancelled(entry.task)
            self._blocks.give_back(entry.use)
        return True

    async def kv_write(
        self,
        request_id: str,
        layer_start: int,
        layer_end: int,
        token_start: int,
        num_tokens: int,
        payload: KVSource,
        codec: Codec = Codec.RAW,
        dtype: KVDtype | None = None,
    ) -> None:
        """See `AsyncEngine.kv_write`."""
        sequence = self._find(request_id).sequence
        write = partial(self._kv.write, sequence, layer_start, layer_end, token_start, num_tokens)
        shape = self.layout.shape(layer_end - layer_start, num_tokens)
        await self._copy(partial(write_decoded, write, self.layout, shape, payload, codec, dtype))

    async def kv_read(
        self,
        request_id: str,
        layer_start: int,
        layer_end: int,
        token_start: int,
        num_tokens: int,
        out: KVPlace | None = None,
        codec: Codec = Codec.RAW,
    ) -> memoryview:
        """See `AsyncEngine.kv_read`."""
        sequence = self._find(request_id).sequence
        read = partial(self._kv.read, sequence, layer_start, layer_end, token_start, num_tokens)
        shape = self.layout.shape(layer_end - layer_start, num_tokens)
        return await self._copy(partial(read_encoded, read, self.layout, shape, out, codec))

    async def load_block(self, request_id: str, block: int, payload: KVSource) -> None:
        """See `AsyncEngine.load_block`."""
        await self._copy(partial(self._kv.load, self._find(request_id).sequence, block, self.layout, payload))

    def note_loaded(self, request_id: str, loaded: SequenceOf[int], given_up: SequenceOf[int] = ()) -> None:
        """See `AsyncEngine.note_loaded`."""
        entry = self._entries.get(request_id)
        if entry is None or entry.loading is None or entry.loading.is_over:
            return
        entry.loading.note(loaded, given_up)
        self._note_loading(entry, entry.loading)

    async def move_fence(self, request_id: str, fence: int) -> int:
        """See `AsyncEngine.move_fence`."""
        entry = self._find(request_id)
        if entry.loading is None:
            raise NotFound(f"request {request_id} awaits no blocks")
        fence = entry.loading.move_fence(fence)
        self._note_loading(entry, entry.loading)
        return fence

    @asynccontextmanager
    async def cached(self, keys: SequenceOf[bytes]) -> AsyncIterator[list[int]]:
        """See `AsyncEngine.cached`: of the shared memory, which has the last prompts."""
        with self._blocks.held(keys) as blocks:
            yield blocks

    async def read_block(self, block: int, layers: range | None = None) -> memoryview:
        """See `AsyncEngine.read_block`."""
        return await self._copy(partial(self._kv.read_block, block, self.layout, layers))

    def check_open(self) -> None:
        """See `AsyncEngine.check_open`."""
        if self._dead is not None:
            raise Unavailable(f"vLLM does not compute any more: {self._dead}")

    def stats_now(self) -> EngineStats:
        """See `AsyncEngine.stats_now`. Cached blocks count as free and are not counted apart."""
        states = [entry.sequence.state for entry in self._entries.values()]
        reserved = sum(
            len(entry.sequence.blocks) for entry in self._entries.values() if entry.sequence.state == "reserved"
        )
        return EngineStats(
            num_blocks=self._limits.num_blocks,
            num_free_blocks=max(0, self._num_free - reserved),
            num_cached_blocks=0,
            num_running=states.count("running"),
            num_waiting=states.count("waiting"),
            num_reserved=states.count("reserved"),
            num_held=states.count("held"),
            num_waiting_tokens=sum(
                entry.sequence.num_uncomputed for entry in self._entries.values() if entry.sequence.state == "waiting"
            ),
        )

    @property
    def num_free_staging_blocks(self) -> int:
        """Blocks of the shared memory that nobody uses."""
        return self._blocks.num_free

    def die(self, reason: BaseException) -> None:
        """Ends everything: vLLM is gone."""
        if self._dead is None:
            self._dead = reason
            self._on_death(reason)

    def handle(self, report: Report) -> None:
        """Takes a report of the connector."""
        match report:
            case Saved():
                self._note_saved(report)
            case Ended():
                if self._blocks.has_left(report):
                    entry = self._entries.get(report.request_id)
                    if entry is None or entry.use != report.use or entry.on_kv is None:
                        self._blocks.give_back(report.use)
                    else:
                        entry.is_with_vllm = False
            case Stepped():
                self._note_step(report)
            case NotDrawn():
                self._note_not_drawn(report)

    def note_blocks(self, events: Iterable[Any] | None) -> None:
        """Takes events of vLLM's prefix cache; None: some were lost."""
        self._results.put_blocks(self._names.forget() if events is None else self._names.apply(events))

    def _admit(self, request: EngineRequest, on_kv: OnKV | None) -> _Entry:
        self.check_open()
        if request.request_id in self._entries:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        self._num_uses += 1
        sequence = Sequence(request, self._num_uses)
        self._limits.check(sequence)
        return _Entry(sequence, self._num_uses, on_kv)

    def _find(self, request_id: str) -> _Entry:
        entry = self._entries.get(request_id)
        if entry is None:
            raise NotFound(f"request {request_id} is not here")
        return entry

    async def _compute(self, entry: _Entry, sampling: Mapping[str, Any], num_blocks: int) -> None:
        """Computes a prompt, once there is room for the KV that is to be read."""
        sequence, loading = entry.sequence, entry.loading
        if num_blocks:
            sequence.blocks = await self._blocks.room(entry.use, num_blocks)
        order = KVOrder(sequence.request_id, entry.use, tuple(sequence.blocks))
        if num_blocks:
            order = replace(order, save_tokens=len(sequence.token_ids))
        if loading is not None:
            self._note_loading(entry, loading)
            first, last = await loading.useful_tokens()
            order = replace(order, load_from=first, load_tokens=last) if last > first else order
        await self._generate(entry, sampling, order)

    def _note_loading(self, entry: _Entry, loading: PrefixLoading) -> None:
        """Reports loaded blocks, once there is room for them."""
        if entry.sequence.blocks:
            loading.report()
            self._tell_written(entry, Written())

    async def _generate(
        self, entry: _Entry, sampling: Mapping[str, Any], order: KVOrder, *, is_private: bool = False
    ) -> None:
        sequence, request = entry.sequence, entry.sequence.request
        salt = f"private {secrets.token_hex(16)}" if is_private else request.tenant_salt.hex()
        prompt = Prompt(
            request.request_id,
            list(sequence.token_ids),
            dict(sampling),
            order,
            request.priority,
            salt,
            adapter_of(request.tenant_salt),
        )
        entry.is_with_vllm = True
        try:
            async with aclosing(self._source.generate(prompt)) as stream:
                async for drawn in stream:
                    self._drain()  # what is written, and when the step began, is known before its token
                    self._take_tokens(entry, drawn)
        except InvalidRequest as error:  # vLLM has never had it
            log.warning("request.refused_by_vllm", extra={"request_id": request.request_id, "reason": error.message})
            entry.is_with_vllm = False
            self._take_tokens(entry, Drawn((), is_failed=True))
        except Unavailable as error:
            self.die(error)
        except Exception:
            log.exception("request.failed_in_vllm", extra={"request_id": request.request_id})
            self._take_tokens(entry, Drawn((), is_failed=True))

    def _take_tokens(self, entry: _Entry, drawn: Drawn) -> None:
        sequence = entry.sequence
        request_id = sequence.request_id
        for token in drawn.tokens:
            if sequence.state in ("removed", "held"):
                return
            position = sequence.num_output
            if entry.on_kv is not None and sequence.written.num_tokens < len(sequence.token_ids):
                drawn = Drawn((), is_failed=True)  # its KV is wanted and did not come
                break
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append(token.token_id)
            reason = sequence.finish_reason(self._eos_token_ids)
            self._results.put_output(TokenOutput(request_id, token.token_id, position, reason, token.logprobs))
            if sequence.request.prefill_only:
                sequence.state = "held"
            elif reason is not None:
                self._forget(entry)
            else:
                sequence.state = "running"
        if drawn.is_failed and sequence.state not in ("removed", "held"):
            self._results.put_output(TokenOutput(request_id, ERROR_TOKEN_ID, sequence.num_output, "error"))
            self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        """Drops a request that has ended by itself."""
        entry.sequence.state = "removed"
        self._entries.pop(entry.sequence.request_id, None)
        entry.on_kv = None  # its output says it
        if not entry.is_with_vllm:
            self._blocks.give_back(entry.use)

    def _note_saved(self, report: Saved) -> None:
        entry = self._entries.get(report.request_id)
        if entry is None:
            return
        entry.saved[report.rank] = report
        if len(entry.saved) < self._num_ranks:
            return
        reports = entry.saved.values()
        written = Written(
            min(report.num_tokens for report in reports),
            min(report.end for report in reports),
            min(report.num_layers for report in reports),
        )
        entry.sequence.num_computed = max(entry.sequence.num_computed, written.num_tokens)
        sequence = entry.sequence
        if written.num_tokens == len(sequence.token_ids) and self._blocks.insert(sequence):
            keys, request = tuple(sequence.block_keys[: sequence.num_known_blocks]), sequence.request
            self._results.put_chain(BlockChain(request.request_id, keys, request.tenant_salt, request.owner))
        self._tell_written(entry, written)

    def _tell_written(self, entry: _Entry, written: Written) -> None:
        if entry.loading is not None:
            written = written._replace(loaded=tuple(entry.loading.runs(written.num_tokens)))
        entry.sequence.written = written
        if entry.on_kv is not None:
            entry.on_kv(written)

    def _note_not_drawn(self, report: NotDrawn) -> None:
        """Ends a request with the reason for which our sampler, inside vLLM, drew no token."""
        entry = self._entries.get(report.request_id)
        if entry is None or entry.sequence.state == "held":
            return
        reason: FinishReason = "constraint" if report.is_constraint else "error"
        token_id = CONSTRAINT_TOKEN_ID if report.is_constraint else ERROR_TOKEN_ID
        self._results.put_output(TokenOutput(report.request_id, token_id, entry.sequence.num_output, reason))
        self._forget(entry)
        aborting = asyncio.create_task(self._source.abort(report.request_id))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)

    def _note_step(self, step: Stepped) -> None:
        self._num_free = step.num_free_blocks
        num_cached_tokens = {}
        for name, (num_before, _) in step.prefill_tokens.items():
            entry = self._entries.get(name)
            if entry is not None and not entry.has_begun:
                entry.has_begun = True
                num_cached_tokens[name] = num_before - (entry.loading.num_loaded_tokens if entry.loading else 0)
        self._results.put_step(step, num_cached_tokens)

    async def _copy(self, call: Callable[[], T]) -> T:
        self.check_open()
        return await asyncio.get_running_loop().run_in_executor(self._copies, call)


def _remove(sequence: Sequence) -> None:
    with sequence.kv_lock:
        sequence.state = "removed"
