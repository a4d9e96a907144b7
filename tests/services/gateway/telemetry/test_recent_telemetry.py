"""The pure parts of what the console sees: series, decisions, hot prefixes, workers that left, timelines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.pb.prefill_pb2 import Phase
from halfmoon.policy.values import AdmissionTargets
from services.gateway.progress import Progress
from services.gateway.telemetry.decisions import Decision, Decisions
from services.gateway.telemetry.recent_telemetry import Left, RecentlyLeft, RecentTelemetry
from services.gateway.telemetry.time_series import BUCKET_S, Ended, Sample, Series
from services.gateway.telemetry.timeline import timeline


def ended(ttft_s: float | None = 0.1, gaps_s: tuple[float, ...] = (), refusal: str | None = None) -> Ended:
    return Ended("gold", refusal is None, refusal, False, 10, 4, ttft_s, gaps_s)


def sample(output: dict[str, int]) -> Sample:
    return Sample(1, 0, 0.5, output, {})


def test_a_bucket_is_shown_when_it_is_whole() -> None:
    series = Series()
    series.note(ended(), 100.0)
    assert series.shown(100.0 + BUCKET_S / 2, 60)["age_s"] == []
    assert series.shown(100.0 + BUCKET_S, 60)["requests"]["ended"] == [1 / BUCKET_S]
    assert series.shown(10_000.0, 60)["requests"]["ended"] == [0.0] * 12  # all of them are there, none knows of it


def test_buckets_are_bounded() -> None:
    series = Series()
    for number in range(1_000):
        series.note(ended(), number * BUCKET_S)
    assert len(series.shown(1_000 * BUCKET_S, 1e9)["age_s"]) < 1_000


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=200))
def test_percentiles_are_right_within_a_tenth(times_s: list[float]) -> None:
    series = Series()
    for one in times_s:
        series.note(ended(one), 0.0)
    shown = series.shown(BUCKET_S, 60)["together"]["ttft_s"]
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        exact = float(np.quantile(times_s, share, method="inverted_cdf"))
        assert exact * 0.999 <= shown[name] <= exact * 1.101


def test_token_rates_are_of_the_workers_own_counts() -> None:
    series = Series()
    series.sample(sample({"a": 100, "b": 50}), 0.0)
    series.sample(sample({"a": 150, "b": 10, "c": 999}), 1.0)  # b was started again, c is new
    assert series.shown(BUCKET_S, 60)["rates"]["output_tokens"] == [50 / BUCKET_S]


def test_refusals_by_reason() -> None:
    series = Series()
    for reason in ("ttft", "ttft", "tbt"):
        series.note(ended(None, refusal=reason), 0.0)
    shown = series.shown(BUCKET_S, 60)
    assert shown["refusals"] == {"tbt": [1 / BUCKET_S], "ttft": [2 / BUCKET_S]}
    assert shown["ttft_s"]["p50"] == [None]


def test_bad_requests_count_for_no_class() -> None:
    series = Series()
    series.note(ended(None, refusal="bad request")._replace(qos_class=None), 0.0)
    shown = series.shown(BUCKET_S, 60)
    assert shown["refusals"] == {"bad request": [1 / BUCKET_S]}
    assert (shown["requests"]["ended"], shown["together"]["classes"]) == ([0.0], {})


NO_TARGETS = AdmissionTargets(None, None)


def decision(request_id: str) -> Decision:
    return Decision(request_id, 0.0, 0.0, "gold", 10, [], "p", "d", 0.1, 0.01, NO_TARGETS, NO_TARGETS)


def test_the_oldest_decisions_go_first() -> None:
    decisions = Decisions(limit=2)
    for name in ("a", "b", "c"):
        decisions.note(decision(name))
    assert [one["request_id"] for one in decisions.newest(9, 1.0)] == ["c", "b"]
    assert decisions.of("a", 1.0) is None


def test_a_worker_that_left_is_shown_until_it_is_back() -> None:
    recently_left = RecentlyLeft()
    prefill, decode = Left("prefill", "x"), Left("decode", "y")
    recently_left.note({"a": prefill, "b": decode}, 0.0)
    recently_left.note({"a": prefill}, 1.0)
    assert recently_left.shown(4.0) == [{"worker_id": "b", "role": "decode", "host": "y", "left_s_ago": 3.0}]
    recently_left.note({"a": prefill, "b": decode}, 5.0)
    assert recently_left.shown(5.0) == []
    recently_left.note({"a": prefill}, 6.0)
    recently_left.note({"a": prefill}, 1_000.0)
    assert recently_left.shown(1_000.0) == []


ROW: dict[str, Any] = {
    "ttft_s": 1.0, "e2e_s": 3.0, "prefill_worker": "p", "decode_worker": "d", "queue_s": 0.2, "prefill_s": 0.5,
    "output_tokens": 11, "predicted_queue_s": 0.1, "predicted_prefill_s": 0.6, "predicted_tbt_s": 0.2,
}  # fmt: skip


def test_a_timeline_has_every_part() -> None:
    spans = timeline(ROW, 0.1)
    assert [span.name for span in spans] == ["admission", "queue", "prefill", "first token", "decode"]
    assert [span.end_s for span in spans] == pytest.approx([0.1, 0.3, 0.8, 1.0, 3.0])
    assert spans[-1].predicted_s == pytest.approx(2.0)


def test_what_the_prefill_worker_told_is_on_lines_of_its_own() -> None:
    phases = [
        Phase(kind=Phase.TRANSFER, start_s=0.0, end_s=0.95, num_bytes=4096),
        Phase(kind=Phase.QUEUE, start_s=0.05, end_s=0.25),
        Phase(kind=Phase.RESTORE, start_s=0.06, end_s=0.5, num_tokens=128),
        Phase(kind=Phase.CHUNK, start_s=0.25, end_s=0.75, num_tokens=64),
    ]
    spans = {span.name: span for span in timeline(ROW, 0.1, phases)}
    assert (spans["queue"].start_s, spans["queue"].end_s) == pytest.approx((0.15, 0.35))  # after the reservation
    beside = {name: (spans[name].service, spans[name].num_tokens) for name in ("transfer", "restore", "chunk")}
    assert beside == {"transfer": ("p → d", None), "restore": ("store → p", 128), "chunk": ("p: steps", 64)}
    assert [spans[name].end_s for name in beside] == pytest.approx([1.05, 0.6, 0.85])
    assert spans["transfer"].num_bytes == 4096


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"prefill_worker": None, "ttft_s": None, "e2e_s": 0.01}, ["admission"]),
        ({"queue_s": None, "prefill_s": None, "ttft_s": None}, ["admission", "prefill"]),
        ({"prefill_s": 99.0}, ["admission", "queue", "prefill", "first token", "decode"]),
    ],
)
def test_a_timeline_of_what_went_wrong(changed: dict[str, float | None], names: list[str]) -> None:
    row = ROW | changed
    spans = timeline(row, 0.1)
    assert [span.name for span in spans] == names
    assert all(0 <= span.start_s <= span.end_s <= row["e2e_s"] for span in spans)


def finished(predicted_s: float | None, num_retries: int = 0, *, is_complete: bool = True) -> Progress:
    progress = Progress(0.0)
    progress.predicted_ttft_s, progress.num_retries, progress.is_complete = predicted_s, num_retries, is_complete
    progress.note_tokens([1], 1.0)
    return progress


def test_only_complete_first_attempts_tell_how_wrong_predictions_were() -> None:
    telemetry = RecentTelemetry()
    for progress in (finished(None), finished(2.0, num_retries=1), finished(2.0, is_complete=False)):
        telemetry.note_prediction(progress)
    assert telemetry.prediction_errors["ttft"].figures().num == 0
    telemetry.note_prediction(finished(1.5))
    figures = telemetry.prediction_errors["ttft"].figures()
    assert figures.num == 1
    assert figures.bias == pytest.approx(0.5)
    assert telemetry.prediction_errors["tbt"].figures().num == 0  # a single token has no TBT
