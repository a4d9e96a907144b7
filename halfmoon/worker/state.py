"""State shared by the servicers of one worker: routes, identity, counters, and whether it accepts new work."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from halfmoon.engine.step_result import StepResult
from halfmoon.errors import Cancelled, Incompatible, InvalidRequest, StalePlacement
from halfmoon.kv.keys import adapter_of
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb import gateway_pb2, types_pb2
from halfmoon.rpc.transport.estimate import LinkEstimate
from halfmoon.worker.membership.block_feed import CachedBlocks
from halfmoon.worker.membership.compute_rate import ComputeRate
from halfmoon.worker.membership.decode_peers import DecodePeers
from halfmoon.worker.membership.worker_role import WorkerRole
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.servicers.kept_answers import KeptAnswers
from halfmoon.worker.servicers.token_streams import TokenStreams
from halfmoon.worker.serving_engine import ServingEngine
from halfmoon.worker.sharing.shared_prompts import SharedPrompts
from halfmoon.worker.store.chain_queue import ChainQueue
from halfmoon.worker.store.source_links import SourceLinks

_NUM_REMEMBERED = 10_000
_MAX_TIMINGS = 64  # in one report


class WorkerState:
    """Owns the flags and counters of one worker. Event-loop thread only."""

    def __init__(
        self,
        identity: gateway_pb2.WorkerIdentity,
        layout: KVLayout,
        metrics: WorkerMetrics,
        chains: ChainQueue | None = None,
        decode_peers: DecodePeers | None = None,
        kept: KeptAnswers | None = None,
        sources: SourceLinks | None = None,
        stream_interval_s: float = 0.0,
    ) -> None:
        """chains: receives prompts whose blocks the store may lack; None without a store.

        decode_peers: whom prompts may be handed over to; None: anybody. sources: whom KV may be loaded from.
        stream_interval_s: see `TokenStreams`.
        """
        self.identity = identity
        self.role = WorkerRole(identity)
        self.layout = layout
        self.router = TokenStreams(kept=kept, interval_s=stream_interval_s)
        self.draining = False
        self.num_calls = 0  # that work on requests now
        self.cached_blocks = CachedBlocks()
        self.chains = chains or ChainQueue(0)
        self.decode_peers = decode_peers or DecodePeers(is_open=True)
        self.sources = sources or SourceLinks()
        self.compute_rate = ComputeRate()
        self.shared_prompts = SharedPrompts()
        self._metrics = metrics
        self._cancelled: OrderedDict[str, None] = OrderedDict()  # so that KV still in transit is refused
        self._num_loads = 0
        self._num_prefill_tokens = 0
        self._num_output_tokens = 0
        self._num_preempted = 0
        self._steps: deque[tuple[float, StepResult]] = deque(maxlen=_MAX_TIMINGS)  # (ended_s, result)

    def check_can_serve(
        self, generation: types_pb2.Generation, *roles: types_pb2.Role.ValueType, epoch: int | None = None
    ) -> None:
        """Raises StalePlacement, InvalidRequest, Incompatible or Cancelled unless this work can be accepted.

        `roles`: those that do such work, apart from `both`; `epoch`: that of `WorkerRole` under which it came. Work
        that was accepted is finished, so later steps of it call `check_not_cancelled` alone.
        """
        if self.draining:
            raise StalePlacement("this worker is draining")
        self.role.check(epoch, *roles)
        if not generation.request_id:
            raise InvalidRequest("a generation needs a request id", param="request_id")
        if generation.model_fingerprint != self.identity.model_fingerprint:
            raise Incompatible(
                f"this worker serves {self.identity.model} ({self.identity.model_fingerprint[:12]}), "
                f"the request is for {generation.model_fingerprint[:12]}"
            )
        adapter = adapter_of(generation.tenant_salt)
        if adapter and adapter not in self.identity.adapter_fingerprints:
            raise Incompatible(f"this worker has no adapter {adapter[:12]}: start all workers with the same --lora")
        self.check_not_cancelled(generation)

    def check_not_cancelled(self, generation: types_pb2.Generation) -> None:
        """Raises Cancelled if the request was cancelled before its work arrived here."""
        if generation.request_id in self._cancelled:
            raise Cancelled("the request was cancelled before its work arrived here")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts a call that works on a request, also where the engine does not know of it: draining waits for it."""
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    def remember_cancelled(self, request_id: str) -> None:
        """Refuses work of this request that still arrives."""
        self._cancelled[request_id] = None
        while len(self._cancelled) > _NUM_REMEMBERED:
            self._cancelled.popitem(last=False)

    def on_step(self, result: StepResult) -> None:
        """Handles one step; called by the engine."""
        self._num_prefill_tokens += result.num_prefill_tokens
        self._num_output_tokens += len(result.outputs)
        self._num_preempted += result.num_preempted
        self._metrics.observe_step(result)
        self._note_timing(result)
        self.cached_blocks.change(result.stored_keys, result.evicted_keys)
        self.chains.offer(result.chains)
        self.compute_rate.observe(result)
        self.router.note_begun(result.num_cached_tokens, result.began_s)
        self.router.note_chunks(result.num_computed_tokens, result.began_s, result.ended_s)
        self.router.deliver(result.outputs)

    def note_prompt(self, num_tokens: int, num_cached: int, num_loaded: int, num_from_workers: int = 0) -> None:
        """Counts a prompt's tokens by source: prefix cache, store, other workers (a part of the loaded), computed."""
        num_from_workers = min(num_from_workers, num_loaded)
        sources = {
            "cache": num_cached,
            "store": num_loaded - num_from_workers,
            "worker": num_from_workers,
            "computed": num_tokens - num_cached - num_loaded,
        }
        for source, count in sources.items():
            self._metrics.store.restored_tokens.labels(source).inc(count)

    def load(
        self,
        engine: ServingEngine,
        links: Mapping[str, LinkEstimate],
        inbound: Iterable[gateway_pb2.LinkSpeed] = (),
    ) -> gateway_pb2.WorkerLoad:
        """Builds the next load report. links: speeds by the receiver's address; inbound: of loads from holders."""
        stats = engine.stats_now()  # does not wait for the step's end: a heartbeat must not wait for a long step
        self._num_loads += 1
        self._metrics.observe_stats(stats)
        steps, self._steps = self._steps, deque(maxlen=_MAX_TIMINGS)
        reported_s = now_s()
        return gateway_pb2.WorkerLoad(
            sequence=self._num_loads,
            num_running=stats.num_running,
            num_prefilling=stats.num_prefilling,
            num_waiting=stats.num_waiting + stats.num_paused,  # those have blocks, but no place
            num_reserved=stats.num_reserved,
            num_held=stats.num_held,
            free_blocks=stats.num_free_blocks,
            draining=self.draining,
            num_prefill_tokens_total=self._num_prefill_tokens,
            num_output_tokens_total=self._num_output_tokens,
            num_preempted_total=self._num_preempted,
            waiting_prefill_tokens=stats.num_waiting_tokens,
            context_tokens=stats.decode_context_tokens,
            steps=[_timing(step, reported_s - ended_s) for ended_s, step in steps],
            links=[
                gateway_pb2.LinkSpeed(
                    address=address, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s
                )
                for address, link in links.items()
            ]
            + list(inbound),
            decisions=self._metrics.decisions(),
            role=self.role.role,
            role_epoch=self.role.epoch,
            role_age_s=self.role.age_s(reported_s),
        )

    def _note_timing(self, result: StepResult) -> None:
        if not result.is_empty:
            self._steps.append((now_s(), result))


def _timing(step: StepResult, ended_before_s: float) -> gateway_pb2.StepTiming:
    return gateway_pb2.StepTiming(
        batch=step.num_decode_seqs,
        context_tokens=step.decode_context_tokens,
        seconds=step.duration_s - step.layer_wait_s,
        prefill_tokens=step.num_prefill_tokens,
        prefill_pairs=step.num_prefill_pairs,
        ended_before_s=ended_before_s,
        drafts=step.num_drafts,
        right_drafts=step.num_right_drafts,
    )


def now_s() -> float:
    """This process's clock for arrivals and durations."""
    return time.monotonic()
