"""An engine that guesses tokens, and the time between tokens that a gateway predicts of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from halfmoon.engine.engine_core import EngineCore
from halfmoon.engine.request import EngineRequest, SampledToken, SamplingParams
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.engine.step_result import StepResult
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb.gateway_pb2 import LatencyProfile, WorkerLoad
from halfmoon.policy.models.latency import StepModel
from halfmoon.policy.view.worker_view import WorkerView
from halfmoon.worker.state import _timing
from services.gateway.cluster.membership import Membership
from tests.services.gateway.cluster.test_membership import identity, shown
from tests.services.gateway.fakes import FINGERPRINT

LAYOUT = KVLayout(1, 1, 1, "float16", 16)
TRUE = StepModel(0.01, 0.0015, 1e-7)  # by rows


class Guessing:
    """An engine core that says texts which are known, in steps whose time follows from their rows."""

    def __init__(self) -> None:
        self._texts: dict[str, list[int]] = {}
        self.core = EngineCore(
            BlockPool(4000),
            RequestLimits(10_000, 1 << 16, 4000, LAYOUT),
            SchedulerLimits(512, 64, 8, speculates=True),
            None,
            lambda sequence: "length" if sequence.num_output == sequence.sampling.max_tokens else None,
        )

    def add(self, name: str, text: list[int], num_prompt: int) -> None:
        """A request whose prompt is the text's beginning, and whose answer is the rest."""
        self._texts[name] = text
        sampling = SamplingParams(len(text) - num_prompt, ignore_eos=True)
        self.core.add(EngineRequest(name, tuple(text[:num_prompt]), sampling))

    def run(self, num_steps: int) -> list[StepResult]:
        """The results of so many steps, timed."""
        found = []
        for _ in range(num_steps):
            step = self.core.begin_step()
            sampled = []
            for item in step.schedule.scheduled:
                text, length = self._texts[item.sequence.request_id], len(item.sequence.token_ids)
                sampled += [SampledToken(text[min(length + at, len(text) - 1)]) for at in range(item.num_drawn)]
            seconds = TRUE.seconds(step.counts.num_decode_rows, step.counts.decode_context_tokens)
            found.append(replace(self.core.end_step(step, sampled), duration_s=seconds))
        return found


def repeating(rng: random.Random, changed: float, length: int) -> list[int]:
    """A passage over and over, some of whose tokens are changed each time."""
    passage = list(range(100, 300))
    return [rng.randrange(1000, 9999) if rng.random() < changed else passage[at % 200] for at in range(length)]


@pytest.mark.parametrize(("changed", "num_sequences"), [(0.0, 1), (0.05, 1), (0.02, 2), (0.05, 4), (1.0, 4)])
def test_the_predicted_time_between_tokens_is_what_an_answer_gets(changed: float, num_sequences: int) -> None:
    guessing, rng = Guessing(), random.Random(7)
    for number in range(num_sequences):
        guessing.add(str(number), repeating(rng, changed, 9000), 400)
    guessing.run(10)  # the prompts
    view = reported(guessing.run(200))
    steps = guessing.run(200)
    assert all(step.num_decode_seqs == num_sequences for step in steps)
    measured_s = num_sequences * sum(step.duration_s for step in steps) / sum(len(step.outputs) for step in steps)
    context_tokens = steps[0].decode_context_tokens
    assert view.step_model.seconds(num_sequences, context_tokens) == pytest.approx(measured_s, rel=0.15)
    if changed < 1:
        assert measured_s < 0.85 * TRUE.seconds(num_sequences, context_tokens), "else guesses do not matter here"
    mean_s = sum(step.duration_s for step in steps) / len(steps)
    assert view.whole_step_model.seconds(num_sequences, context_tokens) == pytest.approx(mean_s, rel=0.15)


def test_speculation_that_does_not_pay_ends_by_itself_and_predictions_follow() -> None:
    guessing, rng = Guessing(), random.Random(3)
    guessing.add("copy", repeating(rng, 0.0, 2000), 400)
    guessing.run(5)
    before = reported(guessing.run(60))
    assert before.tokens_per_step > 2
    guessing.core.cancel_all()
    guessing.add("story", [rng.randrange(300) for _ in range(6000)], 400)
    later = guessing.run(400)
    num_tokens = sum(len(step.outputs) for step in later)
    assert sum(step.num_drafts for step in later) < 0.03 * num_tokens
    assert reported(later).tokens_per_step == pytest.approx(1, abs=0.03)


def reported(steps: list[StepResult]) -> WorkerView:
    """What a gateway knows of a worker that has reported these steps, and measured itself without guesses before."""
    membership = Membership(FINGERPRINT, 1.0)
    profile = LatencyProfile(kind="k", prefill=[0.01, 1e-3, 0.0], step=TRUE)
    member = membership.join(identity(profile=profile, step_tokens=512), 0.0)
    for at in range(0, len(steps), 50):
        timings = [_timing(step, 0.0) for step in steps[at : at + 50]]
        membership.report(member, WorkerLoad(steps=timings), 1.0 + at)
    return shown(membership)
