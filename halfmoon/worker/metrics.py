"""All metrics of a worker."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from halfmoon.engine.engine_stats import EngineStats
from halfmoon.engine.step_result import StepResult
from halfmoon.pb.gateway_pb2 import DecisionCount
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics

_EXPOSED_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class WorkerMetrics:
    """Owns one worker's registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self._step = histogram("halfmoon_engine_step_seconds", "One engine step", buckets=_STEP_SECONDS)
        self._prefill_tokens = counter("halfmoon_engine_prefill_tokens", "Prompt tokens computed")
        self._spread_tokens = counter(
            "halfmoon_engine_spread_tokens", "Tokens of steps in which sequence ranks shared a long prompt"
        )
        self._nested_tokens = counter(
            "halfmoon_engine_nested_tokens", "Prompt tokens computed between the layers of steps of other prompts"
        )
        self._output_tokens = counter("halfmoon_engine_output_tokens", "Tokens generated")
        drafts = counter(
            "halfmoon_engine_draft_tokens", "Guessed tokens that were computed: right, as drawn, or wrong", ["outcome"]
        )
        self._right_drafts, self._wrong_drafts = drafts.labels("right"), drafts.labels("wrong")
        self._staged = counter(
            "halfmoon_engine_staged",
            "Groups of sequences per step whose KV came from host memory: loaded, or partly recomputed",
            ["kind"],
        )
        self._staged_bytes = counter(
            "halfmoon_engine_staged_bytes", "KV and inputs copied from host memory to the device"
        )
        self._staged_link = counter("halfmoon_engine_staged_link_seconds", "Time spent copying from host memory")
        self._staged_wait = counter(
            "halfmoon_engine_staged_wait_seconds",
            "Copying time not hidden by computing; all of it if nothing was copied while computing",
        )
        self._weight_bytes = counter("halfmoon_engine_weights_loaded_bytes", "Weights copied from host memory")
        self._weight_wait = counter(
            "halfmoon_engine_weights_wait_seconds",
            "Time for which a layer waited for its weights from host memory; not measured on a GPU",
        )
        self._preemptions = counter("halfmoon_engine_preemptions", "Sequences preempted")
        self._pauses = counter("halfmoon_engine_pauses", "Answers paused for a higher class")
        self._moved_out = counter(
            "halfmoon_engine_pauses_moved_out", "Paused answers whose KV left its blocks because others needed them"
        )
        self._paused_seconds = counter("halfmoon_engine_paused_seconds", "Length of the pauses that ended")
        self.host_weights = gauge(
            "halfmoon_engine_host_weights_ratio",
            "Share of the layers whose weights are in host memory, as configured or chosen",
        )
        self._sequences = gauge("halfmoon_engine_sequences", "Sequences by state", ["state"])
        self._blocks = gauge("halfmoon_engine_blocks", "KV blocks by state", ["state"])
        self.handover_bytes = counter("halfmoon_handover_bytes", "KV bytes handed over by direction", ["direction"])
        self.handover_tokens = counter(
            "halfmoon_handover_tokens",
            "Tokens of hand-overs: sent to the decode worker, or held by it already",
            ["kind"],
        )
        self.handover_codecs = counter(
            "halfmoon_handover_codecs",
            "Hand-overs by codec and by why it was chosen: configured, measuring the link, or the quickest",
            ["codec", "reason"],
        )
        self.handover_seconds = histogram(
            "halfmoon_handover_seconds",
            "From the decode worker's ACCEPT, or the first token if that was earlier, to its DONE",
        )
        self.handover_exposed_seconds = histogram(
            "halfmoon_handover_exposed_seconds",
            "From the end of a prefill to the decode worker's DONE: transfer time not hidden by computing",
            buckets=_EXPOSED_SECONDS,
        )

        self.store = StoreMetrics(self.registry)
        self.kv_fallbacks = counter(
            "halfmoon_kv_fallbacks", "KV transports that were offered but could not be used", ["transport"]
        )

    def observe_step(self, result: StepResult) -> None:
        """Records one engine step."""
        staged = result.staged
        if not result.is_empty:
            self._step.observe(result.duration_s)
        amounts = (
            (self._prefill_tokens, result.num_prefill_tokens),
            (self._spread_tokens, result.num_spread_tokens),
            (self._nested_tokens, result.num_prefill_tokens if result.is_nested else 0),
            (self._output_tokens, len(result.outputs)),
            (self._right_drafts, result.num_right_drafts),
            (self._wrong_drafts, result.num_drafts - result.num_right_drafts),
            (self._preemptions, result.num_preempted),
            (self._pauses, result.num_paused),
            (self._moved_out, result.num_moved_out),
            (self._paused_seconds, result.paused_s),
            *((self._staged.labels(kind), num_groups) for kind, num_groups in staged.num_groups.items()),
            (self._staged_bytes, staged.link_bytes),
            (self._staged_link, staged.link_s),
            (self._staged_wait, staged.wait_s),
            (self._weight_bytes, staged.weight_bytes),
            (self._weight_wait, staged.weight_wait_s),
        )
        for counter, amount in amounts:
            if amount:  # most are 0 in most steps, and a count takes as long as all these comparisons
                counter.inc(amount)

    def decisions(self) -> list[DecisionCount]:
        """Counts of decisions about the pool of KV, by reason; those that never occurred are left out."""
        counters = {
            "restore": self.store.restore_decisions,
            "source": self.store.source_answers,
            "missed_block": self.store.missed_blocks,
            "restored_token": self.store.restored_tokens,
            "cache_read": self.store.cache_reads,
            "handover_token": self.handover_tokens,
            "handover_codec": self.handover_codecs,
            "fetch_codec": self.store.fetch_codecs,
            "stored_block": self.store.put_blocks,
        }
        return [
            DecisionCount(decision=decision, reason=" ".join(sample.labels.values()), count=int(sample.value))
            for decision, counter in counters.items()
            for family in counter.collect()
            for sample in family.samples
            if sample.name.endswith("_total") and sample.value
        ]

    def observe_stats(self, stats: EngineStats) -> None:
        """Updates the gauges; called with each load report."""
        for state in ("running", "waiting", "paused", "reserved", "held"):
            self._sequences.labels(state).set(getattr(stats, f"num_{state}"))
        self._blocks.labels("free").set(stats.num_free_blocks)
        self._blocks.labels("used").set(stats.num_blocks - stats.num_free_blocks)


class StoreMetrics:
    """Declares the metrics in a worker's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self.put_blocks = counter(
            "halfmoon_store_put_blocks",
            "Blocks of prompts by outcome: stored near or (spilled) elsewhere, there already, kept elsewhere, ...",
            ["outcome"],
        )
        self.put_chains_dropped = counter("halfmoon_store_put_chains_dropped", "Prompts not offered: too many waited")
        self.restored_tokens = counter(
            "halfmoon_restored_tokens",
            "Prompt tokens by where their KV came from: cache, store, worker (another one's cache) or computed",
            ["source"],
        )
        self.restore_decisions = counter(
            "halfmoon_restore_decisions",
            "Decisions about prompts that holders were asked for: compute, load, both, layers; shared (waits for "
            "another's load), away (own store), late (a load by layer that failed or took too long)",
            ["method"],
        )
        self.loaded_bytes = counter(
            "halfmoon_store_loaded_bytes", "KV bytes loaded, by tier of the store, or from another worker", ["tier"]
        )
        self.missed_blocks = counter(
            "halfmoon_fetch_missed_blocks",
            "Blocks asked of a store or worker and not delivered by it: evicted, slow, away, busy, failed, or unwanted",
            ["kind", "reason"],
        )
        self.fetch_codecs = counter(
            "halfmoon_fetch_codecs",
            "Holders that a restore asked for blocks over the network, by the codec it asked for and why: measuring "
            "link or codecs, or the quickest",
            ["codec", "reason"],
        )
        self.source_answers = counter(
            "halfmoon_fetch_sources",
            "Sources of requests, stores and workers: here, stale (less than the gateway believed), or given up as "
            "slow, away, busy or failed",
            ["kind", "outcome"],
        )
        self.shared_segments = counter(
            "halfmoon_shared_segments",
            "Segments of shared prompts that other workers were to compute: arrived from there, or given up and "
            "computed here",
            ["result"],
        )
        self.put_bytes = counter("halfmoon_store_put_bytes", "KV bytes sent to the store")
        self.cache_reads = counter(
            "halfmoon_cache_reads",
            "Reads of this worker's prefix cache by other workers, by outcome: served, missing or busy",
            ["outcome"],
        )
        self.cache_served_bytes = counter(
            "halfmoon_cache_served_bytes", "KV bytes of the prefix cache sent to other workers"
        )
