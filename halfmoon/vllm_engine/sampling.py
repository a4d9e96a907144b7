"""Our sampling parameters as vLLM's, one to one; what cannot be said there is refused by name. No vLLM."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.errors import InvalidRequest

_MOST_LOGIT_BIAS = 100.0  # vLLM cuts larger ones off
_SEEDS = 1 << 63
_GOLDEN = 0x9E3779B97F4A7C15  # successive multiples are far apart


def vllm_sampling(request: EngineRequest, eos_token_ids: Collection[int], num_before: int) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams`. The prompt given to vLLM ends with the `num_before` tokens already drawn.

    Ends of sequence are named as stop tokens, so that no file of the model adds others. vLLM's generator is begun
    anew for the position, so a token depends on the seed and on where the engine that drew it began.
    Raises InvalidRequest.
    """
    sampling = request.sampling
    check_sampling(sampling, num_before)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    max_tokens = 1 if request.prefill_only else sampling.max_tokens - num_before
    return {
        "max_tokens": max_tokens,
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
        "stop_token_ids": sorted(stops),
        "ignore_eos": True,
        "logprobs": sampling.num_top_logprobs,
        "detokenize": False,
    }


def check_sampling(sampling: SamplingParams, num_before: int) -> None:
    """Raises InvalidRequest, naming the parameter, for what vLLM cannot do, or not behind `num_before` tokens."""
    if sampling.constraint is not None:
        raise InvalidRequest(
            "workers with vLLM do not follow a structure yet: leave response_format, structured_outputs and forced "
            "tools out, or serve with our own engine",
            param=sampling.constraint.kind,
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(sampling, name) and num_before:
            raise InvalidRequest(
                f"{name} counts earlier tokens of the answer, which a worker with vLLM takes for the prompt when it "
                "goes on with an answer: leave it out, or decode with our own engine",
                param=name,
            )
    if sampling.top_p == 0:
        raise InvalidRequest("top_p must be above 0 on workers with vLLM; use temperature 0", param="top_p")
    if any(abs(bias) > _MOST_LOGIT_BIAS for bias in sampling.logit_bias.values()):
        raise InvalidRequest(
            f"workers with vLLM take biases of -{_MOST_LOGIT_BIAS:g} to {_MOST_LOGIT_BIAS:g}", param="logit_bias"
        )
