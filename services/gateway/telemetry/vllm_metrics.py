"""Metrics under vLLM's names, where they mean the same: dashboards made for vLLM show this gateway, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.cluster.member import Member
from services.gateway.cluster.membership import Membership


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
            family = CounterMetricFamily(f"vllm:{name}", ours.documentation, labels=list(self._label))
            family.add_metric(list(self._label.values()), ours.samples[0].value)
            yield family
        members = self._membership.members()
        yield self._gauge("num_requests_running", "Requests in the running batches", _total(members, "num_running"))
        yield self._gauge("num_requests_waiting", "Requests queued at the workers", _total(members, "num_waiting"))
        blocks = sum(member.identity.total_blocks for member in members)
        used = 1 - _total(members, "free_blocks") / blocks if blocks else 0.0
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use on all workers, 0 to 1", used)

    def _renamed(self, name: str, histogram: Histogram) -> Metric:
        (ours,) = histogram.collect()
        family = Metric(f"vllm:{name}", ours.documentation, "histogram")
        for sample in ours.samples:
            if not sample.name.endswith("_created"):
                suffix = sample.name.removeprefix(ours.name)
                family.add_sample(f"vllm:{name}{suffix}", {**sample.labels, **self._label}, sample.value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._label))
        family.add_metric(list(self._label.values()), value)
        return family


def _total(members: Sequence[Member], field: str) -> int:
    return sum(getattr(member.load, field) for member in members)
