"""The modelled engine: its durations are the profile's, its blocks add up, whatever comes in whatever order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest, NoCapacity, NotFound
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.latency_sources.coefficients import coefficients
from halfmoon.sim.latency_sources.worker_profile import WorkerProfile
from halfmoon.sim.modelled_engine import ModelledEngine
from halfmoon.sim.modelled_sequence import ModelledRequest, ModelledToken
from halfmoon.sim.modelled_step import StepOutcome

BLOCK = 16
PROFILE = WorkerProfile(
    "test",
    coefficients("test", PrefillModel(0.1, 0.001, 1e-6), StepModel(0.01, 0.002, 1e-5), 64 * BLOCK, 1),
    link_bytes_per_s=0,
    context_tokens=1024,
    max_batch_tokens=256,
    chunk_tokens=32,
    max_running=8,
)


def with_kv(kv_tokens: int) -> WorkerProfile:
    return replace(PROFILE, latency=replace(PROFILE.latency, kv_tokens=kv_tokens))


def keys(num_tokens: int, of: str = "a") -> tuple[bytes, ...]:
    return tuple(f"{of}{index}".encode() for index in range(num_tokens // BLOCK))


def run(engine: ModelledEngine) -> list[StepOutcome]:
    outcomes = []
    while (step := engine.begin_step()) is not None:
        outcomes.append(engine.end_step(step))
    return outcomes


def test_a_prompt_in_chunks_takes_what_the_model_says_and_each_further_pass() -> None:
    engine = ModelledEngine(PROFILE, BLOCK)
    engine.add(ModelledRequest("r", 600, 1))
    outcomes = run(engine)
    assert [one.num_prefill_tokens for one in outcomes] == [256, 256, 88]
    assert sum(one.seconds for one in outcomes) == pytest.approx(PROFILE.prefill.seconds(600) + 2 * PROFILE.prefill.a)
    assert sum(one.num_prefill_pairs for one in outcomes) == 600**2 / 2
    assert outcomes[-1].tokens == [ModelledToken("r", 0, True)]


def test_short_prompts_share_a_pass() -> None:
    engine = ModelledEngine(PROFILE, BLOCK)
    for name in ("one", "two"):
        engine.add(ModelledRequest(name, 50, 1))
    (outcome,) = run(engine)
    assert outcome.seconds == pytest.approx(2 * PROFILE.prefill.seconds(50) - PROFILE.prefill.a)


def test_a_known_prefix_is_not_computed_again() -> None:
    engine = ModelledEngine(PROFILE, BLOCK)
    engine.add(ModelledRequest("first", 100, 1, block_keys=keys(100)))
    stored = [key for outcome in run(engine) for key in outcome.stored]
    assert stored == list(keys(100))
    engine.add(ModelledRequest("second", 96, 1, block_keys=keys(96)))
    (outcome,) = run(engine)
    assert outcome.began == {"second": 80}  # one token at least is left to compute
    assert outcome.seconds == pytest.approx(PROFILE.prefill.seconds(16, 80))


def test_decodes_share_a_step_and_leave_when_they_are_done() -> None:
    engine = ModelledEngine(PROFILE, BLOCK)
    for name, num_output in (("short", 3), ("long", 4)):
        engine.reserve(ModelledRequest(name, 20, num_output))
        engine.start(name)
    step = engine.begin_step()
    assert step is not None
    assert step.seconds == pytest.approx(PROFILE.step.seconds(2, 42))
    assert engine.end_step(step).tokens == [ModelledToken("short", 1, False), ModelledToken("long", 1, False)]
    assert [[token.is_last for token in one.tokens] for one in run(engine)] == [[True, False], [True]]
    assert engine.blocks.num_available == 64


def test_a_chunk_beside_decodes_is_bounded() -> None:
    engine = ModelledEngine(PROFILE, BLOCK)
    engine.reserve(ModelledRequest("decodes", 20, 100))
    engine.start("decodes")
    engine.add(ModelledRequest("prompt", 100, 1))
    step = engine.begin_step()
    assert step is not None
    assert engine.end_step(step).num_prefill_tokens == PROFILE.chunk_tokens


def test_a_step_measures_what_it_took_also_where_somebody_was_cancelled_meanwhile() -> None:
    """Latency models are fitted to it: time without its work would be a wrong measurement."""
    engine = ModelledEngine(PROFILE, BLOCK)
    for name in ("one", "two"):
        engine.reserve(ModelledRequest(name, 40, 9))
        engine.start(name)
    decodes = engine.begin_step()
    engine.cancel("two")
    assert decodes is not None
    outcome = engine.end_step(decodes)
    assert outcome.seconds == pytest.approx(PROFILE.step.seconds(outcome.num_decodes, outcome.decode_context_tokens))
    assert (len(outcome.tokens), outcome.context_tokens) == (1, 41)
    engine.cancel("one")
    engine.add(ModelledRequest("three", 50, 1))
    chunks = engine.begin_step()
    engine.cancel("three")
    assert chunks is not None
    outcome = engine.end_step(chunks)
    assert (outcome.tokens, outcome.num_prefill_tokens, outcome.num_prefill_pairs) == ([], 50, 50**2 / 2)


def test_a_prefilled_request_is_held_until_it_is_cancelled() -> None:
    engine = ModelledEngine(PROFILE, BLOCK)
    engine.add(ModelledRequest("r", 20, 5, prefill_only=True))
    assert run(engine)[-1].tokens == [ModelledToken("r", 0, False)]
    assert (engine.num_held, engine.blocks.num_available) == (1, 62)
    assert engine.cancel("r")
    assert not engine.cancel("r")
    assert engine.blocks.num_available == 64


def test_a_moved_request_goes_on_at_its_position() -> None:
    engine = ModelledEngine(PROFILE, BLOCK)
    engine.add(ModelledRequest("r", 20, 6, num_done=4))
    assert [token.position for one in run(engine) for token in one.tokens] == [4, 5]


def test_who_goes_first_is_a_matter_of_priority() -> None:
    engine = ModelledEngine(PROFILE, BLOCK)
    engine.add(ModelledRequest("usual", 300, 1, priority=1))
    engine.add(ModelledRequest("urgent", 200, 1, priority=0))
    assert [token.request_id for one in run(engine) for token in one.tokens] == ["urgent", "usual"]


def test_preempted_requests_are_computed_again_and_all_end() -> None:
    engine = ModelledEngine(with_kv(6 * BLOCK), BLOCK)
    for name in ("one", "two"):
        engine.reserve(ModelledRequest(name, 40, 40))
        engine.start(name)
    outcomes = run(engine)
    assert sum(one.num_preempted for one in outcomes) > 0
    tokens = [token for one in outcomes for token in one.tokens]
    for name in ("one", "two"):
        assert [token.position for token in tokens if token.request_id == name] == list(range(1, 40))
    assert engine.blocks.num_available == 6


def test_what_has_no_room_is_refused() -> None:
    engine = ModelledEngine(with_kv(4 * BLOCK), BLOCK)
    engine.reserve(ModelledRequest("r", 40, 2))
    with pytest.raises(NoCapacity):
        engine.reserve(ModelledRequest("s", 40, 2))
    assert not engine.has("s")
    with pytest.raises(InvalidRequest):
        engine.add(ModelledRequest("large", 60, 20))
    with pytest.raises(InvalidRequest):
        engine.add(ModelledRequest("r", 1, 1))
    with pytest.raises(NotFound):
        engine.start("s")


_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "hold", "reserve", "start", "cancel", "step"]),
        st.integers(0, 7),
        st.integers(1, 150),
        st.integers(1, 40),
        st.sampled_from("ab"),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(_ACTIONS)
def test_blocks_and_queues_always_add_up(actions: list[tuple[str, int, int, int, str]]) -> None:
    engine = ModelledEngine(with_kv(16 * BLOCK), BLOCK)
    known: set[bytes] = set()
    for action, number, num_prompt, num_output, prompt in actions:
        name = f"r{number}"
        request = ModelledRequest(name, num_prompt, num_output, 0, keys(num_prompt, prompt), number % 2)
        try:
            match action:
                case "add":
                    engine.add(request)
                case "hold":
                    engine.add(replace(request, prefill_only=True))
                case "reserve":
                    engine.reserve(replace(request, block_keys=(), num_output_tokens=num_output + 1))
                case "start":
                    engine.start(name)
                case "cancel":
                    engine.cancel(name)
                case "step" if (step := engine.begin_step()) is not None:
                    assert step.seconds > 0
                    if num_output % 3 == 0:
                        engine.cancel(name)
                    outcome = engine.end_step(step)
                    assert not known & set(outcome.stored)
                    assert known >= set(outcome.evicted)
                    known = (known - set(outcome.evicted)) | set(outcome.stored)
        except (NoCapacity, InvalidRequest, NotFound):
            pass
        assert 0 <= engine.blocks.num_available <= 16
        assert min(engine.num_held, engine.num_waiting, engine.num_reserved, engine.num_running) >= 0
    for name in engine.requests():
        engine.cancel(name)
    assert engine.blocks.num_available == 16
    assert not engine.has_work
    assert engine.num_held == engine.num_reserved == 0
