"""Plans with KV or weights on the host: proposed where memory is short and targets loose, and started as planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from halfmoon.config.worker import WorkerConfig
from halfmoon.errors import InvalidRequest
from halfmoon.plan.layout import Layout, Parallelism, WorkerKind, WorkerSet
from halfmoon.plan.layout_trial import unit_spec
from halfmoon.plan.plan_file import parse_plan, plan_text
from halfmoon.plan.planning import make_plan
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.search.feasible import NoLayout, feasible_models, options
from halfmoon.sim.cluster.spec_file import read_cluster
from halfmoon.sim.latency_sources.host_workers import HostShare
from tests.plan.planning_problems import ONE, problem, rated

HOST_BYTES = 64 << 30
ON_HOST = WorkerKind("h100", Parallelism(1, 1), HostShare(HOST_BYTES))


def test_workers_that_decode_may_have_kv_on_the_host_and_prefill_workers_not() -> None:
    asked = problem(gpus_per_node=2, host_bytes_per_gpu=HOST_BYTES)
    models = feasible_models(asked)
    assert models[ON_HOST].kv_tokens > models[ONE].kv_tokens
    assert models[WorkerKind("h100", Parallelism(2, 1), HostShare(2 * HOST_BYTES))].host is not None
    assert not any(any(kind.host) for kind in models if kind.parallelism.pipeline > 1)
    roles = {option.role for option in options(asked, models) if option.kind.host.kv_bytes}
    assert roles == {"decode", "both"}
    assert not any(any(kind.host) for kind in feasible_models(problem(gpus_per_node=2)))


def test_a_plan_proposes_the_host_where_the_device_holds_no_request() -> None:
    request = PlanRequest(
        "qwen2.5-32b", "h100", "in=24000,out=64", 30.0, 2.0, gpus_per_node=1, num_requests=20
    )  # fmt: skip
    with pytest.raises(NoLayout, match="the longest request is 24,064 tokens long"):
        make_plan(request, 1)
    result = make_plan(replace(request, host_bytes_per_gpu=HOST_BYTES), 1)
    best = result.plan.best[0].layout
    assert [workers.kind.host.kv_bytes for workers in best.sets] == [HOST_BYTES]
    assert str(best) == "1 both TP1 with 64 GiB KV on the host"
    assert yaml.safe_load(result.file_text)["cluster"]["workers"][0]["offload_bytes"] == HOST_BYTES


def test_a_plan_with_kv_on_the_host_is_simulated_and_started_as_written(tmp_path: Path) -> None:
    asked = problem(host_bytes_per_gpu=HOST_BYTES)
    layout = Layout((WorkerSet("prefill", ONE, 1), WorkerSet("decode", ON_HOST, 1)))
    text = plan_text(asked, "llama-3-8b", {"h100": "roofline:llama-3-8b"}, rated(layout))
    prefill, decode = parse_plan(text, tmp_path / "plan.yaml").cluster.workers
    assert "--offload-kv" not in prefill.arguments
    given = dict(zip(decode.arguments[::2], decode.arguments[1::2], strict=True))
    named = {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
    config = WorkerConfig(**named)
    assert (config.offload_kv, config.offload_bytes, config.offload_schedule) == ("host", HOST_BYTES, "throughput")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(yaml.safe_load(text)["cluster"]))
    read = read_cluster(cluster).groups[1]
    assert read.latency == unit_spec(asked, feasible_models(asked), layout).groups[1].latency


def test_a_model_that_does_not_fit_is_planned_with_weights_on_the_host(tmp_path: Path) -> None:
    request = PlanRequest(
        "llama-3-70b", "h100", "in=1000,out=64", 30.0, 4.0, gpus_per_node=1, num_requests=20
    )  # fmt: skip
    with pytest.raises(NoLayout, match="does not fit on 1 x h100"):
        make_plan(request, 1)
    with pytest.raises(NoLayout, match="does not fit on 1 x h100"):
        make_plan(replace(request, host_weight_bytes_per_gpu=8 << 30), 1)
    result = make_plan(replace(request, host_weight_bytes_per_gpu=256 << 30), 1)
    workers = result.plan.best[0].layout.sets[0]
    share = workers.kind.host.weights
    assert 0.4 < share <= 1.0
    assert str(workers.kind) == f"TP1 with {share:.0%} of the weights on the host"
    planned = parse_plan(result.file_text, tmp_path / "plan.yaml").cluster.workers[0]
    arguments = dict(zip(planned.arguments[::2], planned.arguments[1::2], strict=True))
    assert float(arguments["--offload-weights"]) == share
    assert "--offload-kv" not in arguments
    assert WorkerConfig(offload_weights=arguments["--offload-weights"]).offload_weights == share
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(yaml.safe_load(result.file_text)["cluster"]))
    assert read_cluster(cluster).groups[0].latency.host is not None


def test_a_model_that_fits_keeps_its_weights_on_the_devices() -> None:
    asked = problem(gpus_per_node=2, host_weight_bytes_per_gpu=HOST_BYTES)
    assert not any(kind.host.weights for kind in feasible_models(asked))


def test_host_memory_that_no_worker_can_use_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="leave out --host-kv"):
        problem(gpu="cpu", host_bytes_per_gpu=HOST_BYTES)
    with pytest.raises(InvalidRequest, match="leave out --host-weights"):
        problem(gpu="cpu", host_weight_bytes_per_gpu=HOST_BYTES)
    for of in ("host_bytes_per_gpu", "host_weight_bytes_per_gpu"):
        with pytest.raises(InvalidRequest, match="0 bytes at least"):
            problem(**{of: -1})
