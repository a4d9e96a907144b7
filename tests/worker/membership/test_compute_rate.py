"""What a worker knows of its speed before its first step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfmoon.engine.step_result import StepResult
from halfmoon.policy.models.latency import PrefillSample
from halfmoon.worker.membership.compute_rate import ComputeRate


def test_what_calibration_measured_is_a_model() -> None:
    rate = ComputeRate()
    assert rate.model.seconds(512) == 0.0
    rate.begin_with([PrefillSample(tokens, 0, 0.01 + tokens * 1e-3) for tokens in (64, 512, 256)])
    assert rate.model.seconds(400) == pytest.approx(0.41, rel=0.1)


def test_steps_without_decodes_are_learned_from() -> None:
    rate = ComputeRate()
    for tokens in (64, 512, 256):
        step = StepResult(num_prefill_tokens=tokens, num_prefill_pairs=tokens**2 / 2, duration_s=0.01 + tokens * 1e-3)
        rate.observe(step)
        rate.observe(replace(step, num_decode_seqs=1, duration_s=9.0))
    assert rate.model.seconds(400) == pytest.approx(0.41, rel=0.1)
