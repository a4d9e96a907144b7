"""Refusals: which target is missed, what the client is told, and when it should come back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.feedback import TargetKind, Tightening
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.refusal import PredictedLatency, missed_target, over_target, overload_targets
from halfmoon.policy.values import AdmissionTargets, UnloadedLatency

GOLD = QosClass("gold", ttft_s=2.0, tbt_s=0.05)
APPLIED = AdmissionTargets(2.0, 0.05)
NONE_LEAVES = np.zeros(0)


@pytest.mark.parametrize(
    ("ttft_s", "tbt_s", "missed"),
    [(2.0, 0.05, None), (2.1, 0.05, "ttft"), (2.0, 0.06, "tbt"), (2.1, 0.06, "ttft"), (2.0, None, None)],
)
def test_the_missed_target(ttft_s: float, tbt_s: float | None, missed: TargetKind | None) -> None:
    assert missed_target(PredictedLatency(ttft_s, tbt_s), APPLIED) == missed
    assert missed_target(PredictedLatency(ttft_s, tbt_s), AdmissionTargets(None, None)) is None


def test_a_queue_shrinks_and_a_long_prompt_does_not() -> None:
    queued = over_target(GOLD, "ttft", PredictedLatency(7.0, None, queue_s=6.0), APPLIED, None, NONE_LEAVES)
    assert (queued.retry_after_ms, queued.is_by_others) == (5_000, True)
    long = over_target(GOLD, "ttft", PredictedLatency(7.0, None, queue_s=4.9), APPLIED, None, NONE_LEAVES)
    assert (long.retry_after_ms, long.is_by_others) == (60_000, False)


def test_a_crowded_worker_waits_for_as_many_to_leave_as_the_target_needs() -> None:
    ends_in_s = np.array([1.0, 2.0, 3.0, 4.0])
    half = over_target(GOLD, "tbt", PredictedLatency(1.0, 0.1), APPLIED, None, ends_in_s)
    assert (half.retry_after_ms, half.is_by_others) == (2_000, True)
    idle = over_target(GOLD, "tbt", PredictedLatency(1.0, 0.1), APPLIED, None, NONE_LEAVES)
    assert (idle.retry_after_ms, idle.is_by_others) == (60_000, False)


def test_the_message_names_the_classs_own_target_and_the_tightening() -> None:
    tightening = Tightening(1.8, 2.4)
    latency = PredictedLatency(1.9, None, is_lower_bound=True)
    refusal = over_target(GOLD, "ttft", latency, AdmissionTargets(1.8, None), tightening, NONE_LEAVES)
    assert refusal.message == (
        "time to first token would be at least 1.9 s, class gold allows 2 s; "
        "now 1.8 s, because 90 % of its latest requests took up to 2.4 s"
    )
    assert (refusal.is_early, refusal.reason, refusal.qos_class) == (True, "ttft", "gold")
    assert (refusal.targets, refusal.applied) == (APPLIED, AdmissionTargets(1.8, None))


@given(
    st.floats(2.001, 1e4), st.floats(0, 1), st.floats(0.0501, 10), st.lists(st.floats(0, 1e4), max_size=9).map(sorted)
)
def test_advice_is_between_a_second_and_a_minute(
    ttft_s: float, queue_share: float, tbt_s: float, ends_in_s: list[float]
) -> None:
    latency = PredictedLatency(ttft_s, tbt_s, queue_s=queue_share * ttft_s)
    for kind in ("ttft", "tbt"):
        refusal = over_target(GOLD, kind, latency, APPLIED, None, np.array(ends_in_s))
        assert 1_000 <= (refusal.retry_after_ms or 0) <= 60_000


@given(st.none() | st.floats(0.01, 10), st.none() | st.floats(0.01, 1), st.floats(0, 20), st.floats(0, 2))
def test_overload_targets_admit_whatever_an_idle_cluster_does(
    ttft_s: float | None, tbt_s: float | None, alone_ttft_s: float, alone_tbt_s: float
) -> None:
    targets, unloaded = AdmissionTargets(ttft_s, tbt_s), UnloadedLatency(alone_ttft_s, alone_tbt_s)
    enforced = overload_targets(targets, unloaded)
    assert missed_target(PredictedLatency(*unloaded), enforced) is None
    if missed_target(PredictedLatency(*unloaded), targets) is None:
        assert enforced == targets
