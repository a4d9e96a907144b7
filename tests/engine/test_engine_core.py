"""Blocks and queues add up whatever comes in whatever order, also beside a step that is under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.engine.engine_core import EngineCore, Step
from halfmoon.engine.request import EngineRequest, SampledToken, SamplingParams
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import InvalidRequest, NoCapacity, NotFound
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.kv_policy import SNAPKV, KVPolicy, policy_salt
from halfmoon.policy.models.chunk_length import ChunkRule
from halfmoon.policy.models.latency import PrefillModel, StepModel

BLOCK = 16
POLICIES = (None, KVPolicy(16, 16), KVPolicy(32, 16, SNAPKV))
NUM_BLOCKS = 16


def make(num_blocks: int = NUM_BLOCKS) -> EngineCore:
    limits = RequestLimits(10, 1024, num_blocks, KVLayout(1, 1, 1, "float16", BLOCK))
    step_limits = SchedulerLimits(max_batch_tokens=256, chunk_tokens=32, max_running=8)
    return EngineCore(BlockPool(num_blocks), limits, step_limits, bytes, lambda one: one.finish_reason(frozenset()))


def request(name: str, num_prompt: int, max_tokens: int, token: int = 1, **options: Any) -> EngineRequest:
    return EngineRequest(name, (token,) * num_prompt, SamplingParams(max_tokens), **options)


def end(core: EngineCore, step: Step) -> StepResult:
    return core.end_step(step, [SampledToken(1) for item in step.schedule.scheduled if item.samples])


def test_a_step_counts_what_was_cancelled_while_it_ran_and_nothing_comes_of_it() -> None:
    """Latency models are fitted to steps: a time without its work would be a wrong measurement."""
    core = make()
    for name in ("one", "two"):
        core.reserve(request(name, 40, 9))
        core.start(name, 1)
    core.add(request("three", 50, 1))
    step = core.begin_step()
    assert core.cancel("two")
    assert core.cancel("three")
    result = end(core, step)
    assert (result.num_decode_seqs, result.decode_context_tokens, result.num_prefill_tokens) == (2, 82, 32)
    assert [output.request_id for output in result.outputs] == ["one"]
    core.check_integrity()


def test_a_name_is_free_again_while_the_step_of_its_first_owner_runs() -> None:
    core = make()
    core.add(request("r", 20, 1))
    step = core.begin_step()
    core.cancel("r")
    core.add(request("r", 30, 1))
    assert end(core, step).outputs == ()
    assert [output.position for output in end(core, core.begin_step()).outputs] == [0]
    assert not core.has_work()


def test_prompts_that_are_computed_count_apart_from_answers() -> None:
    core = make()
    core.reserve(request("answer", 40, 9))
    core.start("answer", 1)
    core.add(request("prompt", 50, 2))
    counts = []
    for _ in range(3):
        end(core, core.begin_step())
        counts.append((core.stats().num_running, core.stats().num_prefilling))
    assert counts == [(2, 1), (2, 0), (1, 0)]


def test_decodes_that_wait_for_a_step_of_others_count_with_their_tokens() -> None:
    """What came from another worker runs a step before them."""
    core = make()
    core.follow_targets(ChunkRule(PrefillModel(0.005, 0.002, 0.0), StepModel(0.005, 0.002, 0.0)))
    for number in range(6):
        core.reserve(request(f"here {number}", 20, 9))
        core.start(f"here {number}", 1)
    core.add(request("moved", 8, 9, output_token_ids=(1, 1)))
    assert core.stats().decode_context_tokens == 6 * 21
    assert end(core, core.begin_step()).num_decode_seqs == 0
    assert core.stats().decode_context_tokens == 6 * 21 + 11


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_count_the_tokens_that_a_policy_lets_theirs_see(policy: KVPolicy | None) -> None:
    """Step models learn from them, and what a worker reports is their input."""

    def num_seen(position: int) -> int:
        return position + 1 - (0 if policy is None else len(policy.unseen(position, BLOCK)) * BLOCK)

    core, pairs, contexts, reported = make(), 0.0, [], []
    core.add(request("r", 150, 40, tenant_salt=policy_salt(policy, b"")))
    while core.find("r").num_output < 30:
        reported.append(core.stats().decode_context_tokens)
        result = end(core, core.begin_step())
        pairs += result.num_prefill_pairs
        contexts.append(result.decode_context_tokens)
    num_before = contexts.count(0)
    assert contexts[num_before:] == reported[num_before:] == [num_seen(150 + at) for at in range(29)]
    whole = policy is None or policy.chooses
    expected = sum(position + 1 if whole else num_seen(position) for position in range(150)) - 75
    assert pairs == pytest.approx(expected, rel=0.01)


def test_the_end_of_a_prompt_runs_at_once_and_what_it_chooses_replaces_the_rest() -> None:
    core, salt = make(num_blocks=14), policy_salt(KVPolicy(32, 16, SNAPKV), b"")
    core.add(request("r", 150, 40, tenant_salt=salt))
    for name in ("a", "b"):  # decodes, beside which a step has 32 tokens of a prompt
        core.reserve(request(name, 14, 40))
        core.start(name, 1)
    ends, free = [], []
    while core.find("r").num_output < 20:
        end(core, core.begin_step())
        core.check_integrity()
        ends.append(core.find("r").num_computed)
        free.append(core.stats().num_free_blocks)
    assert [at for at in ends if at <= 150] == [32, 64, 96, 150 - SNAPKV.num_observers, 150]
    assert free[0] == 14 - (10 + 2) - 2 * 1  # of the prompt and of what it will choose
    assert core.find("r").kept_blocks == core.find("r").blocks[:2] + core.find("r").blocks[9:]
    assert core.find("r").dropped == range(2, 9)


def test_a_prompt_that_chooses_waits_until_there_is_room_for_its_choice() -> None:
    salt = policy_salt(KVPolicy(32, 16, SNAPKV), b"")
    for num_blocks, num_computed in ((12, 0), (13, 150)):
        core = make(num_blocks)
        core.reserve(request("other", 14, 2))
        core.add(request("r", 150, 9, tenant_salt=salt))
        end(core, core.begin_step())
        assert core.find("r").num_computed == num_computed
    with pytest.raises(InvalidRequest):
        make(11).add(request("r", 150, 1, tenant_salt=salt))


def test_an_answer_whose_prompt_chooses_can_always_be_computed_again() -> None:
    salt = policy_salt(KVPolicy(32, 16, SNAPKV), b"")
    one = request("r", 160, 60, tenant_salt=salt, output_token_ids=(1,) * 50)
    with pytest.raises(InvalidRequest):
        make(15).add(one)
    core = make(16)
    core.add(one)
    while core.has_work():
        step = core.begin_step()
        assert step.schedule.scheduled
        end(core, step)


def test_nothing_behind_a_choice_is_found_by_others() -> None:
    core, salt = make(), policy_salt(KVPolicy(32, 16, SNAPKV), b"")
    core.add(request("first", 100, 60, tenant_salt=salt))
    while core.has_work():
        end(core, core.begin_step())
    core.add(request("second", 159, 1, tenant_salt=salt))
    core.begin_step()
    assert core.find("second").num_cached == 96


def test_an_answer_to_a_prompt_that_keeps_all_is_not_found_where_it_would_be_read_whole() -> None:
    core, salt = make(), policy_salt(KVPolicy(32, 16, SNAPKV), b"")
    core.add(request("first", 40, 100, tenant_salt=salt))
    while core.has_work():
        end(core, core.begin_step())
    core.add(request("second", 139, 1, tenant_salt=salt))
    core.begin_step()
    assert core.find("second").num_cached == 32


_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "hold", "keep", "reserve", "start", "cancel", "begin", "end", "step", "step"]),
        st.integers(0, 7),
        st.integers(1, 150),
        st.integers(1, 40),
        st.sampled_from([1, 2]),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(_ACTIONS)
def test_blocks_and_queues_always_add_up(actions: list[tuple[str, int, int, int, int]]) -> None:
    core = make()
    known: set[bytes] = set()
    running: Step | None = None
    for action, number, num_prompt, max_tokens, token in actions:
        name = f"r{number}"
        salt = policy_salt(POLICIES[number % len(POLICIES)], b"")
        options = {"priority": number % 2, "prefill_only": action in ("hold", "keep"), "tenant_salt": salt}
        one = request(name, num_prompt, max_tokens, token, keeps_partial=action == "keep", **options)
        try:
            match action:
                case "add" | "hold" | "keep":
                    core.add(one)
                case "reserve":
                    core.reserve(one)
                case "start":
                    core.start(name, 1)
                case "cancel":
                    core.cancel(name)
                case "begin" | "step" if running is None:
                    running = core.begin_step()
        except (NoCapacity, InvalidRequest, NotFound):
            pass
        if action in ("end", "step") and running is not None:
            result = end(core, running)
            assert not known & set(result.stored_keys)
            assert known >= set(result.evicted_keys)
            known = (known - set(result.evicted_keys)) | set(result.stored_keys)
            running = None
        core.check_integrity()
    core.cancel_all()
    stats = core.stats()
    assert stats.num_free_blocks == NUM_BLOCKS
    assert stats.num_running == stats.num_waiting == stats.num_reserved == stats.num_held == 0


@settings(max_examples=300)
@given(_ACTIONS)
def test_what_a_request_finds_here_is_its_own_prefix(actions: list[tuple[str, int, int, int, int]]) -> None:
    """What is written for one request, or computed, is what later ones find, and no one overwrites or evicts it."""
    core = make()
    content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end, or as far as they are there
    written: dict[str, list[int]] = {}  # requests that were reserved: their full blocks

    def write(sequence: Sequence, first: int, end: int) -> None:
        for index in range(first // BLOCK, -(-end // BLOCK)):
            content[sequence.blocks[index]] = tuple(sequence.token_ids[: min((index + 1) * BLOCK, end)])

    def check(sequence: Sequence, num_tokens: int) -> None:
        for index in range(-(-num_tokens // BLOCK)):
            known = tuple(sequence.token_ids[: min((index + 1) * BLOCK, num_tokens)])
            assert content[sequence.blocks[index]][: len(known)] == known

    for action, number, num_prompt, max_tokens, token in actions:
        name = f"r{number}"
        tokens = (token,) * (num_prompt // 2) + (1,) * (num_prompt - num_prompt // 2)
        prefill_only, keeps_partial = action in ("hold", "keep"), action == "keep"
        sampling = SamplingParams(max_tokens)
        one = EngineRequest(name, tokens, sampling, prefill_only=prefill_only, keeps_partial=keeps_partial)
        try:
            match action:
                case "add" | "hold" | "keep":
                    core.add(one)
                case "reserve":
                    num_held = core.reserve(one)
                    sequence = core.find(name)
                    assert num_held % BLOCK == 0
                    assert num_held <= num_prompt
                    write(sequence, num_held, num_prompt)
                    written[name] = sequence.blocks[: num_prompt // BLOCK]
                case "start":
                    core.start(name, 1)
                case "cancel":
                    core.cancel(name)
                case _:
                    step = core.begin_step()
                    for item in step.schedule.scheduled:
                        check(item.sequence, item.sequence.num_computed)
                        write(item.sequence, item.sequence.num_computed, item.start + item.num_tokens)
                    end(core, step)
        except (NoCapacity, InvalidRequest, NotFound):
            pass
        for other in _present(core):
            if other.request_id in written and other.state == "reserved":
                assert other.blocks[: len(written[other.request_id])] == written[other.request_id]
            check(other, other.num_prompt if other.state == "reserved" else other.num_computed)
        core.check_integrity()


def _present(core: EngineCore) -> Iterator[Sequence]:
    for number in range(8):
        with suppress(NotFound):
            yield core.find(f"r{number}")


def test_an_answer_is_found_by_the_next_turn_of_its_chat() -> None:
    core = make()
    assert core.reserve(request("turn 1", 40, 30)) == 0
    core.start("turn 1", 1)
    while core.has_work():
        end(core, core.begin_step())
    assert core.reserve(request("turn 2", 90, 30)) == 64  # 40 + 29 tokens were run: four whole blocks
    core.cancel("turn 2")
    assert core.reserve(request("turn 3", 64, 30)) == 64
    core.forget_prefixes()
    core.start("turn 3", 1)
    assert end(core, core.begin_step()).outputs


def test_private_kv_is_found_by_no_other_request() -> None:
    core = make()
    core.reserve(request("lossy", 40, 30))
    core.start("lossy", 1, is_private=True)
    stored: list[bytes] = []
    while core.has_work():
        result = end(core, core.begin_step())
        stored += result.stored_keys
        assert not result.chains
    assert not stored
    assert core.reserve(request("next", 64, 30)) == 0


def test_a_request_goes_on_within_the_block_in_which_its_computing_was_left_off() -> None:
    core = make()
    for num_tokens, num_cached in ((20, 0), (40, 20)):
        core.add(request(f"ahead {num_tokens}", num_tokens, 1, prefill_only=True, keeps_partial=True))
        result = end(core, core.begin_step())
        assert (result.num_cached_tokens, result.num_prefill_tokens) == (
            {f"ahead {num_tokens}": num_cached},
            num_tokens - num_cached,
        )
        assert not core.has_work()
        assert core.stats().num_held == 0
        core.check_integrity()
    assert core.reserve(request("handed over", 60, 9)) == 32, "whole blocks"
    for name, num_cached in (("first", 40), ("second", 32)):
        core.add(request(name, 40, 9, output_token_ids=(1, 1)))
        result = end(core, core.begin_step())
        assert result.num_cached_tokens == {name: num_cached}
        assert [output.position for output in result.outputs][-1] == 2
    while core.has_work():
        end(core, core.begin_step())
    core.check_integrity()


def test_what_is_cancelled_or_under_a_policy_leaves_no_partial_block() -> None:
    core, salt = make(), policy_salt(KVPolicy(16, 16), b"")
    core.add(request("cancelled", 20, 1, prefill_only=True, keeps_partial=True))
    step = core.begin_step()
    core.cancel("cancelled")
    end(core, step)
    core.add(request("under a policy", 20, 1, prefill_only=True, keeps_partial=True, tenant_salt=salt))
    end(core, core.begin_step())
    for name, its_salt in (("one", b""), ("two", salt)):
        core.add(request(name, 30, 1, tenant_salt=its_salt))
        assert set(end(core, core.begin_step()).num_cached_tokens.values()) <= {0, 16}


@pytest.mark.parametrize("state", ["reserved", "held"])
def test_a_request_is_found_in_its_state_alone(state: Any) -> None:
    core = make()
    core.add(request("r", 5, 1))
    with pytest.raises(NotFound, match=state):
        core.find_in(state, "r")
