"""Every metric of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halfmoon.ledger.ledger import Ledger
from halfmoon.policy.models.refinement import ErrorFigures
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from services.gateway.cluster.member import Member
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.prefix_replication import PrefixCopies
from services.gateway.telemetry.recent_telemetry import POOL_DECISIONS, RecentTelemetry
from services.gateway.telemetry.tenant_metrics import TenantMetrics
from services.gateway.telemetry.vllm_metrics import VllmMetrics, VllmRequestMetrics

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)

_WORKER_GAUGES: dict[str, tuple[str, Callable[[Member], float]]] = {
    "num_running": ("Requests in the running batch", lambda one: one.load.num_running),
    "num_waiting": ("Requests queued", lambda one: one.load.num_waiting),
    "num_reserved": ("Requests whose KV is on its way there", lambda one: one.load.num_reserved),
    "num_held": ("Prefilled requests whose KV is not handed over yet", lambda one: one.load.num_held),
    "free_blocks": ("KV blocks free", lambda one: one.load.free_blocks),
    "waiting_prefill_tokens": (
        "Prompt tokens accepted and not computed",
        lambda one: one.load.waiting_prefill_tokens,
    ),
    "total_blocks": ("KV blocks", lambda one: one.identity.total_blocks),
    "tokens_per_step": (
        "Tokens that a decode step gives a sequence of late: above 1 where guessed tokens are right",
        lambda one: one.latency.speculation.tokens_per_step,
    ),
    "role_epoch": ("How often the worker's role was changed", lambda one: one.role_epoch),
}


class GatewayMetrics:
    """Owns the gateway's registry."""

    def __init__(
        self,
        membership: Membership,
        ledger: Ledger,
        telemetry: RecentTelemetry,
        copies: PrefixCopies,
        model_name: str,
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self.rpc = RpcMetrics(registry)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        latency = partial(Histogram, buckets=_LATENCY_S, registry=registry)
        gap = partial(Histogram, buckets=_GAP_S, registry=registry)
        self.requests = counter(
            "halfmoon_gateway_requests", "HTTP generation requests ended", ["endpoint", "status", "http_status"]
        )
        self.in_flight = gauge("halfmoon_gateway_requests_in_flight", "Generation requests running")
        self.ttft_seconds = latency("halfmoon_gateway_ttft_seconds", "Arrival to first token")
        self.tbt_seconds = gap(
            "halfmoon_gateway_tbt_seconds", "Gap between two tokens; those that share a message share its wait"
        )
        self.tpot_seconds = gap("halfmoon_gateway_tpot_seconds", "Mean gap between a request's tokens")
        self.queue_seconds = latency(
            "halfmoon_gateway_queue_seconds", "Wait at the first prefill worker until computing began"
        )
        self.e2e_seconds = latency("halfmoon_gateway_e2e_seconds", "Arrival to last token")
        self.prompt_tokens = counter("halfmoon_gateway_prompt_tokens", "Prompt tokens")
        self.cached_tokens = counter("halfmoon_gateway_cached_tokens", "Prompt tokens not computed again")
        self.output_tokens = counter("halfmoon_gateway_output_tokens", "Tokens generated")
        self.draft_tokens = counter("halfmoon_gateway_draft_tokens", "Tokens that workers guessed of answers")
        self.right_draft_tokens = counter(
            "halfmoon_gateway_right_draft_tokens", "Of these, those that were what was drawn"
        )
        self.retries = counter("halfmoon_gateway_retries", "Attempts after the first at a request")
        self.refusals = counter("halfmoon_gateway_refusals", "Requests that admission refused", ["qos_class", "reason"])
        self.tenants = TenantMetrics(registry)
        self.vllm_requests = VllmRequestMetrics(model_name, registry)
        self.connections = gauge("halfmoon_gateway_connections", "HTTP connections open")
        self._connections_full = counter(
            "halfmoon_gateway_connections_full",
            "HTTP connections that came when a bound was reached",
            ["bound", "outcome"],
        )
        registry.register(_Workers(membership))
        registry.register(_Predictions(membership, telemetry))
        self._register_counts(ledger, telemetry, copies)
        registry.register(VllmMetrics(model_name, membership, self._vllm_histograms(), self._vllm_counters()))

    def _register_counts(self, ledger: Ledger, telemetry: RecentTelemetry, copies: PrefixCopies) -> None:
        """Registers what these objects count themselves."""
        for counts in (
            _Counts(
                "halfmoon_gateway_store_copies",
                "Hot prefixes that a store, or without stores a worker, was to copy from others",
                ["outcome"],
                lambda: (((outcome,), count) for outcome, count in copies.num_copies.items()),
            ),
            _Counts(
                "halfmoon_gateway_pool_decisions",
                "Decisions by reason: both workers of a placement, where its prefix is to come from, whether the "
                "decode worker computes the prompt or restores a failover (kept_...), whether a prefix is copied",
                ["decision", "reason"],
                lambda: (
                    ((decision, reason), telemetry.pool_decisions[decision, reason])
                    for decision, reasons in POOL_DECISIONS.items()
                    for reason in reasons
                ),
            ),
            _Counts(
                "halfmoon_gateway_peer_offers",
                "Requests that would be refused, by the peer gateway that they were offered to and what became of that",
                ["peer", "outcome"],
                telemetry.peer_offers.items,
            ),
            _Counts(
                "halfmoon_gateway_prefill_devices",
                "Prompts placed, by the device of the worker that was to compute them",
                ["device"],
                lambda: (((device,), count) for device, count in telemetry.prefill_devices.items()),
            ),
            _Counts(
                "halfmoon_gateway_shared_prompts",
                "Prompts that several prefill workers were to compute together, by how many",
                ["degree"],
                lambda: (((str(degree),), count) for degree, count in telemetry.prefill_degrees.items()),
            ),
            _Counts(
                "halfmoon_ledger_rows",
                "Ledger rows by what became of them",
                ["result"],
                lambda: ((("written",), ledger.rows.num_written), (("lost",), ledger.rows.num_lost)),
            ),
        ):
            self.registry.register(counts)
        waiting = Gauge("halfmoon_ledger_rows_waiting", "Ledger rows that are not written yet", registry=self.registry)
        waiting.set_function(lambda: len(ledger.rows))

    def note_connections_full(self, bound: str, is_admitted: bool) -> None:
        """Counts a connection beyond a bound: it took the place of an idle one, or was refused."""
        self._connections_full.labels(bound, "oldest closed" if is_admitted else "refused").inc()

    def _vllm_histograms(self) -> dict[str, Histogram]:
        return {
            "time_to_first_token_seconds": self.ttft_seconds,
            "inter_token_latency_seconds": self.tbt_seconds,
            "time_per_output_token_seconds": self.tbt_seconds,  # its name in older dashboards
            "request_time_per_output_token_seconds": self.tpot_seconds,
            "request_queue_time_seconds": self.queue_seconds,
            "e2e_request_latency_seconds": self.e2e_seconds,
        }

    def _vllm_counters(self) -> dict[str, Counter]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_cached": self.cached_tokens,
            "generation_tokens": self.output_tokens,
            "prefix_cache_queries": self.prompt_tokens,
            "prefix_cache_hits": self.cached_tokens,
            "spec_decode_num_draft_tokens": self.draft_tokens,
            "spec_decode_num_accepted_tokens": self.right_draft_tokens,
        }


class _Workers(Collector):
    """Reads the members' loads at scrape time; a worker that left has no line."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def collect(self) -> Iterator[Metric]:
        members = self._membership.members()
        for name, (text, value) in _WORKER_GAUGES.items():
            family = GaugeMetricFamily(f"halfmoon_worker_{name}", text, labels=["worker_id", "role"])
            for member in members:
                family.add_metric([member.worker_id, member.role], value(member))
            yield family


class _Predictions(Collector):
    """Reads how wrong the latest predictions were: of requests, and of each worker's steps."""

    def __init__(self, membership: Membership, telemetry: RecentTelemetry) -> None:
        self._membership = membership
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        labels = ["kind", "worker_id"]
        error = GaugeMetricFamily(
            "halfmoon_prediction_error_ratio", "Mean of |predicted / measured - 1|, latest 500", labels=labels
        )
        bias = GaugeMetricFamily(
            "halfmoon_prediction_bias_ratio", "Mean of predicted / measured - 1, latest 500", labels=labels
        )
        for kind, worker_id, figures in self._figures():
            if figures.num:
                error.add_metric([kind, worker_id], figures.mean_absolute)
                bias.add_metric([kind, worker_id], figures.bias)
        yield error
        yield bias

    def _figures(self) -> Iterator[tuple[str, str, ErrorFigures]]:
        for kind, errors in self._telemetry.prediction_errors.items():
            yield kind, "", errors.figures()
        for member in self._membership.members():
            for model, figures in member.latency.errors.items():
                yield model, member.worker_id, figures


class _Counts(Collector):
    """Reads counts at scrape time that another object owns, by the values of their labels."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        counts: Callable[[], Iterable[tuple[Sequence[str], int]]],
    ) -> None:
        self._name, self._text, self._labels, self._counts = name, text, labels, counts

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._counts():
            family.add_metric(values, count)
        yield family
