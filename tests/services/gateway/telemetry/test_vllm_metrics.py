"""What a dashboard made for vLLM finds: figures of requests, steps and workers under vLLM's names."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from halfmoon.pb.gateway_pb2 import StepTiming, WorkerLoad
from services.gateway.cluster.engine_totals import EngineTotals
from tests.services.gateway.fakes import LAYOUT, MODEL, Fleet, Script, running_fleet


async def scraped(fleet: Fleet) -> dict[tuple[str, str], float]:
    """Values by name (without `vllm:`) and by the one label beside the model's name."""
    found = {}
    for family in text_string_to_metric_families(await fleet.metrics()):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
                assert sample.labels["model_name"] == MODEL
                found[sample.name.removeprefix("vllm:"), ",".join(labels.values())] = sample.value
    return found


async def test_each_output_is_counted_with_its_tokens_times_and_end(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello", cached_tokens=3))
        await fleet.client.completions.create(model=MODEL, prompt="abcdefgh", max_tokens=3, n=2)
        await fleet.client.completions.create(model=MODEL, prompt="abcdefgh")
        figures = await scraped(fleet)
    assert figures["request_success_total", "length"] == 2
    assert figures["request_success_total", "stop"] == 1
    assert figures["request_success_total", "abort"] == 0
    assert figures["request_prompt_tokens_sum", ""] == 24
    assert figures["request_prefill_kv_computed_tokens_sum", ""] == 15
    assert figures["request_generation_tokens_sum", ""] == 3 + 3 + 6
    assert figures["request_max_num_generation_tokens_sum", ""] == 3 + 6
    assert figures["request_params_n_sum", ""] == 3
    assert figures["request_params_max_tokens_sum", ""] == 3 + 3 + 16
    assert figures["request_prefill_time_seconds_sum", ""] == 1.5
    assert figures["request_decode_time_seconds_count", ""] == 3
    assert figures["request_inference_time_seconds_sum", ""] >= 1.5
    assert figures["prompt_tokens_by_source_total", "local_compute"] == 10
    assert figures["prompt_tokens_by_source_total", "local_cache_hit"] == 6
    assert figures["prompt_tokens_by_source_total", "external_kv_transfer"] == 0
    assert figures["prompt_tokens_cached_total", ""] == 6
    assert figures["spec_decode_num_draft_tokens_total", ""] == 0


PANELS = {
    "E2E request latency": "e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum "
    "e2e_request_latency_seconds_count",
    "token throughput": "prompt_tokens_total generation_tokens_total",
    "inter token latency": "inter_token_latency_seconds_bucket time_per_output_token_seconds_bucket "
    "time_per_output_token_seconds_sum request_time_per_output_token_seconds_bucket",
    "scheduler state": "num_requests_running num_requests_waiting",
    "TTFT": "time_to_first_token_seconds_bucket time_to_first_token_seconds_sum",
    "cache utilization": "kv_cache_usage_perc gpu_cache_usage_perc",
    "prompt length": "request_prompt_tokens_bucket",
    "generation length": "request_generation_tokens_bucket",
    "finish reason": "request_success_total",
    "queue time": "request_queue_time_seconds_sum",
    "prefill and decode time": "request_prefill_time_seconds_sum request_decode_time_seconds_sum",
    "max generation tokens": "request_max_num_generation_tokens_sum",
    "prefix cache": "prefix_cache_queries_total prefix_cache_hits_total",
    "configuration": "cache_config_info",
}
"""Metrics that the panels of vLLM's own Grafana dashboards ask for, `vllm:` left out."""


async def test_no_panel_of_vllms_dashboard_is_empty(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        await fleet.client.completions.create(model=MODEL, prompt="abc")
        names = {name for name, _ in await scraped(fleet)}
    assert {panel: set(asked.split()) - names for panel, asked in PANELS.items() if set(asked.split()) - names} == {}


async def test_a_refused_request_is_no_output(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession() as session:
        async with session.post(f"{fleet.http}/v1/completions", json={"prompt": "a", "n": 0}) as response:
            assert response.status == 400
        figures = await scraped(fleet)
    assert not any(value for (name, _), value in figures.items() if name.startswith("request_") and "_sum" in name)


async def test_workers_loads_and_layout(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("p0", "prefill")
        await fleet.add("d0", "decode")
        worker.loads.put_nowait(WorkerLoad(sequence=1, free_blocks=50, num_waiting=2, num_reserved=1))
        await fleet.until_told(lambda: fleet.cluster.membership.members()[0].load.num_waiting == 2)
        figures = await scraped(fleet)
        async with aiohttp.ClientSession() as session:
            headers = []
            for form in ("text", "JSON", "other"):
                asked = {"endpoint-load-metrics-format": form}
                async with session.get(f"{fleet.http}/v1/models", headers=asked) as response:
                    headers.append(response.headers.get("endpoint-load-metrics"))
    assert figures["num_requests_waiting_by_reason", "capacity"] == 2
    assert figures["num_requests_waiting_by_reason", "deferred"] == 1
    assert figures["num_requests_waiting", ""] == 3
    assert figures["cache_config_info", f"{LAYOUT.block_tokens},{LAYOUT.dtype},200"] == 1
    assert figures["iteration_tokens_total_bucket", "+Inf"] == 0
    assert headers[0] == "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
    assert json.loads(str(headers[1]).removeprefix("JSON "))["named_metrics"]["num_requests_waiting"] == 3
    assert headers[2] is None


def test_steps_are_counted_by_their_tokens_and_preemptions_since_the_first_report() -> None:
    totals = EngineTotals()
    first = WorkerLoad(
        sequence=1, num_preempted_total=7, steps=[StepTiming(batch=1), StepTiming(prefill_tokens=20_000)]
    )
    totals.note(WorkerLoad(), first)
    totals.note(first, WorkerLoad(sequence=2, num_preempted_total=9, steps=[StepTiming(batch=2, prefill_tokens=6)]))
    assert (totals.num_preempted, totals.step_tokens) == (2, 20_009)
    assert (totals.num_steps[0], totals.num_steps[1], totals.num_steps[-1]) == (1, 1, 1)


@pytest.mark.parametrize("total", [0, 3])
def test_a_worker_that_counts_anew_takes_nothing_back(total: int) -> None:
    totals = EngineTotals()
    totals.note(WorkerLoad(sequence=9, num_preempted_total=9), WorkerLoad(sequence=1, num_preempted_total=total))
    assert totals.num_preempted == 0
