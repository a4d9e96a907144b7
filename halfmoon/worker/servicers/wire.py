"""Converts protobuf messages to the engine's values and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halfmoon.engine.request import (
    Constraint,
    ConstraintKind,
    EngineRequest,
    FinishReason,
    Pooling,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from halfmoon.errors import Incompatible
from halfmoon.kv.codec import Codec
from halfmoon.kv.kv_policy import kv_policy_of
from halfmoon.kv.owner import KVOwner
from halfmoon.pb import prefill_pb2
from halfmoon.pb import types_pb2 as pb
from halfmoon.worker.store.holder import NamedHolder

_FINISH: dict[FinishReason | None, pb.FinishReason.ValueType] = {
    None: pb.NOT_FINISHED,
    "stop": pb.STOP,
    "length": pb.LENGTH,
    "cancelled": pb.CANCELLED,
    "error": pb.ERROR,
    "constraint": pb.CONSTRAINT_FAILED,
}

_CONSTRAINTS: dict[int, ConstraintKind] = {
    pb.Constraint.JSON_SCHEMA: "json_schema",
    pb.Constraint.REGEX: "regex",
    pb.Constraint.CHOICE: "choice",
    pb.Constraint.GRAMMAR: "grammar",
}


_POOLINGS: dict[int, Pooling] = {pb.LAST_TOKEN: "last", pb.MEAN: "mean"}

_MAX_SOURCES = 4  # of one request


def holders_from(messages: Sequence[prefill_pb2.KVSource]) -> list[NamedHolder]:
    """The sources that a request names, the first few."""
    return [
        NamedHolder(
            message.address, "worker" if message.kind == prefill_pb2.KVSource.WORKER else "store", message.num_blocks
        )
        for message in messages[:_MAX_SOURCES]
        if message.address
    ]


def sampling_from(message: pb.SamplingParams) -> SamplingParams:
    """Converts sampling parameters as sent; the engine validates them."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        min_tokens=message.min_tokens,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        constraint=_constraint_from(message.constraint) if message.HasField("constraint") else None,
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words if word.ids),
        num_top_logprobs=message.num_top_logprobs if message.HasField("num_top_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        pooling=_POOLINGS.get(message.pooling),
    )


def _constraint_from(message: pb.Constraint) -> Constraint:
    kind = _CONSTRAINTS.get(message.kind)
    if kind is None:
        raise Incompatible(f"this worker does not know constraints of kind {message.kind}", param="constraint")
    return Constraint(
        kind,
        message.source,
        message.begins_reasoning if message.HasField("begins_reasoning") else None,
        message.ends_reasoning if message.HasField("ends_reasoning") else None,
    )


def request_from(
    message: pb.Generation,
    *,
    prefill_only: bool,
    arrival_s: float,
    held_tokens: int = 0,
    keeps_partial: bool = False,
) -> EngineRequest:
    """Converts a `Generation` to the engine's request."""
    return EngineRequest(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from(message.sampling),
        output_token_ids=tuple(message.output_token_ids),
        prefill_only=prefill_only,
        keeps_partial=keeps_partial,
        held_tokens=held_tokens,
        priority=message.priority,
        class_priority=message.class_priority,
        max_pause_s=message.max_pause_s,
        tbt_target_s=message.tbt_target_s if message.tbt_target_s > 0 else None,
        arrival_s=arrival_s,
        tenant_salt=message.tenant_salt,
        owner=KVOwner(message.tenant, message.tenant_kv_quota_bytes),
    )


def handover_tokens(message: pb.Generation, block_tokens: int) -> int:
    """How many tokens' KV is handed over: those that the prompt's next token sees."""
    num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
    policy = kv_policy_of(message.tenant_salt)
    return num_tokens - (0 if policy is None else len(policy.unseen(num_tokens, block_tokens)) * block_tokens)


def codec_from(number: int) -> Codec:
    """Parses a requested codec. Raises Incompatible for unknown ones and for those of stored blocks only."""
    try:
        codec = Codec(number)
    except ValueError:
        raise Incompatible(f"this worker does not know KV codec {number}", param="kv_codec") from None
    if codec is Codec.INT2:
        raise Incompatible("int2 is for stored blocks: it is too coarse for the end of a prompt", param="kv_codec")
    return codec


def token_message(output: TokenOutput) -> pb.Token:
    """Converts one generated token for the gateway."""
    message = pb.Token(
        request_id=output.request_id,
        token_id=max(output.token_id, 0),  # an output that only reports an error has no token
        position=output.position,
        finish_reason=_FINISH[output.finish_reason],
        num_drafts=output.num_drafts,
        num_right_drafts=output.num_right_drafts,
    )
    if output.logprobs is not None:
        message.logprob = output.logprobs.logprob
        message.top_logprobs.extend(_tops(output.logprobs))
    return message


def prompt_logprob_message(logprobs: TokenLogprobs) -> pb.PromptLogprob:
    """Converts what is known of one token of a prompt."""
    return pb.PromptLogprob(logprob=logprobs.logprob, rank=logprobs.rank, top_logprobs=_tops(logprobs))


def _tops(logprobs: TokenLogprobs) -> Iterator[pb.TopLogprob]:
    return (pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top)
