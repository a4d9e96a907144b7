"""Checks whether a request can ever run on an engine, before any block is taken. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from halfmoon.engine.request import SamplingParams
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.kv_policy import most_blocks

_SAMPLING_RANGES = {  # both ends included; no range contains NaN
    "temperature": (0.0, 10_000.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (float(np.float32(0.01)), 100.0),  # as sent; smaller values leave the range of float32
}
_MOST_LOGIT_BIAS = 1000.0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What an engine can hold, and what it cannot do. `max_tokens`: prompt and output together."""

    vocab_size: int
    max_tokens: int
    num_blocks: int
    layout: KVLayout
    unsupported: Mapping[str, str] = field(default_factory=dict)  # by sampling parameter, why it has to be None
    no_policy: str | None = None  # why no request may have a `kv_policy`; None: it may

    def check(self, sequence: Sequence) -> None:
        """Raises InvalidRequest, naming the parameter, for a request that can never run here."""
        request = sequence.request
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        self.check_token_ids(request.prompt_token_ids, "prompt")
        self.check_token_ids(request.output_token_ids, "output_token_ids")
        self.check_token_ids(tuple(request.sampling.logit_bias), "logit_bias")
        self.check_token_ids(request.sampling.stop_token_ids, "stop_token_ids")
        self.check_token_ids(request.sampling.allowed_token_ids, "allowed_token_ids")
        for word in request.sampling.bad_words:
            self.check_token_ids(word, "bad_words")
        for name, why in self.unsupported.items():
            if getattr(request.sampling, name) is not None:
                raise InvalidRequest(why, param=name)
        if sequence.policy is not None and self.no_policy is not None:
            raise InvalidRequest(self.no_policy, param="kv_policy")
        _check_sampling(request.sampling)
        self._check_length(sequence)

    def check_token_ids(self, token_ids: tuple[int, ...], param: str) -> None:
        """Raises InvalidRequest unless all ids are in the vocabulary."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            raise InvalidRequest(f"a token id is outside the vocabulary of {self.vocab_size}", param=param)

    def _check_length(self, sequence: Sequence) -> None:
        num_prompt, max_tokens = sequence.num_prompt, sequence.sampling.max_tokens
        if max_tokens <= sequence.num_output:
            raise InvalidRequest(
                f"max_tokens is {max_tokens}, {sequence.num_output} tokens are there already", param="max_tokens"
            )
        if num_prompt + max_tokens > self.max_tokens:
            raise InvalidRequest(
                f"prompt ({num_prompt}) and max_tokens ({max_tokens}) exceed the context of {self.max_tokens} tokens",
                param="max_tokens",
            )
        num_blocks = most_blocks(sequence.policy, num_prompt, sequence.max_tokens_ever, self.layout.block_tokens)
        if num_blocks > self.num_blocks:
            raise InvalidRequest(
                f"the request can need {num_blocks} blocks of KV memory, this worker has {self.num_blocks}",
                param="max_tokens",
            )


def _check_sampling(sampling: SamplingParams) -> None:
    for name, (low, high) in _SAMPLING_RANGES.items():
        value = getattr(sampling, name)
        if not low <= value <= high:
            raise InvalidRequest(f"{name} must be {low:g} to {high:g}, got {value:g}", param=name)
    if not all(abs(bias) <= _MOST_LOGIT_BIAS for bias in sampling.logit_bias.values()):
        raise InvalidRequest(f"a bias is outside -{_MOST_LOGIT_BIAS:g} to {_MOST_LOGIT_BIAS:g}", param="logit_bias")
    if sampling.constraint is not None:
        if sampling.ignore_eos:
            raise InvalidRequest("a structured output ends by itself: leave ignore_eos out", param="ignore_eos")
        if sampling.min_tokens:
            raise InvalidRequest("a structured output ends by itself: leave min_tokens out", param="min_tokens")
    for name in ("num_top_logprobs", "num_prompt_logprobs"):
        if (getattr(sampling, name) or 0) < 0:
            raise InvalidRequest(f"{name} is {getattr(sampling, name)}", param=name)
