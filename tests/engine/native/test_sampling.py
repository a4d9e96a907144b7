"""The kernels choose the tokens that the rules of `sampler.py` name, whatever the batch and the number of threads."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from halfmoon.engine.checkpoint.converted import default_cache_dir
from halfmoon.engine.native.compiler import compiled
from halfmoon.engine.native.library import NativeLibrary
from halfmoon.engine.native.sampling import native_sampler
from halfmoon.engine.request import SamplingParams
from halfmoon.engine.sampler import TORCH_SAMPLER, SamplerOps, SamplingRow, penalise, uniform

SIZES = (1, 2, 15, 16, 17, 255, 1023, 1024, 1025, 3000, 49152)  # of vocabularies; a chunk has 1,024
NEAR = 1e-5  # shares of the probability that float32 may get wrong


def ops(num_threads: int = 2) -> SamplerOps:
    return native_sampler(NativeLibrary(compiled(default_cache_dir()), torch.float32, num_threads))


def row(token_ids: list[int] | None = None, num_prompt: int = 1, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**{"max_tokens": 1000, **params}), token_ids or [0], num_prompt)


def random(num_rows: int, size: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed))


def kept(logits: Tensor, params: SamplingParams, more: float) -> NDArray[np.float64]:
    """Probabilities of what is kept, [vocab_size], in float64, of ids in order; `more` of them where it is near."""
    weights = np.exp((logits.double().numpy() - float(logits.max())) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    ranked = weights[order]
    number = min(params.top_k or len(ranked), len(ranked))
    number = min(number, int((ranked >= params.min_p * (1 - more)).sum()))
    number = max(number, 1)
    shares = np.cumsum(ranked) / ranked[:number].sum()
    if params.top_p < 1:
        number = min(number, int((shares < params.top_p + more).sum()) + 1)
    out = np.zeros_like(weights)
    out[order[:number]] = ranked[:number]
    share: NDArray[np.float64] = out / out.sum()
    return share


def assert_right(token: int, logits: Tensor, of: SamplingRow) -> None:
    least, most = (np.cumsum(kept(logits, of.params, more)) for more in (-NEAR, NEAR))
    shares = kept(logits, of.params, NEAR)
    point = uniform(of.params.seed, of.position)
    assert 0 <= token < len(shares)
    assert shares[token] > 0
    before = min(least[token] - shares[token], most[token] - shares[token])
    assert before - 3 * NEAR <= point <= max(least[token], most[token]) + 3 * NEAR


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from((0.01, 0.3, 1.0, 1.0, 1.7, 60.0)),
        "top_k": st.sampled_from((0, 0, 1, 2, 20, 300, 1024, 5000, 10**6)),
        "top_p": st.sampled_from((1.0, 1.0, 0.999, 0.95, 0.5, 0.1, 1e-9)),
        "min_p": st.sampled_from((0.0, 0.0, 1e-6, 0.05, 1.0)),
    }
)


@settings(max_examples=300)
@given(
    params=PARAMS, size=st.sampled_from(SIZES), scale=st.sampled_from((0.1, 1.0, 4.0, 30.0)), seed=st.integers(0, 10**6)
)
def test_a_token_is_where_its_number_falls(params: dict[str, Any], size: int, scale: float, seed: int) -> None:
    logits = (256 * random(1, size, scale, seed)).round() / 256  # equal, or far enough apart for weights in float32
    of = row([1, 2, 3], seed=seed, **params)
    (token,) = ops().choose(logits, [of], {})
    assert_right(token, logits[0], of)


@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx512f -mno-avx2 -mno-fma"])
def test_other_processors_draw_likewise(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor's own path is one of those")
    monkeypatch.setenv("CC", f"cc {flags}")
    choose = ops().choose
    kinds: list[dict[str, Any]] = [{}, {"top_k": 30}, {"top_p": 0.95}, {"min_p": 0.01, "top_p": 0.8}, {"top_k": 2000}]
    for size in SIZES:
        logits, rows = random(20, size), [row(seed=index, **kinds[index % 5]) for index in range(20)]
        for token, of_row, of in zip(choose(logits, rows, {}), logits, rows, strict=True):
            assert_right(token, of_row, of)


@settings(max_examples=60)
@given(params=PARAMS, size=st.sampled_from(SIZES[3:-1]), seed=st.integers(0, 10**6))
def test_torch_draws_likewise(params: dict[str, Any], size: int, seed: int) -> None:
    logits, of = random(1, size, 2.0, seed), row(seed=seed, **params)
    (token,) = TORCH_SAMPLER.choose(logits, [of], {})
    assert_right(token, logits[0], of)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_rows_depend_on_neither_each_other_nor_threads(num_threads: int) -> None:
    logits = random(23, 5000)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 30, "top_p": 0.9},
        {"top_p": 0.95, "temperature": 1.5},
        {"min_p": 0.02, "repetition_penalty": 1.2},
    ]
    rows = [row([*range(index + 3)], seed=index, **kinds[index % 5]) for index in range(23)]
    together = ops(num_threads).choose(logits, rows, {})
    alone = [ops(1).choose(logits[index : index + 1], rows[index : index + 1], {})[0] for index in range(23)]
    assert together == alone
    assert ops(num_threads).choose(logits.flip(0), rows[::-1], {})[::-1] == alone
    assert len(set(together)) > 10


def test_of_equal_tokens_the_first_are_kept() -> None:
    choose = ops().choose
    logits = torch.zeros(1, 3000)
    logits[0, [7, 1999]] = 1.0
    drawn = {choose(logits, [row(seed=seed, top_k=5)], {})[0] for seed in range(300)}
    assert drawn == {0, 1, 2, 7, 1999}
    half = {choose(torch.zeros(1, 3000), [row(seed=seed, top_p=0.5)], {})[0] for seed in range(3000)}
    assert max(half) < 1500
    assert len(half) > 1000
    assert choose(logits, [row(temperature=0.0)], {}) == [7]
    assert {choose(logits, [row(seed=seed, min_p=1.0)], {})[0] for seed in range(50)} == {7, 1999}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_cannot_be_drawn_has_no_token(size: int, temperature: float) -> None:
    logits = random(4, size)
    for index, strange in enumerate((float("nan"), float("inf"))):
        logits[index, (7 * size) // 8] = strange
    logits[2] = float("-inf")
    tokens = ops().choose(logits, [row(temperature=temperature)] * 4, {})
    assert tokens[:3] == [-1, -1, -1]
    assert 0 <= tokens[3] < size


@pytest.mark.parametrize("size", SIZES)
def test_banned_tokens_are_not_drawn(size: int) -> None:
    choose, logits = ops().choose, torch.full((1, size), float("-inf"))
    logits[0, size // 2 :: 3] = 0.5
    for params in ({}, {"top_k": 700}, {"top_p": 0.99}, {"min_p": 0.5}):
        tokens = {choose(logits, [row(seed=seed, **params)], {})[0] for seed in range(40)}
        assert all(logits[0, token] == 0.5 for token in tokens)


def test_unlikely_tokens_are_no_weights() -> None:
    """Those below 2^-126 of the likeliest, down to the smallest numbers."""
    choose, logits = ops().choose, torch.tensor([[-88.0, -90.0, 0.0, -200.0, -1e30, -3.4e38]])
    for params in ({}, {"top_k": 3}, {"top_p": 1 - 1e-12}, {"temperature": 1e-5}):
        assert {choose(logits, [row(seed=seed, **params)], {})[0] for seed in range(50)} == {2}
    assert choose(torch.tensor([[3.4e38, -3.4e38, 3.3e38]]), [row()], {}) == [0]


@settings(max_examples=60)
@given(
    ids=st.lists(st.integers(0, 49), min_size=1, max_size=60),
    num_prompt=st.integers(0, 60),
    repetition=st.sampled_from((1.0, 1.1, 2.0, 0.5)),
    presence=st.sampled_from((0.0, 0.5, -1.0)),
    frequency=st.sampled_from((0.0, 0.25, 2.0)),
    seed=st.integers(0, 1000),
)
def test_penalties_are_those_of_torch(
    ids: list[int], num_prompt: int, repetition: float, presence: float, frequency: float, seed: int
) -> None:
    """The order of all tokens, one after the other banned, is that of torch's logits."""
    penalties = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "temperature": 0.0,
    }
    of = row(ids, min(num_prompt, len(ids)), **penalties)
    logits = random(1, 60, seed=seed)
    expected = logits[0].clone()
    penalise(expected, of)
    choose = ops().choose
    for _ in range(20):
        (token,) = choose(logits, [of], {})
        assert float(expected[token]) == pytest.approx(float(expected.max()), abs=1e-5)
        logits[0, token] = expected[token] = float("-inf")


def test_tokens_kept_as_an_array_are_those_of_the_list() -> None:
    logits, ids = random(1, 500), [5, 5, 80, 499, 3]
    listed = row(ids, 2, repetition_penalty=3.0, frequency_penalty=1.0)
    for seed in range(30):
        seeded = replace(listed, params=replace(listed.params, seed=seed))
        assert ops().choose(logits, [replace(seeded, ids=array("q", ids))], {}) == ops().choose(logits, [seeded], {})


@pytest.mark.parametrize("outside", [-1, 500, 1 << 40])
def test_a_token_outside_the_vocabulary_fails_its_row_alone(outside: int) -> None:
    rows = [row([3, outside], repetition_penalty=2.0), row([3, 4], repetition_penalty=2.0)]
    first, second = ops().choose(random(2, 500), rows, {})
    assert first == -1
    assert second >= 0


def test_numbers_are_those_of_numpy() -> None:
    library = NativeLibrary(compiled(default_cache_dir()), torch.float32, 1)
    for seed in (0, 1, -1, 42, 1 << 63, (1 << 64) - 1, 123456789012345678):
        for position in (0, 1, 7, 4095, 1 << 31):
            assert library.uniform_number(seed, position) == uniform(seed, position)


def test_the_logits_stay_as_they_were() -> None:
    logits = random(3, 2000)
    before = logits.clone()
    ops().choose(logits, [row([1, 2], repetition_penalty=2.0), row(top_p=0.5), row(top_k=4)], {})
    assert torch.equal(logits, before)
    half = ops().choose(logits.bfloat16(), [row(temperature=0.0)] * 3, {})
    assert half == logits.bfloat16().float().argmax(dim=1).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_log_probabilities_are_those_of_torch(size: int) -> None:
    logits = random(6, size, 5.0)
    token_ids, num_top = [size * index // 6 for index in range(6)], [0, 1, 5, 20, min(size, 200), 0]
    for got, one, token, num in zip(
        ops().logprobs(logits, token_ids, num_top), logits, token_ids, num_top, strict=True
    ):
        expected = one.double().log_softmax(dim=-1)
        top = expected.topk(min(num, size))
        assert got.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert [token_id for token_id, _ in got.top] == top.indices.tolist()
        assert [value for _, value in got.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_of_equal_log_probabilities_the_first_come_first() -> None:
    logits = torch.zeros(1, 3000)
    logits[0, [2999, 1500]] = 1.0
    (got,) = ops().logprobs(logits, [7], [5])
    assert [token for token, _ in got.top] == [1500, 2999, 0, 1, 2]
    logits[0, 3:] = float("-inf")
    (got,) = ops().logprobs(logits, [3], [5])
    assert [token for token, _ in got.top] == [0, 1, 2]
    assert got.logprob == float("-inf")


@pytest.mark.parametrize("size", SIZES)
def test_beside_a_logit_that_is_not_a_number_no_log_probability_is_one(size: int) -> None:
    """It may be a banned token's: then another one is drawn."""
    for place in {0, size - 1}:
        logits = random(1, size)
        logits[0, place] = float("nan")
        (got,) = ops().logprobs(logits, [size // 2], [3])
        assert np.isnan([got.logprob, *(value for _, value in got.top)]).all()
