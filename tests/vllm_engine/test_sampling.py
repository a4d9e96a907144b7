"""Our sampling parameters become vLLM's, and our own sampler draws what it cannot say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halfmoon.engine.request import Constraint, EngineRequest, SamplingParams
from halfmoon.vllm_engine.frontend.sampling import vllm_sampling
from halfmoon.vllm_engine.messages import OwnDraw

EOS = frozenset({2, 7})


def asked(num_before: int = 0, *, prefill_only: bool = False, **more: Any) -> dict[str, Any]:
    sampling = SamplingParams(max_tokens=10, **more)
    return vllm_sampling(EngineRequest("r", (1, 2), sampling, prefill_only=prefill_only), EOS, num_before)


def test_every_parameter_is_mapped() -> None:
    found = asked(
        temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=3, min_tokens=4, presence_penalty=0.5,
        frequency_penalty=0.25, repetition_penalty=1.5, logit_bias={5: -2.0}, stop_token_ids=(9,), num_top_logprobs=3,
        num_prompt_logprobs=2,
    )  # fmt: skip
    assert found == {
        "max_tokens": 10, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 3, "min_tokens": 4,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "logit_bias": {5: -2.0},
        "stop_token_ids": [2, 7, 9], "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 2,
        "detokenize": False,
    }  # fmt: skip


def test_prompts_log_probabilities_come_once() -> None:
    assert asked(1, num_prompt_logprobs=2)["prompt_logprobs"] is None


def test_tokens_already_drawn_count_against_the_limits() -> None:
    found = asked(4, min_tokens=6)
    assert (found["max_tokens"], found["min_tokens"]) == (6, 2)
    assert asked(7, min_tokens=6)["min_tokens"] == 0


def test_a_prefill_draws_one_token() -> None:
    assert asked(prefill_only=True, min_tokens=5)["max_tokens"] == 1
    assert asked(prefill_only=True, min_tokens=5)["min_tokens"] == 1


def test_the_seed_differs_by_position_and_fits() -> None:
    seeds = {asked(position, seed=(1 << 63) - 1)["seed"] for position in range(9)}
    assert len(seeds) == 9
    assert all(isinstance(seed, int) and 0 <= seed < 1 << 63 for seed in seeds)


def test_our_sampler_draws_on_a_cpu_what_has_a_seed() -> None:
    """vLLM winds a request's generator back behind each part of its prompt, which those of CPUs cannot."""

    def drawn(temperature: float) -> dict[str, Any]:
        request = EngineRequest("r", (1, 2), SamplingParams(max_tokens=10, temperature=temperature, seed=3))
        return vllm_sampling(request, EOS, 0, is_on_cpu=True)

    assert "seed" not in drawn(0.5)
    assert OwnDraw.of(drawn(0.5)["extra_args"][OwnDraw.NAME]) is not None
    assert "extra_args" not in drawn(0.0)


def test_ignored_ends_are_no_stop_tokens() -> None:
    assert asked(ignore_eos=True, stop_token_ids=(9,))["stop_token_ids"] == [9]


@pytest.mark.parametrize(
    ("num_before", "more"),
    [
        (0, {"constraint": Constraint("regex", "a+")}),
        (1, {"presence_penalty": 0.5}),
        (1, {"frequency_penalty": -0.5, "stop_token_ids": (9,), "min_tokens": 3}),
        (0, {"top_p": 0.0}),
        (0, {"temperature": 2.5}),
        (0, {"temperature": 0.005}),
        (0, {"logit_bias": {3: 101.0}}),
        (0, {"allowed_token_ids": (3, 5)}),
        (0, {"bad_words": ((3,), (4, 5))}),
    ],
)
def test_our_sampler_draws_what_vllm_cannot(num_before: int, more: dict[str, Any]) -> None:
    found = asked(num_before, **more, num_top_logprobs=2)
    assert (found["temperature"], found["max_tokens"], found["logprobs"]) == (0.0, 10 - num_before, 2)
    assert not {"presence_penalty", "logit_bias", "min_tokens", "seed"} & found.keys()
    draw = OwnDraw.of(json.loads(json.dumps(found["extra_args"]))[OwnDraw.NAME])
    assert draw == OwnDraw("r", SamplingParams(max_tokens=10, **more, num_top_logprobs=2), num_before)


def test_vllm_draws_everything_else() -> None:
    assert "extra_args" not in asked(presence_penalty=0.5, logit_bias={3: 100.0}, top_p=0.1)
