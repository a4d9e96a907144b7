"""What a worker of both roles decodes beside its prompts."""

from __future__ import annotations

import pytest

from halfmoon.policy.forecast.colocated_decodes import ColocatedDecodes
from halfmoon.policy.forecast.colocated_workers import Decoding
from halfmoon.policy.models.latency import StepModel
from tests.policy.sequences import lives

MODEL = StepModel(1.0, 0.1, 0.001)


def test_steps_get_shorter_as_sequences_end() -> None:
    own = ColocatedDecodes(3, lives((9.0, 200.0), (5.0, 100.0)), MODEL)
    assert own.step_s(0.0) == pytest.approx(1.0 + 0.2 + 0.3)
    assert own.step_s(5.0) == pytest.approx(1.0 + 0.1 + 0.2)
    assert own.step_s(9.0) == 0


def test_a_prompt_that_is_computed_decodes_in_the_same_steps_if_it_stays() -> None:
    own = ColocatedDecodes(3, lives(), MODEL)
    own.begin_decode(None, 1.0)
    own.begin_decode(Decoding(4, 2.0, 50.0), 1.0)
    assert own.step_s(1.0) == 0
    own.begin_decode(Decoding(3, 2.0, 50.0), 1.0)
    assert own.step_s(2.0) == pytest.approx(1.0 + 0.1 + 0.05)
    assert own.step_s(3.0) == 0
