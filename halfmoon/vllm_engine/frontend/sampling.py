"""Our sampling parameters as vLLM's, one to one, or drawn by our own sampler inside vLLM. No vLLM."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.vllm_engine.messages import OwnDraw

_MOST_LOGIT_BIAS = 100.0  # vLLM cuts larger ones off
_TEMPERATURES = (0.01, 2.0)  # vLLM raises smaller ones, and refuses larger ones
_SEEDS = 1 << 63
_GOLDEN = 0x9E3779B97F4A7C15  # successive multiples are far apart


def vllm_sampling(
    request: EngineRequest, eos_token_ids: Collection[int], num_before: int, *, is_on_cpu: bool = False
) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams`. The prompt given to vLLM ends with the `num_before` tokens already drawn.

    Ends of sequence are named as stop tokens, so that no file of the model adds others. vLLM's generator is begun
    anew for the position, so a token depends on the seed and on where the engine that drew it began. On a CPU our
    sampler draws whatever has a seed: vLLM winds its generator back behind each part of a prompt, and dies of it there.
    """
    sampling = request.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    max_tokens = 1 if request.prefill_only else sampling.max_tokens - num_before
    common = {
        "max_tokens": max_tokens,
        "stop_token_ids": sorted(stops),
        "ignore_eos": True,
        "logprobs": sampling.num_top_logprobs,
        "prompt_logprobs": None if num_before else sampling.num_prompt_logprobs,
        "detokenize": False,
    }
    if needs_own_sampler(sampling, num_before) or (is_on_cpu and sampling.temperature):
        draw = OwnDraw(request.request_id, sampling, num_before)
        return {**common, "temperature": 0.0, "extra_args": {OwnDraw.NAME: draw.params()}}
    return {
        **common,
        "min_tokens": max(0, min(sampling.min_tokens - num_before, max_tokens)),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": (sampling.seed + num_before * _GOLDEN) % _SEEDS,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
    }


def needs_own_sampler(sampling: SamplingParams, num_before: int) -> bool:
    """Whether vLLM cannot say it, or counts the answer as the prompt: structure, words, penalties, extremes."""
    return (
        sampling.constraint is not None
        or bool(sampling.allowed_token_ids or sampling.bad_words)
        or bool(num_before and (sampling.presence_penalty or sampling.frequency_penalty))
        or sampling.top_p == 0
        or not (sampling.temperature == 0 or _TEMPERATURES[0] <= sampling.temperature <= _TEMPERATURES[1])
        or any(abs(bias) > _MOST_LOGIT_BIAS for bias in sampling.logit_bias.values())
    )
