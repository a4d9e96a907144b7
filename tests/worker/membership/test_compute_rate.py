"""What a worker knows of its speed before its first step."""

from __future__ import annotations

import pytest

from halfmoon.policy.models.latency import PrefillSample
from halfmoon.worker.membership.compute_rate import ComputeRate


def test_what_calibration_measured_is_a_model() -> None:
    rate = ComputeRate()
    assert rate.model.seconds(512) == 0.0
    rate.begin_with([PrefillSample(tokens, 0, 0.01 + tokens * 1e-3) for tokens in (64, 512, 256)])
    assert rate.model.seconds(400) == pytest.approx(0.41, rel=0.1)
