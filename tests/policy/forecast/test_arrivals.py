"""Prompts that usually come: their work is what it would be, were it summed up anew each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.forecast.arrivals import ArrivalRate
from halfmoon.policy.forecast.prefill_step import Speed
from halfmoon.policy.models.latency import PrefillModel

PACES = [Speed(PrefillModel(0.01, b, 1e-6), 512, chunk_tokens=chunk) for b, chunk in ((1e-3, 128), (2e-3, 16))]
COMES = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 900), st.sampled_from(PACES)), min_size=1, max_size=300)


@given(COMES)
def test_work_of_those_that_came_in_the_last_minute(comes: list[tuple[float, int, Speed]]) -> None:
    rate, now_s = ArrivalRate(), 100.0
    came: list[tuple[float, int]] = []
    for after_s, num_tokens, pace in comes:
        now_s += after_s
        rate.add(num_tokens, now_s)
        came = [one for one in [*came, (now_s, num_tokens)] if one[0] >= now_s - 60][-256:]
        mean_s = sum(pace.chunked_s(tokens) for _, tokens in came) / len(came)
        past_s = now_s - came[0][0]
        num = int(len(came) / past_s * 7 + 1 / 3) if past_s >= 10 else 0
        assert rate.work_s(pace, 7, now_s) == pytest.approx(num * mean_s)
