"""Profiles: named ones, files, the time scale; and what simulated workers answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.sim.answer_model import AnswerModel
from halfmoon.sim.latency_sources.worker_profile import DEFAULT_PROFILE, INSTANT, PROFILES, load_profile


def written(path: Path, **fields: object) -> str:
    file = path / "mine.json"
    file.write_text(json.dumps(fields))
    return str(file)


def test_a_file_says_what_is_different(tmp_path: Path) -> None:
    found = load_profile(written(tmp_path, prefill=[0.1, 0.2, 0.3], kv_tokens=1000))
    assert (found.name, found.prefill, found.kv_tokens) == ("mine", PrefillModel(0.1, 0.2, 0.3), 1000)
    assert found.step == PROFILES[DEFAULT_PROFILE].step
    assert load_profile(written(tmp_path, like=INSTANT)).step == PROFILES[INSTANT].step


@pytest.mark.parametrize(
    "fields",
    [
        {"colour": "red"},
        {"like": "nothing"},
        {"prefill": [1]},
        {"step": [-1, 0, 0]},
        {"kv_tokens": 0},
        {"nests_steps": "no"},
        {"follows_targets": 0},
    ],
    ids=str,
)
def test_a_wrong_file_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        load_profile(written(tmp_path, **fields))


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=INSTANT):
        load_profile("fast")


def test_a_time_scale_divides_every_time() -> None:
    profile = PROFILES[DEFAULT_PROFILE]
    scaled = profile.scaled(4)
    assert scaled.prefill.seconds(1000, 500) == pytest.approx(profile.prefill.seconds(1000, 500) / 4)
    assert scaled.step.seconds(10, 5000) == pytest.approx(profile.step.seconds(10, 5000) / 4)
    assert scaled.transfer_s(1000) == pytest.approx(profile.transfer_s(1000) / 4)
    assert scaled.kv_tokens == profile.kv_tokens


@given(st.integers(0, 2**64 - 1), st.integers(1, 3000), st.integers(0, 100))
def test_lengths_keep_the_limits_and_the_law(seed: int, max_tokens: int, min_tokens: int) -> None:
    min_tokens = min(min_tokens, max_tokens)
    drawn, told = AnswerModel(1000), AnswerModel(1000, length="seed")
    for model in (drawn, told):
        found = model.num_tokens(seed, max_tokens, min_tokens)
        assert max(1, min_tokens) <= found <= max_tokens
        assert found == model.num_tokens(seed, max_tokens, min_tokens)
        assert model.num_tokens(seed, max_tokens, ignore_eos=True) == max_tokens
    assert told.num_tokens(seed, max_tokens) == max(1, min(seed, max_tokens))


def test_drawn_lengths_lie_around_the_median() -> None:
    model = AnswerModel(1000, median_tokens=100)
    lengths = sorted(model.num_tokens(seed, 100_000) for seed in range(999))
    assert 85 <= lengths[499] <= 115
    assert lengths[50] < 50
    assert lengths[950] > 200


@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.integers(4, 200_000))
def test_random_tokens_are_of_the_vocabulary_s_middle(seed: int, position: int, vocab_size: int) -> None:
    token = AnswerModel(vocab_size).token_id(seed, position, (0,))
    assert vocab_size // 4 <= token < vocab_size // 2
    assert token == AnswerModel(vocab_size).token_id(seed, position, (1,))


def test_an_echo_repeats_the_prompt() -> None:
    model = AnswerModel(100, text="echo")
    assert [model.token_id(7, position, (5, 6, 7)) for position in range(5)] == [5, 6, 7, 5, 6]
