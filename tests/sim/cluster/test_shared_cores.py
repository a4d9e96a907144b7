"""Workers that share cores: by hand, and that nothing is lost whatever the slowdowns are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec
from halfmoon.sim.cluster.contention import NO_CONTENTION, Contention
from halfmoon.sim.simulation import simulate
from tests.sim.small_clusters import FAST, group, pair, work

FACTORS = st.floats(1, 4)


def beside(prefill: float, decode: float) -> ClusterSpec:
    """A prefill and a decode worker on one node."""
    groups = group("prefill", first_node=0), group("decode", first_node=0)
    contention = Contention(prefill_beside_decode=prefill, decode_beside_prefill=decode)
    return ClusterSpec(groups, FAST, contention=contention)


def test_a_prompt_and_a_batch_slow_each_other_down() -> None:
    """The second prompt, 50 ms alone, takes 100 ms beside decoding. Three steps of 33 ms end meanwhile; of the fourth
    1 ms has gone by at 0.2 s, and the other 32 take a third as long. Then four steps of two sequences.
    """
    found = simulate(beside(2.0, 3.0), work((0.0, 100, 9), (0.1, 50, 5)))
    assert found.ttft_s == pytest.approx([0.1, 0.1])
    assert found.longest_gap_s == pytest.approx([0.033, 0.2 + 0.032 / 3 - 0.2 + 0.012])
    assert found.end_s == pytest.approx([0.2 + 0.032 / 3 + 4 * 0.012] * 2)


def test_workers_of_other_nodes_are_not_slowed_down() -> None:
    apart = replace(beside(2.0, 3.0), groups=(group("prefill"), group("decode")))
    rows = work((0.0, 100, 9), (0.1, 50, 5))
    assert simulate(apart, rows).end_s == pytest.approx(simulate(pair(), rows).end_s)


def test_who_is_not_slowed_down_goes_on() -> None:
    """A prompt comes beside a run of decode steps, which it does not touch."""
    found = simulate(beside(2.0, 1.0), work((0.0, 100, 9), (0.15, 50, 1)))
    alone = simulate(pair(), work((0.0, 100, 9)))
    assert found.end_s[0] == pytest.approx(alone.end_s[0])
    assert found.is_completed.all()


def test_three_workers_add_up() -> None:
    """Each of three prompts that are computed at once takes 1 + 2 * 0.5 times as long."""
    three = ClusterSpec((group("both", 3, workers_per_node=3),), FAST, contention=Contention(1.5))
    starts = (0.0, 0.0, 0.0)
    found = simulate(three, work(*((at_s, 100, 1) for at_s in starts)), seed=2)
    one_each = simulate(replace(three, contention=NO_CONTENTION), work(*((at_s, 100, 1) for at_s in starts)), seed=2)
    assert one_each.ttft_s == pytest.approx([0.1] * 3), "choose a seed that puts each on a worker of its own"
    assert found.ttft_s == pytest.approx([0.2] * 3)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(FACTORS, FACTORS, FACTORS, FACTORS),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(8, 200),
)
def test_nobody_is_quicker_than_alone_and_everybody_ends(
    factors: tuple[float, float, float, float], rows: list[tuple[float, int, int]], chunk_tokens: int
) -> None:
    limits = BatchLimits(max_batch_tokens=256, chunk_tokens=chunk_tokens)
    spec = ClusterSpec((group("both", 2, workers_per_node=2, limits=limits),), FAST, contention=Contention(*factors))
    found = simulate(spec, work(*sorted(rows)))
    assert found.is_completed.all()
    for row, ttft_s, tpot_s in zip(sorted(rows), found.ttft_s, found.tpot_s, strict=True):
        assert ttft_s >= row[1] * 1e-3 - 1e-9
        assert row[2] == 1 or tpot_s >= 0.011 - 1e-9


def test_a_slowdown_below_one_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="contention"):
        Contention(prefill_beside_decode=0.5)
