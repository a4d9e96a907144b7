"""plan.yaml: what is written is what the simulator and `halfmoon up` read, and other files are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.plan.compose_file import compose_text
from halfmoon.plan.layout import Layout, Parallelism, WorkerKind, WorkerSet
from halfmoon.plan.layout_trial import unit_spec
from halfmoon.plan.plan_file import PlannedWorkers, parse_plan, plan_text
from halfmoon.plan.problem import default_rules
from halfmoon.plan.search.feasible import feasible_models
from halfmoon.policy.placement.conditional import ConditionalMode
from halfmoon.sim.cluster.spec_file import read_cluster
from halfmoon.sim.latency_sources.measured_profile import (
    MeasuredLimits,
    MeasuredPrefill,
    MeasuredProfile,
    MeasuredStep,
    write_profile,
)
from halfmoon.sim.latency_sources.sequence_parallel import parallel_model
from halfmoon.up.config.read import read_config
from tests.plan.planning_problems import disaggregated, problem, rated

PROBLEM = problem(num_nodes=2, gpus_per_node=8)
SEQUENCE = WorkerKind("h100", Parallelism(1, 1, 4))
MODELS = feasible_models(PROBLEM) | {SEQUENCE: parallel_model(PROBLEM.sources["h100"], "h100", 1, 1, 4)}
KINDS = st.sampled_from([WorkerKind("h100", Parallelism(tensor, pipeline)) for tensor in (1, 2) for pipeline in (1, 2)])
LAYOUTS = st.builds(
    lambda prefill, decode, nums, units, codec: Layout(
        (WorkerSet("prefill", prefill, nums[0]), WorkerSet("decode", decode, nums[1])), units, units > 1, codec
    ),
    KINDS | st.just(SEQUENCE), KINDS, st.tuples(st.integers(1, 2), st.integers(1, 2)), st.integers(1, 2),
    st.sampled_from(["raw", "int8", "int4"]),
)  # fmt: skip


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LAYOUTS)
def test_a_written_plan_starts_and_simulates_its_layout(tmp_path: Path, layout: Layout) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(PROBLEM, "llama-3-8b", {"h100": "roofline:llama-3-8b"}, rated(layout)))
    planned = parse_plan(path.read_text(), path)
    for workers in layout.sets:
        started = planned.cluster.of_role(workers.role)
        assert len(started) == layout.count(workers.role)
        assert {(one.tp, one.pp, one.sp, one.gpu) for one in started} == {(*workers.kind.parallelism, "h100")}
    assert planned.handover_codec == layout.codec
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(yaml.safe_load(path.read_text())["cluster"]))
    spec, unit = read_cluster(cluster), unit_spec(PROBLEM, MODELS, layout)
    assert spec.num_devices == layout.num_gpus
    assert spec.price_per_hour == pytest.approx(layout.price_per_hour(PROBLEM.fleet))
    assert spec.network == unit.network
    assert spec.targets == unit.targets
    per_unit = len(unit.nodes)
    if layout.is_paired:  # each unit is on its own node
        assert spec.nodes == [node for node in range(layout.num_units) for _ in range(per_unit)]
    else:
        assert spec.nodes == unit.nodes


@pytest.mark.parametrize("mode", ["failover", "auto"])
def test_a_plan_says_when_decode_workers_compute_prompts(tmp_path: Path, mode: ConditionalMode) -> None:
    asked = problem(num_nodes=2, gpus_per_node=8, conditional_disaggregation=mode)
    assert unit_spec(asked, MODELS, disaggregated()).conditional == mode
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(asked, "llama-3-8b", {"h100": "roofline:llama-3-8b"}, rated(disaggregated())))
    planned = parse_plan(path.read_text(), path)
    assert planned.gateway.conditional_disaggregation == mode
    assert read_config(path).gateway.conditional_disaggregation == mode
    assert ("HALFMOON_GATEWAY_CONDITIONAL_DISAGGREGATION: auto" in compose_text(planned)) == (mode == "auto")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(yaml.safe_load(path.read_text())["cluster"]))
    assert read_cluster(cluster).conditional == mode


def test_workers_of_a_plan_nest_steps_as_their_profile_says(tmp_path: Path) -> None:
    profile = MeasuredProfile(
        device="h100",
        kv_tokens=65_536,
        kv_bytes_per_token=23_040,
        limits=MeasuredLimits(nests_steps=True),
        prefill=tuple(MeasuredPrefill(new_tokens=one, seconds=0.001 * one) for one in (16, 256, 512)),
        step=tuple(MeasuredStep(batch=one, context_tokens=256 * one, seconds=0.01 * one) for one in (1, 2, 4)),
    )
    source = tmp_path / "profile.json"
    write_profile(source, profile)
    sources = {"h100": profile}
    asked = replace(PROBLEM, sources=sources, rules=default_rules(PROBLEM.fleet, sources))
    unit = unit_spec(asked, feasible_models(asked), disaggregated())
    cluster = tmp_path / "cluster.yaml"
    plan = yaml.safe_load(plan_text(asked, "m", {"h100": str(source)}, rated(disaggregated())))
    cluster.write_text(yaml.safe_dump(plan["cluster"]))
    assert [one.limits for one in read_cluster(cluster).groups] == [one.limits for one in unit.groups]
    assert unit.groups[0].limits.nests_steps


def test_options_are_those_of_a_worker_process() -> None:
    planned = PlannedWorkers(role="decode", tp=2, max_running=64)
    assert planned.arguments == ("--tensor-parallel", "2", "--pipeline-parallel", "1", "--max-running", "64")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 1\n", "is not a plan: the top"),
        ("model: m\n", "is not a plan: cluster: Field required"),
        ("model: m\ncluster: {workers: []}\n", "cluster.workers: Tuple should have at least 1 item"),
        ("model: m\ncluster: {workers: [{role: cook}]}\n", "cluster.workers.0.role"),
        ("model: m\nhandover_codec: zip\ncluster: {workers: [{role: both}]}\n", "handover_codec"),
        ("a: [", "cannot be read"),
        ("model: !!bool x", "cannot be read: a value does not fit its tag"),
        ("model: m\nmodel: n", "cannot be read: line 2: model was already written on line 1"),
    ],
)
def test_what_is_not_a_plan_names_the_field(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_plan(text, Path("plan.yaml"))
    assert says in caught.value.message
    assert caught.value.param == "plan"


def test_a_missing_plan_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"nowhere\.yaml cannot be read"):
        read_config(Path("nowhere.yaml"))


def test_expectations_are_those_of_the_evaluation() -> None:
    found = yaml.safe_load(plan_text(PROBLEM, "m", {"h100": "x"}, replace(rated(disaggregated()), goodput_per_s=7.25)))
    assert found["expected"] == {
        "rate_per_s": 10.0, "attainment": 0.95, "goodput_per_s": 7.25, "gpus": 2, "price_per_hour": 6.0
    }  # fmt: skip
    assert found["layout"] == "1 prefill TP1 + 1 decode TP1"


def test_batching_that_no_worker_does_is_refused() -> None:
    text = "model: x\ncluster: {workers: [{role: both, batching: %s}]}"
    assert parse_plan(text % "chunked", Path("plan.yaml")).cluster.workers[0].batching == "chunked"
    with pytest.raises(InvalidRequest, match="no worker batches prefill-first"):
        parse_plan(text % "prefill-first", Path("plan.yaml"))
