"""Measured links cost what was measured, others what the same sender's usually cost."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.link_speeds import DEFAULT_BYTES_PER_S
from halfmoon.policy.view.worker_view import WorkerView

W = WorkerView("w0", "decode", "w0:1", 9_000, 10, 900, 900)


class Link(NamedTuple):
    address: str
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0


def workers(num: int) -> ClusterView:
    return ClusterView(replace(W, worker_id=f"w{number}", address=f"w{number}:1") for number in range(num))


def bytes_per_s(view: ClusterView, row: int) -> list[float]:
    return [round(1 / seconds) for seconds in view.links.from_row(row, view.num_rows).s_per_byte]


def test_a_sender_without_measurements_has_the_default() -> None:
    assert bytes_per_s(workers(2), 0) == [DEFAULT_BYTES_PER_S] * 2


def test_an_unmeasured_link_is_as_fast_as_the_senders_usual_one() -> None:
    view = workers(5)
    view.links.report(
        0, [Link("w1:1", 100), Link("w2:1", 200, 0.5), Link("w3:1", 900), Link("store:1", 5), Link("w4:1", 0)]
    )
    assert bytes_per_s(view, 0) == [200, 100, 200, 900, 200]
    assert view.links.from_row(0, 5).latency_s.tolist() == [0.0, 0.0, 0.5, 0.0, 0.0]
    assert bytes_per_s(view, 1) == [DEFAULT_BYTES_PER_S] * 5


def test_a_report_replaces_the_one_before_and_a_worker_keeps_no_row() -> None:
    view = workers(3)
    view.links.report(0, [Link("w1:1", 100)])
    assert bytes_per_s(view, 0) == [100] * 3
    view.links.report(0, [Link("w1:1", 100), Link("w2:1", 300)])
    assert bytes_per_s(view, 0)[1:] == [100, 300]
    view.remove("w1")
    view.put(replace(W, worker_id="w9", address="w9:1"))  # in the row of w1
    assert bytes_per_s(view, 0)[1:] == [300, 300]
    view.put(replace(W, worker_id="w2", address="moved:1"))
    assert bytes_per_s(view, 0)[2] == pytest.approx(300)


def test_a_worker_that_leaves_takes_its_measurements_along() -> None:
    view = workers(2)
    view.links.report(0, [Link("w1:1", 100)])
    view.remove("w0")
    view.put(replace(W, worker_id="w0", address="w0:1"))
    assert bytes_per_s(view, 0) == [DEFAULT_BYTES_PER_S] * 2
