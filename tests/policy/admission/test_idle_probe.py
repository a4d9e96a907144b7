"""The probe of an idle cluster that refuses every request."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.idle_probe import IdleProbe


@given(st.lists(st.tuples(st.floats(0, 4), st.booleans()), max_size=40))
def test_a_probe_is_due_after_ten_seconds_of_refusals(steps: list[tuple[float, bool]]) -> None:
    probe, now_s, first_s = IdleProbe(), 0.0, math.inf
    for passed_s, has_ended in steps:
        now_s += passed_s
        if has_ended:
            probe.reset()
            first_s = math.inf
        first_s = min(first_s, now_s)
        assert probe.is_due(now_s) == (now_s - first_s >= 10.0)
