"""What the next minutes need: forecast, and tried in the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfmoon.plan.traffic_outlook import RecentTraffic, outlook
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.scaling.observation import Split, WorkerSpeed

SPEED = WorkerSpeed(PrefillModel(0.02, 4e-4, 0.0), StepModel(0.06, 1.5e-3, 2e-7), 64, 200_000)


def traffic(rates_per_s: list[float]) -> RecentTraffic:
    """Requests at these rates, a minute each, the last of which ends now."""
    starts_s = np.concatenate(
        [60.0 * minute + np.linspace(0, 59, round(60 * rate)) for minute, rate in enumerate(rates_per_s)]
    )
    num = len(starts_s)
    lengths = np.full(num, 1_000.0), np.full(num, 50.0)
    ages_s = 60.0 * len(rates_per_s) - starts_s
    return RecentTraffic(ages_s, *lengths, SPEED, 4.0, 0.1, 0.9, Split(1, 7), ("prefill", "decode"))


def test_a_wave_is_seen_before_it_comes() -> None:
    wave = [0.5, 0.5, 0.5, 4.0, 4.0, 0.5] * 6
    found = outlook(traffic([*wave, 0.5, 0.5]))
    assert found is not None
    assert found.method != "last"
    assert found.rate_per_s == pytest.approx(4.0, rel=0.2)
    assert found.target.prefill > 1
    assert found.target.total == 8
    assert found.demand.work_per_s == pytest.approx(found.rate_per_s * SPEED.prefill.seconds(1_000))


def test_steady_traffic_needs_no_change() -> None:
    found = outlook(traffic([0.5] * 20))
    assert found is not None
    assert (found.method, found.target, found.attained) == ("last", Split(1, 7), 1.0)


def test_too_little_is_known() -> None:
    assert outlook(traffic([0.1])) is None
    slow = traffic([1.0] * 20)
    assert outlook(replace(slow, speed=WorkerSpeed(PrefillModel(), StepModel()))) is None
