"""Requests that their workers refuse or lose, as the live gateway tries them again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfmoon.policy.wait_limits import MAY_RETURN_S, WaitLimits
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Failure
from halfmoon.sim.result import OUTCOMES, SimResult
from halfmoon.sim.simulation import simulate
from tests.sim.small_clusters import FAST, group, pair, work


def outcomes(found: SimResult) -> list[str]:
    return [OUTCOMES[one] for one in found.outcome]


def test_a_new_request_waits_a_moment_for_a_worker_that_was_there_a_moment_ago() -> None:
    """One worker dies at second 1. What comes soon after waits three seconds, what comes later not at all."""
    back_s = 1 + MAY_RETURN_S - 0.1
    spec = ClusterSpec((group("both"),), FAST, failures=(Failure(0, 1.0, back_s),))
    arrivals_s = (1.5, back_s - 2.0, 20.0)
    found = simulate(spec, work(*((at_s, 100, 1) for at_s in arrivals_s)))
    assert outcomes(found) == ["failed", "completed", "completed"]
    assert found.end_s[0] == pytest.approx(1.5 + WaitLimits().return_s)
    assert found.ttft_s[1] == pytest.approx(2.0 + 0.1)
    never = replace(spec, failures=(Failure(0, 1.0),))
    found = simulate(never, work((1.0 + MAY_RETURN_S + 1.0, 100, 1)))
    assert (outcomes(found), found.duration_s) == (["failed"], 0.0)


def test_a_request_that_lost_its_worker_waits_longer_for_another() -> None:
    spec = ClusterSpec((group("both"),), FAST, failures=(Failure(0, 1.0, 50.0),))
    found = simulate(spec, work((0.95, 100, 3)))
    assert outcomes(found) == ["completed"]
    assert found.ttft_s[0] == pytest.approx(50.0 - 0.95 + 0.1)
    gone = replace(spec, failures=(Failure(0, 1.0, 100.0),))
    found = simulate(gone, work((0.95, 100, 3)))
    assert outcomes(found) == ["failed"]
    assert found.end_s[0] == pytest.approx(1.0 + 0.1 + WaitLimits().failover_s)


def test_a_full_decode_worker_says_when_to_ask_again() -> None:
    """It takes one at a time. Who is there has 19 steps of 11 ms left, of those that clients may ask for."""
    limits = replace(group("decode").limits, max_running=1)
    spec = replace(pair(), groups=(group("prefill"), group("decode", limits=limits)))
    found = simulate(spec, work((0.0, 100, 20), (0.105, 100, 2)))
    assert outcomes(found) == ["completed", "completed"]
    assert found.ttft_s[1] == pytest.approx(19 * 0.011 + 0.1)


def test_whose_answer_has_begun_is_not_refused_for_want_of_room() -> None:
    """The second decode worker is full for longer than a new request would wait, when the first one dies."""
    decodes = group("decode", 2, limits=replace(group("decode").limits, max_running=1))
    spec = replace(pair(), groups=(group("prefill"), decodes), failures=(Failure(1, 1.0),))
    found = simulate(spec, work((0.0, 100, 2_000), (0.2, 100, 2_000)))
    assert outcomes(found) == ["completed", "completed"]
    assert sorted(found.num_retries.tolist()) == [0, 1]
