"""Which layouts fit which nodes, and how the simulator gets them."""

from __future__ import annotations

import pytest

from halfmoon.plan.layout import Layout, Parallelism, WorkerSet, unit_spec
from halfmoon.plan.question import default_rules
from halfmoon.sim.cluster import Targets
from halfmoon.sim.distserve import DistServeCoefficients
from halfmoon.sim.hardware import device


def pair(prefill: tuple[int, int, int], decode: tuple[int, int, int], units: int = 1, *, paired: bool = True) -> Layout:
    sets = tuple(
        WorkerSet(role, Parallelism(tp, pp), num)  # type: ignore[arg-type]
        for role, (tp, pp, num) in (("prefill", prefill), ("decode", decode))
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
        (pair((4, 1, 3), (4, 1, 1), paired=False), 2, 8, True),
        (pair((4, 1, 3), (4, 1, 2), paired=False), 2, 8, False),
    ],
)
def test_what_fits(layout: Layout, nodes: int, gpus_per_node: int, does_fit: bool) -> None:
    assert layout.fits(nodes, gpus_per_node) is does_fit


def test_paired_workers_share_a_node_and_others_do_not() -> None:
    source, gpu = DistServeCoefficients("opt-13b"), device("a100-80g")
    layout = pair((2, 1, 2), (1, 1, 1))
    known = {one: source.model(None, *one) for one in (Parallelism(2, 1), Parallelism(1, 1))}
    rules = default_rules(gpu, 8, source)
    spec = unit_spec(layout, known, rules, Targets(), 8, gpu.price_per_hour)
    apart = unit_spec(pair((2, 1, 2), (1, 1, 1), paired=False), known, rules, Targets(), 8)
    assert spec.nodes == [0, 0, 0]
    assert apart.nodes == [0, 0, 1]
    assert spec.num_devices == layout.num_gpus == 5
    assert spec.price_per_hour == pytest.approx(5 * gpu.price_per_hour)
    assert str(pair((2, 1, 2), (1, 2, 1), 3)) == "3 x (2 prefill TP2 + 1 decode TP1xPP2), paired"
