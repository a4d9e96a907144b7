"""The last hour's requests as a workload."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from halfmoon.ledger.history.traffic import Arrival
from services.gateway.control.live_workload import workload_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def arrivals(*outputs: int) -> list[Arrival]:
    return [Arrival(NOON + timedelta(seconds=2 * number), 100, output) for number, output in enumerate(outputs)]


def test_rows_begin_at_zero_and_say_their_rate() -> None:
    found = workload_of(arrivals(5, 6, 7))
    assert found["rate_per_s"] == 0.5
    assert found["requests"][2] == {"start_time": 4.0, "prompt_len": 100, "output_len": 7}


def test_who_was_refused_is_as_long_as_who_was_served_before() -> None:
    assert [row["output_len"] for row in workload_of(arrivals(0, 5, 0, 7, 0))["requests"]] == [5, 5, 5, 7, 7]


def test_who_was_not_read_counts_and_is_as_long_as_the_one_before() -> None:
    unread, read = Arrival(NOON, 0, 0), arrivals(5, 0)
    found = workload_of([unread, read[0], unread, read[1]._replace(prompt_tokens=7), unread])["requests"]
    assert [one["prompt_len"] for one in found] == [100, 100, 100, 7, 7]


def test_nobody_served_and_one_request_have_no_rate() -> None:
    assert workload_of(arrivals(0, 0)) == {"requests": [], "rate_per_s": None}
    assert workload_of([]) == {"requests": [], "rate_per_s": None}
    assert workload_of(arrivals(5))["rate_per_s"] is None
