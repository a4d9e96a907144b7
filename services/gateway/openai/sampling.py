"""The sampling parameters of a request, as the workers take them."""

from __future__ import annotations

import secrets
from typing import TypeVar

from halfmoon.errors import InvalidRequest
from halfmoon.pb.types_pb2 import Constraint, SamplingParams, TokenIds
from services.gateway.openai.bodies.schemas import GenerationBody
from services.gateway.openai.served_model import ServedModel

_UINT64 = 2**64 - 1

Number = TypeVar("Number", int, float)


def sampling_of(
    body: GenerationBody,
    model: ServedModel,
    max_tokens: int,
    num_top_logprobs: int | None,
    constraint: Constraint | None = None,
    num_prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling parameters of a body whose output has the form `constraint`.

    Raises InvalidRequest.
    """
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is more than the {max_tokens} tokens allowed", param="min_tokens")
    stop_token_ids = list(dict.fromkeys(body.stop_token_ids or []))
    model.check_token_ids(stop_token_ids, "stop_token_ids")
    allowed_token_ids = list(dict.fromkeys(body.allowed_token_ids or []))
    model.check_token_ids(allowed_token_ids, "allowed_token_ids")
    if constraint is not None:
        _check_ends_by_itself(body)
    defaults = model.defaults
    return SamplingParams(
        constraint=constraint,
        max_tokens=max_tokens,
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        top_k=min(max(_first(body.top_k, defaults.top_k, 0), 0), model.vocab_size),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        seed=secrets.randbits(64) if body.seed is None else body.seed & _UINT64,
        min_tokens=body.min_tokens or 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body, model),
        stop_token_ids=stop_token_ids,
        allowed_token_ids=allowed_token_ids,
        bad_words=_bad_words(body, model),
        ignore_eos=bool(body.ignore_eos),
        num_top_logprobs=num_top_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def _first(value: Number | None, default: Number | None, neutral: Number) -> Number:
    """What the request says, or else what the model wants, or else what changes nothing."""
    return value if value is not None else default if default is not None else neutral


def _check_ends_by_itself(body: GenerationBody) -> None:
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise InvalidRequest(f"{name}: a structured output ends by itself; leave it out", param=name)
    for name in ("allowed_token_ids", "bad_words"):
        if getattr(body, name):
            raise InvalidRequest(f"{name}: a structured output says itself what is allowed; leave it out", param=name)


def _bad_words(body: GenerationBody, model: ServedModel) -> list[TokenIds]:
    """The tokens of each bad word, at the start of a text and after a space."""
    texts = (text for word in body.bad_words or () for text in (word.lstrip(), f" {word.lstrip()}"))
    words = dict.fromkeys(tuple(model.tokenizer.encode(text, with_special=False)) for text in texts)
    return [TokenIds(ids=word) for word in words if word]


def of_output(sampling: SamplingParams, offset: int, most_tokens: int) -> SamplingParams:
    """The parameters of the output that follows `offset` others of its prompt, with room for `most_tokens`."""
    if not offset and sampling.max_tokens <= most_tokens:
        return sampling
    own = SamplingParams()
    own.CopyFrom(sampling)
    own.seed = (sampling.seed + offset) & _UINT64
    if offset:
        own.ClearField("num_prompt_logprobs")  # the first output has them
    own.max_tokens = min(sampling.max_tokens, most_tokens)
    own.min_tokens = min(sampling.min_tokens, own.max_tokens)
    return own


def stops_of(body: GenerationBody) -> tuple[str, ...]:
    """The stop strings of a body. Raises InvalidRequest."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stops):
        raise InvalidRequest("stop: a stop string must not be empty", param="stop")
    return tuple(stops)


def _logit_bias(body: GenerationBody, model: ServedModel) -> dict[int, float]:
    bias: dict[int, float] = {}
    for name, value in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise InvalidRequest(f"logit_bias: {name[:40]!r} is not a token id", param="logit_bias")
        bias[int(name)] = value
    model.check_token_ids(bias, "logit_bias")
    return bias
