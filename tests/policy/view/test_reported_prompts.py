"""What a worker said of its prompts, and what is known of them since."""

from __future__ import annotations

import pytest

from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.view.reported_prompts import ReportedPrompts

MODEL = PrefillModel(0.0, 0.01, 0.0)


def test_what_was_sent_waits_until_it_is_computed_or_reported() -> None:
    prompts = ReportedPrompts(1.0)
    prompts.send("a", 100)
    prompts.send("a", 100)  # on its way there once
    prompts.send("b", 20)
    assert (prompts.num_waiting, prompts.free_s(MODEL)) == (120, 1.0)
    prompts.remove("b")
    prompts.remove("b")
    assert prompts.num_waiting == 100
    prompts.report(70, 2.0)
    assert (prompts.num_waiting, prompts.free_s(MODEL)) == (70, 2.7)


def test_what_is_computed_after_a_report_is_told_by_the_time_alone() -> None:
    prompts = ReportedPrompts(0.0)
    prompts.send("a", 100)
    prompts.report(130, 2.0)  # thirty are of another gateway
    prompts.remove("a")
    assert (prompts.num_waiting, prompts.free_s(MODEL)) == (130, 3.3)


def test_only_what_no_prompt_of_its_own_can_be_is_of_others() -> None:
    prompts = ReportedPrompts(0.0)
    prompts.send("a", 100)
    prompts.report(100, 1.0)  # caches may have all of it
    assert prompts.others_s(MODEL) == 0.0
    prompts.report(130, 2.0)
    assert prompts.others_s(MODEL) == pytest.approx(0.3)
    prompts.remove("a")
    assert prompts.others_s(MODEL) == pytest.approx(0.3)
    prompts.send("b", 20)
    prompts.report(30, 3.0)
    assert prompts.others_s(MODEL) == pytest.approx(0.1)
