"""Metrics under vLLM's names, where they mean the same: dashboards made for vLLM show this gateway, too."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from halfmoon.ledger.models import RequestRow
from services.gateway.cluster.engine_totals import STEP_TOKENS
from services.gateway.cluster.member import Member
from services.gateway.cluster.membership import Membership
from services.gateway.request import GatewayRequest, RequestOutput

_TOKENS = [mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5)]
_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # vLLM's
_CHOICES = (1, 2, 5, 10, 20)
_REASONS = {"cancelled": "abort", "error": "error"}


class VllmMetrics(Collector):
    """Reads the gateway's own figures at scrape time, and adds vLLM's label `model_name`. Owns nothing."""

    def __init__(
        self,
        model_name: str,
        membership: Membership,
        histograms: Mapping[str, Histogram],
        counters: Mapping[str, Counter],
    ) -> None:
        """`histograms` and `counters` are the gateway's own, by vLLM's names without `vllm:`."""
        self._label = {"model_name": model_name}
        self._membership = membership
        self._histograms = histograms
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """The gateway's metrics, renamed, and the sums of the workers' loads."""
        for name, histogram in self._histograms.items():
            yield self._renamed(name, histogram)
        for name, counter in self._counters.items():
            (ours,) = counter.collect()
            yield self._counter(name, ours.documentation, ours.samples[0].value)
        totals, members = self._membership.totals, self._membership.members()
        yield self._counter("num_preemptions", "Sequences that lost their blocks to others", totals.num_preempted)
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens of one engine step, as far as workers report them",
            labels=[*self._label],
        )
        buckets = zip([*map(str, STEP_TOKENS), "+Inf"], accumulate(totals.num_steps), strict=True)
        family.add_metric([*self._label.values()], list(buckets), totals.step_tokens)
        yield family
        yield self._gauge("num_requests_running", "Requests in the running batches", _total(members, "num_running"))
        waiting = waiting_by_reason(members)
        text = "Requests queued at the workers, or whose KV is on its way there"
        yield self._gauge("num_requests_waiting", text, sum(waiting.values()))
        text = "Likewise, by reason: capacity (queued) or deferred (its KV is on its way)"
        yield self._gauge("num_requests_waiting_by_reason", text, waiting, "reason")
        text = "KV blocks in use on all workers, 0 to 1"
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the latter in older dashboards
            yield self._gauge(name, text, kv_usage(members))
        yield self._cache_config(members)

    def _cache_config(self, members: Sequence[Member]) -> Metric:
        blocks: Counts[tuple[str, str]] = Counts()
        for member in members:
            layout = member.layout
            blocks[str(layout.block_tokens), layout.dtype] += member.identity.total_blocks
        labels = [*self._label, "block_size", "cache_dtype", "num_gpu_blocks"]
        family = GaugeMetricFamily("vllm:cache_config_info", "1 for each layout of KV, with its blocks", labels=labels)
        for (block_tokens, dtype), num_blocks in blocks.items():
            family.add_metric([*self._label.values(), block_tokens, dtype, str(num_blocks)], 1)
        return family

    def _renamed(self, name: str, histogram: Histogram) -> Metric:
        (ours,) = histogram.collect()
        family = Metric(f"vllm:{name}", ours.documentation, "histogram")
        for sample in ours.samples:
            if not sample.name.endswith("_created"):
                suffix = sample.name.removeprefix(ours.name)
                family.add_sample(f"vllm:{name}{suffix}", {**sample.labels, **self._label}, sample.value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=[*self._label])
        family.add_metric([*self._label.values()], value)
        return family

    def _gauge(self, name: str, text: str, value: float | Mapping[str, float], label: str | None = None) -> Metric:
        """With `label`, one value for each of its values."""
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=[*self._label, *([label] if label else [])])
        for of, number in (value if isinstance(value, Mapping) else {"": value}).items():
            family.add_metric([*self._label.values(), *([of] if label else [])], number)
        return family


class VllmRequestMetrics:
    """Owns what is counted of each request under vLLM's names alone. Outputs count singly, as vLLM's requests do."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            whole = Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=registry)
            return whole.labels(model_name)

        def counter(name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
            whole = Counter(f"vllm:{name}", text, ["model_name", label], registry=registry)
            return {value: whole.labels(model_name, value) for value in values}

        self._ended = counter(
            "request_success",
            "Outputs that ended, and why: stop, length, abort (the client left) or error",
            "finished_reason",
            ("stop", "length", "abort", "error"),
        )
        self._by_source = counter(
            "prompt_tokens_by_source",
            "Prompt tokens by where their KV came from: computed, the prefix cache, or a store or another worker",
            "source",
            ("local_compute", "local_cache_hit", "external_kv_transfer"),
        )
        self._prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of an output", _TOKENS)
        self._computed = histogram("request_prefill_kv_computed_tokens", "Prompt tokens that were computed", _TOKENS)
        self._generation_tokens = histogram("request_generation_tokens", "Tokens of an output", _TOKENS)
        self._most_tokens = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest output", _TOKENS
        )
        self._n = histogram("request_params_n", "The parameter n", _CHOICES)
        self._max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens, or what fits", _TOKENS)
        self._prefill = histogram("request_prefill_time_seconds", "First forward pass to first token", _SECONDS)
        self._decode = histogram("request_decode_time_seconds", "First to last token", _SECONDS)
        self._inference = histogram("request_inference_time_seconds", "First forward pass to last token", _SECONDS)

    def observe(self, request: GatewayRequest, row: RequestRow) -> None:
        """Takes a request that ended, unless it was rejected."""
        if row.status == "rejected":
            return
        self._n.observe(request.generation.num_choices)
        self._most_tokens.observe(max((output.text.num_tokens for output in request.outputs), default=0))
        for outputs in request.by_prompt:
            progress = outputs[0].progress
            if progress.ttft_s is not None:
                self._by_source["local_compute"].inc(progress.prompt_tokens - progress.cached_tokens)
                self._by_source["local_cache_hit"].inc(progress.cached_tokens - progress.loaded_tokens)
                self._by_source["external_kv_transfer"].inc(progress.loaded_tokens)
            for output in outputs:
                self._ended[output.text.finish_reason or _REASONS.get(row.status, "length")].inc()
                self._observe_output(output)

    def _observe_output(self, output: RequestOutput) -> None:
        progress = output.progress
        self._prompt_tokens.observe(progress.prompt_tokens)
        self._generation_tokens.observe(output.text.num_tokens)
        self._max_tokens.observe(output.sampling.max_tokens)
        if progress.ttft_s is None:
            return
        self._computed.observe(progress.prompt_tokens - progress.cached_tokens)
        decode_s = sum(progress.gaps_s)
        self._decode.observe(decode_s)
        if progress.prefill_s is not None:
            self._prefill.observe(progress.prefill_s)
            self._inference.observe(progress.prefill_s + decode_s)


def waiting_by_reason(members: Sequence[Member]) -> dict[str, float]:
    """Requests that wait at the workers, by vLLM's reasons."""
    return {"capacity": _total(members, "num_waiting"), "deferred": _total(members, "num_reserved")}


def kv_usage(members: Sequence[Member]) -> float:
    """The share of all workers' KV blocks that is in use."""
    blocks = sum(member.identity.total_blocks for member in members)
    return 1 - _total(members, "free_blocks") / blocks if blocks else 0.0


def _total(members: Sequence[Member], field: str) -> int:
    return sum(getattr(member.load, field) for member in members)
