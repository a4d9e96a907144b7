"""Load reports come at full intervals, each after now."""

from __future__ import annotations

import numpy as np
import pytest

from halfmoon.sim.cluster.idle_workers import idle_workers
from halfmoon.sim.cluster.load_reports import LoadReports
from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.routers.policy_router import PolicyRouter
from halfmoon.sim.simulation import simulate
from tests.sim.small_clusters import group, pair, work


@pytest.mark.parametrize("now_s", [0.0, 0.55, *np.arange(1, 40) * 0.1])
def test_the_next_report_is_after_now(now_s: float) -> None:
    """1.0 // 0.1 is nine: ten tenths would be now again, and time would stand still."""
    spec = pair(report_s=0.1)
    events, workers = EventQueue(), idle_workers(spec, None, keeps_times=False)
    events.now_s = float(now_s)
    LoadReports(events, spec.report_s, PolicyRouter(spec, workers, None, 1, 0)).note(workers[0])
    assert now_s < events.pending[0][0] <= now_s + 0.1 + 1e-9


def test_a_run_with_ten_reports_a_second_ends() -> None:
    spec = pair(report_s=0.1, groups=(group("both", 2),))
    found = simulate(spec, work((0.0, 500, 100), (0.5, 900, 100), (1.5, 300, 50)))
    assert found.is_completed.all()
