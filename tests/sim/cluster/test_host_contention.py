"""Interference of colocated workers adds up, is 1 alone, and is one mean figure to policies."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.sim.cluster.contention import NO_CONTENTION, Contention, Work

SLOWDOWNS = st.builds(Contention, *([st.floats(1.0, 5.0)] * 4))
WORKS = st.lists(st.sampled_from(["prefill", "decode"]), max_size=6)


@given(SLOWDOWNS, st.sampled_from(["prefill", "decode"]), WORKS, WORKS)
def test_slowdowns_add_up(contention: Contention, work: Work, some: list[Work], others: list[Work]) -> None:
    assert contention.pace(work, []) == 1.0
    assert contention.pace(work, some) >= 1.0
    together = contention.pace(work, some + others)
    assert together - 1 == pytest.approx(contention.pace(work, some) - 1 + contention.pace(work, others) - 1, abs=1e-9)


def test_policies_get_the_mean_over_the_roles() -> None:
    contention = Contention(1.5, 1.3, 1.8, 1.4)
    assert contention.added("prefill", ["prefill"]) == pytest.approx(0.5)
    assert contention.added("prefill", ["both"]) == pytest.approx(0.4)
    assert contention.added("decode", ["prefill", "decode"]) == pytest.approx(0.6)
    assert contention.added("decode", []) == 0.0


@pytest.mark.parametrize("slowdown", [0.99, -1.0, math.inf, math.nan])
def test_a_slowdown_that_would_speed_up_or_never_end_is_refused(slowdown: float) -> None:
    with pytest.raises(InvalidRequest, match="not below 1"):
        Contention(prefill_beside_decode=slowdown)
    assert NO_CONTENTION.is_none
    assert not Contention(1.1).is_none
