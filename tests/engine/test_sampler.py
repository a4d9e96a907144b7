"""What is drawn: the right distribution, reproducibly, row by row whatever the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from halfmoon.engine import sampler
from halfmoon.engine.checkpoint.converted import default_cache_dir
from halfmoon.engine.constraint import TokenMasks
from halfmoon.engine.native.compiler import compiled
from halfmoon.engine.native.library import NativeLibrary
from halfmoon.engine.native.sampling import native_sampler
from halfmoon.engine.request import ERROR_TOKEN_ID, Constraint, SamplingParams
from halfmoon.engine.sampler import SamplingRow, ban_and_bias, num_kept, penalise, prompt_logprobs, sample, uniform

EOS = frozenset({2})
VOCAB_SIZE = 600  # more than the sampler looks at first


@pytest.fixture(params=["torch", "native"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `sample` computes by."""
    if request.param == "native":
        library = NativeLibrary(compiled(default_cache_dir()), torch.float32, 2)
        monkeypatch.setattr(sampler, "TORCH_SAMPLER", native_sampler(library))
    return str(request.param)


def row(token_ids: list[int] | None = None, num_prompt: int = 1, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**{"max_tokens": 1000, **params}), token_ids or [0], num_prompt)


def logits(seed: int = 0, rows: int = 1) -> Tensor:
    return 3 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def draws(values: Tensor, count: int, **params: Any) -> Tensor:
    """Relative frequencies of `count` draws, one seed each, [vocab_size]."""
    rows = [row(seed=seed, **params) for seed in range(count)]
    tokens = sample(values.expand(count, -1), rows, EOS)
    return torch.bincount(torch.tensor([token.token_id for token in tokens]), minlength=values.shape[-1]) / count


def test_greedy_takes_the_largest() -> None:
    values = logits(rows=4)
    got = [token.token_id for token in sample(values, [row(temperature=0.0)] * 4, EOS)]
    assert got == values.argmax(dim=1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 7, "top_p": 0.7, "temperature": 1.5},
        {"top_p": 0.6, "temperature": 9.0},
    ],
)
def test_draws_follow_the_distribution_of_transformers(params: dict[str, Any]) -> None:
    values = logits()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.get("temperature", 1.0)))])
    if "top_k" in params:
        warpers.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(MinPLogitsWarper(params["min_p"]))
    no_tokens: Any = torch.zeros(1, 1, dtype=torch.long)
    expected = warpers(no_tokens, values.clone()).softmax(dim=-1)[0]
    count = 4000
    got = draws(values, count, **params)
    assert not got[expected == 0].any()
    spread = (expected * (1 - expected) / count).sqrt()
    assert ((got - expected).abs() <= 5 * spread + 1e-3).all()


def test_the_whole_vocabulary_is_considered_when_the_cut_lies_deep() -> None:
    flat = torch.zeros(1, VOCAB_SIZE)
    kept = int((draws(flat, 3000, top_p=0.9) > 0).sum())
    assert 256 < kept <= math.ceil(0.9 * VOCAB_SIZE)
    assert int((draws(flat, 3000, min_p=0.5) > 0).sum()) > 256


@settings(max_examples=50)
@given(
    weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=30),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_something_is_always_kept_and_stricter_keeps_less(
    weights: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    top = torch.tensor(sorted(weights, reverse=True))
    top = top / top.sum()
    params = SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = num_kept(top, params)
    assert 1 <= kept <= len(top)
    assert kept <= num_kept(top, replace(params, top_p=1.0))
    assert kept <= num_kept(top, replace(params, min_p=0.0))


def test_a_draw_does_not_depend_on_the_batch() -> None:
    values = logits(rows=6)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 9}, {"top_p": 0.9}, {"temperature": 0.0}, {"min_p": 0.2}]
    kinds.append({"top_k": 300})
    rows = [row(seed=11 + index, **params) for index, params in enumerate(kinds)]
    together = sample(values, rows, EOS)
    alone = [sample(values[i : i + 1], [rows[i]], EOS)[0] for i in range(6)]
    backwards = sample(values.flip(0), rows[::-1], EOS)[::-1]
    assert together == alone == backwards


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and the most numbers that one of them makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = self.most_made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not made._is_view():
            self.most_made = max(self.most_made, made.numel())
        return made


def test_more_rows_of_the_whole_vocabulary_are_not_more_launches() -> None:
    counts = []
    for num_rows in (8, 2, 8):  # the first one makes room
        with Launches() as launches:
            sample(logits(rows=num_rows), [row(seed=seed) for seed in range(num_rows)], EOS)
        counts.append(launches.num)
    assert counts[1] == counts[2]


def test_many_rows_are_drawn_as_each_alone() -> None:
    values = logits(rows=70)
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {}, {"top_k": 3}]
    rows = [row(seed=index, **kinds[index % 4]) for index in range(70)]
    alone = [sample(values[index : index + 1], rows[index : index + 1], EOS)[0] for index in range(70)]
    assert sample(values, rows, EOS) == alone
    assert len({token.token_id for token in alone}) > 20


def test_a_long_prompt_has_log_probabilities_made_in_parts() -> None:
    values, ids = logits(rows=100), [7 * index % VOCAB_SIZE for index in range(100)]
    with Launches() as launches:
        got = prompt_logprobs(values, ids, 2)
    assert launches.most_made < values.numel() / 2
    expected = values.log_softmax(dim=-1)
    assert [one.logprob for one in got] == pytest.approx(expected[range(100), ids].tolist())
    assert [one.top[0][0] for one in got] == values.argmax(dim=-1).tolist()
    assert prompt_logprobs(values[:0], [], 2) == []


def test_seed_and_position_each_change_the_draw() -> None:
    numbers = {uniform(seed, position) for seed in range(40) for position in range(40)}
    assert len(numbers) == 1600
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 1600 - 0.5) < 0.05
    assert uniform(-1, 3) == uniform((1 << 64) - 1, 3)


def test_the_number_is_fixed_for_all_machines_and_versions() -> None:
    assert uniform(42, 7) == 0.4074136540795371


def test_repetition_penalty_is_that_of_transformers() -> None:
    values, seen = logits(), [3, 5, 5, 9]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), values.clone())[0]
    got = values[0].clone()
    penalise(got, row(seen, num_prompt=2, repetition_penalty=1.7))
    torch.testing.assert_close(got, expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    values = logits()[0]
    got = values.clone()
    penalise(got, row([3, 3, 5, 5, 9], num_prompt=2, presence_penalty=0.5, frequency_penalty=0.25))
    change = torch.zeros(VOCAB_SIZE)
    change[5], change[9] = -1.0, -0.75
    torch.testing.assert_close(got, values + change)


def test_bias_and_bans() -> None:
    biased = row(temperature=0.0, logit_bias={17: 100.0, 18: -100.0})
    assert sample(logits(), [biased], EOS)[0].token_id == 17
    values = torch.zeros(1, VOCAB_SIZE)
    values[0, 2], values[0, 4], values[0, 6] = 3.0, 2.0, 1.0
    early = row([0, 1], temperature=0.0, min_tokens=2, stop_token_ids=(4,))
    assert sample(values, [early], EOS)[0].token_id == 6
    late = row([0, 1, 1], temperature=0.0, min_tokens=2, stop_token_ids=(4,))
    assert sample(values, [late], EOS)[0].token_id == 2
    deaf = row([0, 1], temperature=0.0, min_tokens=2, ignore_eos=True)
    assert sample(values, [deaf], EOS)[0].token_id == 2


def test_bias_comes_before_penalties_and_bans_stay() -> None:
    values = torch.tensor([-1.0, 2.1, 0.0])
    late = row([0], repetition_penalty=2.0, logit_bias={0: 5.0, 2: 50.0}, min_tokens=1, stop_token_ids=(2,))
    biased = values.clone()
    ban_and_bias(biased, late, EOS)
    assert biased.tolist() == pytest.approx([4.0, 2.1, float("-inf")])
    greedy = replace(late, params=replace(late.params, temperature=0.0))
    assert sample(values.unsqueeze(0), [greedy], EOS)[0].token_id == 1  # the other one has 4 / 2


@pytest.mark.parametrize("temperature", [0.0, 9e-6, 1e-30, 1e-39, 1e-45])
def test_hardly_any_temperature_is_greedy(temperature: float) -> None:
    values = logits()
    rows = [row(temperature=temperature, seed=seed, top_p=0.5, logit_bias={3: 0.1}) for seed in range(5)]
    assert {token.token_id for token in sample(values.expand(5, -1), rows, EOS)} == {int(values.argmax())}


def test_the_one_likeliest_token_is_the_largest_at_any_temperature() -> None:
    """Where weights are too near each other to be told apart, too."""
    values = torch.zeros(1, VOCAB_SIZE)
    values[0, 400] = 1e-3
    for temperature in (0.1, 1.0, 1e4):
        assert sample(values, [row(temperature=temperature, top_k=1)], EOS)[0].token_id == 400


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_that_cannot_be_drawn_leaves_the_others_alone(broken: float) -> None:
    values = logits(rows=3)
    values[1, 77] = broken
    rows = [row(seed=1), row(seed=2), row(seed=3, top_k=4)]
    good = [sample(values[index : index + 1], [rows[index]], EOS)[0].token_id for index in (0, 2)]
    got = [token.token_id for token in sample(values, rows, EOS)]
    assert got == [good[0], ERROR_TOKEN_ID, good[1]]


@pytest.mark.parametrize("more", [{}, {"logit_bias": {1: 1.0}}], ids=["plain", "biased"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_greedy_row_without_a_likeliest_token_fails_alone(broken: float, more: dict[str, Any]) -> None:
    values = logits(rows=2)
    values[1] = broken
    rows = [row(temperature=0.0, **more)] * 2
    good = sample(values[:1], rows[:1], EOS)[0].token_id
    assert [token.token_id for token in sample(values, rows, EOS)] == [good, ERROR_TOKEN_ID]


class OnlyFive(TokenMasks):
    def __init__(self) -> None:
        pass

    def allowed(self, constraint: Constraint, output: Sequence[int]) -> NDArray[np.bool_]:
        allowed: NDArray[np.bool_] = np.arange(VOCAB_SIZE) == 5
        return allowed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bans", [{"bad_words": ((5,),)}, {"min_tokens": 9}])
def test_bans_give_way_to_a_constraint(bans: dict[str, Any], temperature: float) -> None:
    only = row(temperature=temperature, constraint=Constraint("choice", '["x"]'), stop_token_ids=(5,), **bans)
    assert [token.token_id for token in sample(logits(), [only], EOS, OnlyFive())] == [5]


def test_a_row_that_raises_leaves_the_others_alone() -> None:
    values, impossible = logits(rows=2), row(temperature=0.0, logit_bias={VOCAB_SIZE: 1.0})
    got = [token.token_id for token in sample(values, [impossible, row(temperature=0.0)], EOS)]
    assert got == [ERROR_TOKEN_ID, int(values[1].argmax())]


def test_logprobs_are_those_of_the_model() -> None:
    values = logits()
    expected = values[0].log_softmax(dim=-1)
    token = sample(values, [row(temperature=0.7, logit_bias={9: 50.0}, num_top_logprobs=3)], EOS)[0]
    assert token.token_id == 9
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[9]), abs=1e-5)
    top = expected.topk(3)
    assert [token_id for token_id, _ in token.logprobs.top] == top.indices.tolist()
    assert [logprob for _, logprob in token.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    none_asked = sample(values, [row(temperature=0.0, num_top_logprobs=0)], EOS)[0].logprobs
    assert none_asked is not None
    assert none_asked.top == ()
    assert sample(values, [row()], EOS)[0].logprobs is None


def test_logits_are_left_as_they_were() -> None:
    values = logits()
    before = values.clone()
    sample(values, [row([1, 2, 3], repetition_penalty=2.0, logit_bias={1: 5.0})], EOS)
    assert torch.equal(values, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    rows = [row(temperature=temperature, seed=seed, allowed_token_ids=(3, 5)) for seed in range(20)]
    drawn = {token.token_id for token in sample(logits().expand(20, -1), rows, EOS)}
    assert drawn == ({3, 5} if temperature else {int(logits()[0, [3, 5]].argmax()) * 2 + 3})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bans", [{"min_tokens": 9, "stop_token_ids": (3, 5)}, {"bad_words": ((3,), (5,))}], ids=["min_tokens", "bad_words"]
)
def test_bans_that_leave_no_allowed_token_give_way(bans: dict[str, Any], temperature: float) -> None:
    allowed = [row(temperature=temperature, seed=seed, allowed_token_ids=(3, 5)) for seed in range(20)]
    banned = [replace(one, params=replace(one.params, **bans)) for one in allowed]
    values = logits().expand(20, -1)
    assert sample(values, banned, EOS) == sample(values, allowed, EOS)
    partly = replace(banned[0], params=replace(banned[0].params, allowed_token_ids=(3, 4, 5)))
    assert sample(values[:1], [partly], EOS)[0].token_id == 4


def test_the_last_token_of_a_bad_word_is_not_drawn_after_the_others() -> None:
    values = logits()
    best = int(values.argmax())
    words = {"bad_words": ((9, 8, best),), "temperature": 0.0}

    def drawn(output: list[int], **params: Any) -> int:
        return sample(values, [row([8, *output], **params)], EOS)[0].token_id

    assert drawn([9, 8], **words) != best
    assert drawn([1, 9, 8], **words) != best
    assert [drawn(output, **words) for output in ([], [8], [9], [9, 8, 1])] == [best] * 4  # the prompt does not count
    assert drawn([], temperature=0.0, bad_words=((best,),)) != best


@pytest.mark.parametrize("params", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_equally_likely_tokens_are_drawn_whatever_others_ask_for(params: dict[str, Any]) -> None:
    """As many candidates are looked at as the row itself needs: among more, equal ones come in another order."""
    values = logits(rows=2)
    values[:, VOCAB_SIZE // 2 :] = values[:, : VOCAB_SIZE // 2]
    for seed in range(60):
        own, other = row(seed=seed, **params), row(seed=seed, top_k=400)
        alone = sample(values[:1], [own], EOS)
        assert sample(values, [own, other], EOS)[0] == alone[0], seed


def test_a_row_with_bans_is_drawn_beside_others_as_alone() -> None:
    values = logits(rows=6)
    kinds: list[dict[str, Any]] = [
        {"logit_bias": {5: 3.0}, "repetition_penalty": 1.5},
        {},
        {"min_tokens": 9, "stop_token_ids": (4, 5)},
        {"min_tokens": 9, "ignore_eos": True, "top_p": 0.5},
        {"bad_words": ((7,),), "temperature": 0.0, "num_top_logprobs": 2},
        {"allowed_token_ids": (3, 9, 12), "top_k": 2},
    ]
    rows = [row([0, 5, 5], seed=index, **params) for index, params in enumerate(kinds)]
    alone = [sample(values[index : index + 1], [rows[index]], EOS)[0] for index in range(6)]
    assert sample(values, rows, EOS) == alone
    assert sample(values.bfloat16(), rows, EOS)[1:4] == [
        sample(values[index : index + 1].bfloat16(), [rows[index]], EOS)[0] for index in (1, 2, 3)
    ]
