"""When a simulation may end: misses that cannot be made up for, passes that are steady, requests that are left."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.sim.cluster.cluster_spec import SloTargets
from halfmoon.sim.result import Criterion
from halfmoon.sim.slo_tracker import SloTracker
from halfmoon.sim.worker.job import Job, Outcome

TARGETS = SloTargets(ttft_s=1.0, tpot_s=0.1)


def request(
    tracker: SloTracker, index: int, ttft_s: float = 0.5, tpot_s: float = 0.05, outcome: Outcome = "completed"
) -> None:
    """One that comes, has its tokens and ends before the next one comes."""
    job = Job(index, float(index), 10, 11, [])
    tracker.came(index)
    if outcome == "completed":
        job.first_s = job.start_s + ttft_s
        tracker.first(job, 0.0)
        job.generated, job.end_s = 11, job.first_s + 10 * tpot_s
    job.outcome = outcome
    tracker.end(job, 0.0)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=30), st.integers(0, 10))
def test_a_pass_fails_with_the_first_miss_too_many(misses: list[tuple[bool, bool, bool]], max_misses: int) -> None:
    trackers = {criterion: SloTracker(TARGETS, criterion, max_misses) for criterion in ("joint", "marginal")}
    late = {"joint": 0, "ttft": 0, "tpot": 0}
    for index, (is_late, is_slow, is_refused) in enumerate(misses):
        late["ttft"] += is_late or is_refused
        late["tpot"] += is_slow or is_refused
        late["joint"] += is_late or is_slow or is_refused
        expected = {"joint": late["joint"] > max_misses, "marginal": max(late["ttft"], late["tpot"]) > max_misses}
        for criterion, tracker in trackers.items():
            outcome: Outcome = "refused" if is_refused else "completed"
            if not tracker.is_decided:
                request(tracker, index, 2.0 if is_late else 0.5, 0.2 if is_slow else 0.05, outcome)
            assert tracker.is_decided == expected[criterion]
            assert tracker.full_pass == (0 if expected[criterion] else None)


@pytest.mark.parametrize("criterion", ["joint", "marginal"])
def test_two_passes_that_leave_no_request_inside_are_steady_and_held(criterion: Criterion) -> None:
    tracker = SloTracker(TARGETS, criterion, 0, num_passes=4, num_each=3)
    for index in range(2):
        request(tracker, index)
        assert not tracker.is_decided
    request(tracker, 2)
    # the last request is inside as it arrives, which is growth; later passes do not grow any more
    assert (tracker.steady_pass, tracker.is_held) == (None, False)
    for index in range(3, 9):
        request(tracker, index)
    assert tracker.is_held
    assert tracker.is_decided
    assert tracker.full_pass is None


def test_a_queue_that_grows_is_never_steady() -> None:
    tracker = SloTracker(TARGETS, "joint", 100, num_passes=8, num_each=4, max_growth=1.0)
    for index in range(32):  # all stay inside
        tracker.came(index)
    assert tracker.steady_pass is None
    assert not tracker.is_decided


def test_a_filled_cluster_counts_from_the_pass_after_the_steady_one() -> None:
    tracker = SloTracker(TARGETS, "joint", 1, num_passes=3, num_each=2, max_growth=1.0, is_filled_first=True)
    stages = [tracker.stage]
    request(tracker, 0, ttft_s=9.0)
    request(tracker, 1)
    stages.append(tracker.stage)
    request(tracker, 2, ttft_s=9.0)  # a second miss, of another pass
    request(tracker, 3)
    assert [*stages, tracker.stage] == ["filling", "counting", "behind"]
    assert (tracker.first_pass, tracker.full_pass) == (1, None)
    assert tracker.is_held


def test_a_filling_pass_that_fails_decides_the_run() -> None:
    tracker = SloTracker(TARGETS, "joint", 0, num_passes=3, num_each=2, is_filled_first=True)
    request(tracker, 0, ttft_s=9.0)
    assert (tracker.is_decided, tracker.stage) == (True, "filling")


def test_a_cluster_that_does_not_fill_is_given_up() -> None:
    tracker = SloTracker(TARGETS, "joint", 9, num_passes=2, num_each=3, is_filled_first=True)
    for index in range(6):
        assert not tracker.is_decided
        tracker.came(index)
    assert tracker.is_decided
    assert tracker.stage == "filling"


def test_a_held_pass_waits_for_its_last_requests_where_there_is_a_limit() -> None:
    tracker = SloTracker(TARGETS, "joint", 4, num_passes=2, num_each=4, max_growth=4.0, max_left=0.0)
    jobs = [Job(index, 0.0, 10, 2, []) for index in range(4)]
    for job in jobs:
        tracker.came(job.index)
    for job in jobs:
        assert not tracker.is_decided
        job.first_s, job.end_s, job.generated, job.outcome = 0.1, 0.2, 2, "completed"
        tracker.first(job, 0.0)
        tracker.end(job, 0.0)
    assert tracker.is_decided


@pytest.mark.parametrize(("gap_s", "is_missed"), [(0.5, True), (0.2, False), (math.nan, False)])
def test_the_longest_gap_counts_where_there_is_a_tbt_target(gap_s: float, is_missed: bool) -> None:
    tracker = SloTracker(SloTargets(tbt_s=0.3), "joint", 0)
    job = Job(0, 0.0, 10, 2, [])
    job.first_s, job.end_s, job.generated, job.outcome, job.longest_gap_s = 0.1, 0.2, 2, "completed", gap_s
    tracker.came(0)
    tracker.first(job, 0.0)
    tracker.end(job, 0.0)
    assert (tracker.full_pass == 0) == is_missed
