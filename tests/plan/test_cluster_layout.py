"""Which layouts fit which nodes, and how the simulator gets them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.plan.layout import Layout, Parallelism, WorkerKind, WorkerSet
from halfmoon.plan.layout_trial import layout_network, unit_spec
from halfmoon.plan.node_pools import read_fleet
from halfmoon.plan.problem import PlanningProblem, default_rules
from halfmoon.plan.search.goodput import Goal
from halfmoon.sim.cluster.cluster_spec import SloTargets
from halfmoon.sim.cluster.kv_codecs import KvCodec
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.latency_sources.hardware import device
from halfmoon.sim.latency_sources.measured_profile import MeasuredLimits, MeasuredPrefill, MeasuredProfile, MeasuredStep
from halfmoon.sim.latency_sources.sequence_parallel import parallel_model
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths


def kind(tensor: int, pipeline: int, gpu: str = "a100-80g") -> WorkerKind:
    return WorkerKind(gpu, Parallelism(tensor, pipeline))


def pair(prefill: tuple[int, int, int], decode: tuple[int, int, int], units: int = 1, *, paired: bool = True) -> Layout:
    sets = (
        WorkerSet("prefill", kind(*prefill[:2]), prefill[2]),
        WorkerSet("decode", kind(*decode[:2]), decode[2]),
    )
    return Layout(sets, units, paired)


@pytest.mark.parametrize(
    ("layout", "nodes", "gpus_per_node", "does_fit"),
    [
        (pair((2, 1, 1), (1, 1, 1)), 1, 4, True),
        (pair((2, 1, 1), (1, 1, 1)), 1, 2, False),
        (pair((2, 1, 1), (1, 1, 1), 2), 1, 5, False),
        (pair((2, 1, 1), (1, 1, 1), 2), 1, 6, True),
        (pair((2, 2, 1), (2, 2, 1)), 2, 4, True),  # each node has one stage of both
        (pair((2, 2, 1), (2, 1, 1)), 2, 4, False),  # stages cannot be paired
        (pair((2, 2, 1), (2, 1, 1), paired=False), 2, 4, True),
        (pair((1, 8, 1), (1, 8, 1), 3), 8, 6, False),  # 3, 3 and 2 stages of each unit: no two last parts share a node
        (pair((1, 8, 1), (1, 8, 1), 3), 9, 6, True),
        (pair((1, 4, 1), (1, 4, 1), 3), 4, 6, True),  # three nodes with three stages, and one with three last ones
        (pair((4, 4, 1), (4, 1, 1), paired=False), 4, 6, False),  # a node has one stage, though 16 GPUs are three nodes
        (pair((4, 4, 1), (4, 1, 1), paired=False), 5, 6, True),
        (pair((4, 1, 3), (4, 1, 1), paired=False), 2, 8, True),
        (pair((4, 1, 3), (4, 1, 2), paired=False), 2, 8, False),
    ],
)
def test_what_fits(layout: Layout, nodes: int, gpus_per_node: int, does_fit: bool) -> None:
    assert layout.fits(read_fleet("a100-80g", nodes, gpus_per_node, {})) is does_fit


def test_each_kind_of_gpu_has_its_own_nodes() -> None:
    fleet = read_fleet("h100:1x8,a100-80g:2x4", 1, 1, {"h100": 2.5})
    sets = WorkerSet("prefill", kind(4, 1, "h100"), 2), WorkerSet("decode", kind(2, 1), 4)
    layout = Layout(sets)
    assert layout.fits(fleet)
    assert not Layout((sets[0], sets[1]._replace(num=5))).fits(fleet)
    assert not Layout(sets, is_paired=True).fits(fleet)
    assert layout.price_per_hour(fleet) == pytest.approx(8 * 2.5 + 8 * device("a100-80g").price_per_hour)
    assert str(layout) == "2 prefill h100 TP4 + 4 decode a100-80g TP2"


@pytest.mark.parametrize(
    ("text", "prices", "says"),
    [
        ("h100:2x8,h100:1x8", {}, "named twice"),
        ("h100:2", {}, "is not hardware: give GPU"),
        ("h100:0x8", {}, "at least one node"),
        ("v100:1x8", {}, "known are"),
        ("h100", {"h100": 0.0}, "price of h100 must be above 0"),
    ],
)
def test_a_fleet_that_is_none_is_explained(text: str, prices: dict[str, float], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_fleet(text, 1, 8, prices)


def test_paired_workers_share_a_node_and_others_do_not() -> None:
    source = DistServeCoefficients("opt-13b")
    fleet = read_fleet("a100-80g", 4, 8, {})
    layout = pair((2, 1, 2), (1, 1, 1))
    models = {one: parallel_model(source, None, *one.parallelism) for one in (kind(2, 1), kind(1, 1))}
    workload = synthetic_workload(named_lengths("in=512,out=64"), 10, 1.0, seed=0)
    sources = {"a100-80g": source}
    problem = PlanningProblem(sources, fleet, workload, Goal(SloTargets(1.0, 1.0)), default_rules(fleet, sources))
    spec = unit_spec(problem, models, layout)
    apart = unit_spec(problem, models, pair((2, 1, 2), (1, 1, 1), paired=False))
    assert spec.nodes == [0, 0, 0]
    assert apart.nodes == [0, 0, 1]
    assert spec.num_devices == layout.num_gpus == 5
    assert spec.price_per_hour == pytest.approx(5 * fleet.pools[0].gpu.price_per_hour)
    assert str(pair((2, 1, 2), (1, 2, 1), 3)) == "3 x (2 prefill TP2 + 1 decode TP1xPP2), paired"


def test_a_codec_sends_fewer_bytes_and_works_for_it() -> None:
    source, fleet = DistServeCoefficients("opt-13b"), read_fleet("a100-80g", 2, 8, {})
    workload = synthetic_workload(named_lengths("in=512,out=64"), 10, 1.0, seed=0)
    sources = {"a100-80g": source}
    rules = default_rules(fleet, sources, network_bytes_per_s=1e9)
    problem = PlanningProblem(sources, fleet, workload, Goal(SloTargets(1.0, 1.0)), rules)
    layout = pair((1, 1, 1), (1, 1, 1), paired=False)
    plain = layout_network(problem, layout)
    coded = layout_network(problem, replace(layout, codec="int8"))
    assert plain.bytes_per_s == coded.bytes_per_s == 1e9
    assert plain.codec_within(is_node=False) == KvCodec(1.0)
    assert coded.codec_within(is_node=False).ratio < 0.6
    assert coded.codec_within(is_node=False).encode_bytes_per_s is not None


def measured_cpu(**limits: Any) -> MeasuredProfile:
    return MeasuredProfile(
        kv_tokens=65_536,
        kv_bytes_per_token=23_040,
        limits=MeasuredLimits(max_batch_tokens=512, chunk_tokens=128, max_running=32, **limits),
        prefill=tuple(MeasuredPrefill(new_tokens=one, seconds=0.001 * one) for one in (16, 256, 512)),
        step=tuple(MeasuredStep(batch=one, context_tokens=256 * one, seconds=0.01 * one) for one in (1, 2, 4)),
    )


def test_sequences_that_are_asked_for_are_planned_with_measured_times_too() -> None:
    fleet = read_fleet("cpu", 1, 2, {})
    for asked, most, chunk in ((None, 32, 128), (8, 8, 128)):
        limits = default_rules(fleet, {"cpu": measured_cpu()}, asked).limits["both"]
        assert (limits.max_running, limits.chunk_tokens) == (most, chunk)
    assert default_rules(fleet, {"cpu": DistServeCoefficients("opt-13b")}).limits["both"].max_running == 256


def test_steps_nest_in_plans_where_all_kinds_of_workers_nest_them() -> None:
    fleet, nests, roofline = (
        read_fleet("cpu", 1, 2, {}),
        measured_cpu(nests_steps=True),
        DistServeCoefficients("opt-13b"),
    )
    assert default_rules(fleet, {"cpu": nests}).limits["prefill"].nests_steps
    assert not default_rules(fleet, {"cpu": measured_cpu()}).limits["prefill"].nests_steps
    assert not default_rules(fleet, {"cpu": nests, "h100": roofline}).limits["prefill"].nests_steps
