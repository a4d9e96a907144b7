"""Every metric of the gateway."""

from __future__ import annotations

from collections.abc import Iterator

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

WORKER_GAUGES = {
    "num_running": "Requests in the running batch",
    "num_waiting": "Requests queued",
    "num_reserved": "Requests whose KV is on its way there",
    "num_held": "Prefilled requests whose KV is not handed over yet",
    "free_blocks": "KV blocks free",
    "waiting_prefill_tokens": "Prompt tokens accepted and not computed",
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
        self.requests = Counter(
            "halfmoon_gateway_requests",
            "HTTP generation requests ended",
            ["endpoint", "status", "http_status"],
            registry=registry,
        )
        self.in_flight = Gauge("halfmoon_gateway_requests_in_flight", "Generation requests running", registry=registry)
        self.ttft_seconds = Histogram(
            "halfmoon_gateway_ttft_seconds", "Arrival to first token", buckets=_LATENCY_S, registry=registry
        )
        self.tbt_seconds = Histogram(
            "halfmoon_gateway_tbt_seconds", "Gap between two tokens", buckets=_GAP_S, registry=registry
        )
        self.tpot_seconds = Histogram(
            "halfmoon_gateway_tpot_seconds", "Mean gap between a request's tokens", buckets=_GAP_S, registry=registry
        )
        self.queue_seconds = Histogram(
            "halfmoon_gateway_queue_seconds",
            "Wait at the first prefill worker until computing began",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.e2e_seconds = Histogram(
            "halfmoon_gateway_e2e_seconds", "Arrival to last token", buckets=_LATENCY_S, registry=registry
        )
        self.prompt_tokens = Counter("halfmoon_gateway_prompt_tokens", "Prompt tokens", registry=registry)
        self.cached_tokens = Counter(
            "halfmoon_gateway_cached_tokens", "Prompt tokens not computed again", registry=registry
        )
        self.output_tokens = Counter("halfmoon_gateway_output_tokens", "Tokens generated", registry=registry)
        self.draft_tokens = Counter(
            "halfmoon_gateway_draft_tokens", "Tokens that workers guessed of answers", registry=registry
        )
        self.right_draft_tokens = Counter(
            "halfmoon_gateway_right_draft_tokens", "Of these, those that were what was drawn", registry=registry
        )
        self.retries = Counter("halfmoon_gateway_retries", "Attempts after the first at a request", registry=registry)
        self.refusals = Counter(
            "halfmoon_gateway_refusals",
            "Requests that admission refused",
            ["qos_class", "reason"],
            registry=registry,
        )
        self.tenants = TenantMetrics(registry)
        self.vllm_requests = VllmRequestMetrics(model_name, registry)
        self.connections = Gauge("halfmoon_gateway_connections", "HTTP connections open", registry=registry)
        self._connections_full = Counter(
            "halfmoon_gateway_connections_full",
            "HTTP connections that came when a bound was reached",
            ["bound", "outcome"],
            registry=registry,
        )
        registry.register(_Workers(membership))
        registry.register(_Predictions(membership, telemetry))
        registry.register(_Copies(copies))
        registry.register(_PoolDecisions(telemetry))
        registry.register(_PeerOffers(telemetry))
        registry.register(_PrefillDevices(telemetry))
        registry.register(_PrefillDegrees(telemetry))
        registry.register(_LedgerRows(ledger))
        registry.register(VllmMetrics(model_name, membership, self._vllm_histograms(), self._vllm_counters()))

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
        for field, text in WORKER_GAUGES.items():
            family = GaugeMetricFamily(f"halfmoon_worker_{field}", text, labels=["worker_id", "role"])
            for member in members:
                family.add_metric(_labels(member), getattr(member.load, field))
            yield family
        blocks = GaugeMetricFamily("halfmoon_worker_total_blocks", "KV blocks", labels=["worker_id", "role"])
        for member in members:
            blocks.add_metric(_labels(member), member.identity.total_blocks)
        yield blocks
        tokens = GaugeMetricFamily(
            "halfmoon_worker_tokens_per_step",
            "Tokens that a decode step gives a sequence of late: above 1 where guessed tokens are right",
            labels=["worker_id", "role"],
        )
        for member in members:
            tokens.add_metric(_labels(member), member.latency.speculation.tokens_per_step)
        yield tokens
        epochs = GaugeMetricFamily(
            "halfmoon_worker_role_epoch", "How often the worker's role was changed", labels=["worker_id", "role"]
        )
        for member in members:
            epochs.add_metric(_labels(member), member.role_epoch)
        yield epochs


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


class _Copies(Collector):
    """Reads the counts of copies between stores or workers."""

    def __init__(self, copies: PrefixCopies) -> None:
        self._copies = copies

    def collect(self) -> Iterator[Metric]:
        copies = CounterMetricFamily(
            "halfmoon_gateway_store_copies",
            "Hot prefixes that a store, or without stores a worker, was to copy from others",
            labels=["outcome"],
        )
        for outcome, num_copies in self._copies.num_copies.items():
            copies.add_metric([outcome], num_copies)
        yield copies


class _PoolDecisions(Collector):
    """Reads the counts of what was decided about the pool of KV."""

    def __init__(self, telemetry: RecentTelemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "halfmoon_gateway_pool_decisions",
            "Decisions by reason: both workers of a placement, where its prefix is to come from, whether the decode "
            "worker computes the prompt or restores a failover (kept_...), whether a prefix is copied",
            labels=["decision", "reason"],
        )
        for decision, reasons in POOL_DECISIONS.items():
            for reason in reasons:
                decisions.add_metric([decision, reason], self._telemetry.pool_decisions[decision, reason])
        yield decisions


class _PrefillDevices(Collector):
    """Reads the counts of prompts by the kind of device that they were sent to."""

    def __init__(self, telemetry: RecentTelemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        prompts = CounterMetricFamily(
            "halfmoon_gateway_prefill_devices",
            "Prompts placed, by the device of the worker that was to compute them",
            labels=["device"],
        )
        for device, count in self._telemetry.prefill_devices.items():
            prompts.add_metric([device], count)
        yield prompts


class _PrefillDegrees(Collector):
    """Reads the counts of shared prompts by the number of workers that computed them."""

    def __init__(self, telemetry: RecentTelemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        prompts = CounterMetricFamily(
            "halfmoon_gateway_shared_prompts",
            "Prompts that several prefill workers were to compute together, by how many",
            labels=["degree"],
        )
        for degree, count in self._telemetry.prefill_degrees.items():
            prompts.add_metric([str(degree)], count)
        yield prompts


class _PeerOffers(Collector):
    """Reads the counts of what was offered to peer gateways."""

    def __init__(self, telemetry: RecentTelemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        offers = CounterMetricFamily(
            "halfmoon_gateway_peer_offers",
            "Requests that would be refused, by the peer gateway that they were offered to and what became of that",
            labels=["peer", "outcome"],
        )
        for (peer, outcome), count in self._telemetry.peer_offers.items():
            offers.add_metric([peer, outcome], count)
        yield offers


class _LedgerRows(Collector):
    """Reads the ledger's own counts."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        rows = CounterMetricFamily("halfmoon_ledger_rows", "Ledger rows by what became of them", labels=["result"])
        rows.add_metric(["written"], self._ledger.rows.num_written)
        rows.add_metric(["lost"], self._ledger.rows.num_lost)
        yield rows
        yield GaugeMetricFamily(
            "halfmoon_ledger_rows_waiting", "Ledger rows that are not written yet", value=len(self._ledger.rows)
        )


def _labels(member: Member) -> list[str]:
    return [member.worker_id, member.role]
