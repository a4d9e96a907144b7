"""What the responses of all generating endpoints have in common. Plain dicts, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from halfmoon.pb.types_pb2 import PromptLogprob
from services.gateway.replies.text_stream import Decodes, TextPiece


class Usage(NamedTuple):
    """Token counts of one request: all its prompts and outputs together."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timing: Mapping[str, float | None] | None = None  # None: not asked for
    num_drafts: int = 0  # tokens that workers guessed
    num_right_drafts: int = 0  # of these, how many were what was drawn
    num_reasoning_tokens: int = 0  # of the completion's

    def timed(self) -> dict[str, Any]:
        """The field `timing`, where it was asked for."""
        return {} if self.timing is None else {"timing": self.timing}

    def as_dict(self) -> dict[str, Any]:
        """The usage in the shape of chat completions and completions."""
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        details = {"reasoning_tokens": self.num_reasoning_tokens} if self.num_reasoning_tokens else {}
        if self.num_drafts:  # as OpenAI counts predicted outputs
            details |= {
                "accepted_prediction_tokens": self.num_right_drafts,
                "rejected_prediction_tokens": self.num_drafts - self.num_right_drafts,
            }
        return {**usage, "completion_tokens_details": details} if details else usage


PromptLogprobsOf = Callable[[int], Sequence[PromptLogprob]]
"""Returns the log-probabilities of a prompt's tokens after the first, once it is computed."""

UsageNow = Callable[[], Usage]
"""Returns the usage so far. Counted only if requested: with many outputs it takes time."""


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What a response carries in addition to its text."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False  # logprobs name tokens by id
    usage: Literal["none", "last", "running"] = "none"  # in a stream's last chunk; in every chunk, too
    timing: bool = False  # at the end

    @property
    def only_text(self) -> bool:
        """Whether chunks in mid-stream differ in nothing but text."""
        return not (self.logprobs or self.token_ids or self.usage == "running")

    def shows(self, piece: TextPiece) -> bool:
        """Whether a chunk of `piece` carries anything, even with an empty text."""
        return bool(piece.text or (self.logprobs and piece.content) or (self.token_ids and piece.tokens))


@dataclass(frozen=True, slots=True)
class Output:
    """One whole output, and its index among the choices."""

    index: int
    piece: TextPiece


STREAM_END = b"data: [DONE]\n\n"


class WholeFormat(Protocol):
    """How an endpoint answers at once."""

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The response without streaming."""


class ReplyFormat(WholeFormat, Protocol):
    """What differs between the endpoints. One object a request; the pieces of a choice come in order."""

    @property
    def end(self) -> bytes:
        """Bytes after the last event of a stream that did not fail."""

    @property
    def repeats(self) -> bool:
        """Whether two chunks of one choice with nothing but text differ in that text alone."""

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Chunks before the first piece of a choice."""

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """Chunks for a piece of a choice; none for an empty one."""

    def frame(self, chunk: dict[str, Any], usage: UsageNow) -> dict[str, Any]:
        """A chunk with the fields that every chunk carries."""

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The last event of a stream that failed after it had begun; `error` is the body of an error response."""

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """Chunks after the last piece of all choices."""


def framed(chunk: dict[str, Any], usage: UsageNow, options: ReplyOptions) -> dict[str, Any]:
    """A chunk with the usage, if requested: null if it comes in the last chunk."""
    if options.usage == "none":
        return chunk
    return {**chunk, "usage": usage().as_dict() if options.usage == "running" else None}


def closing_chunks(head: Mapping[str, Any], usage: Usage, options: ReplyOptions) -> list[dict[str, Any]]:
    """The chunk after all choices, with what was asked for; none if that is nothing."""
    extras = {} if options.usage == "none" else {"usage": usage.as_dict()}
    return [{**head, "choices": [], **extras, **usage.timed()}] if extras or options.timing else []


def token_name(text: str, token_id: int, options: ReplyOptions) -> str:
    """A token in a list of log-probabilities."""
    return f"token_id:{token_id}" if options.tokens_as_ids else text


def ending(piece: TextPiece) -> dict[str, Any]:
    """Why a choice ended. `stop_reason` is the stop string or the id of the stop token that ended it."""
    return {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}


def token_ids(piece: TextPiece, options: ReplyOptions) -> dict[str, Any]:
    """The ids of a piece's tokens, if they are options."""
    return {"token_ids": [token.token_id for token in piece.tokens]} if options.token_ids else {}


def prompt_token_ids(prompt: Sequence[int], options: ReplyOptions) -> dict[str, Any]:
    """The ids of a prompt's tokens, if requested; in a stream they come once for each choice."""
    return {"prompt_token_ids": list(prompt)} if options.token_ids else {}


def prompt_logprobs(
    prompt: Sequence[int], known: Sequence[PromptLogprob], tokenizer: Decodes, options: ReplyOptions
) -> dict[str, Any]:
    """vLLM's `prompt_logprobs`, if requested: none for the first token, then by token id."""
    if not options.prompt_logprobs:
        return {}
    shown: list[dict[str, Any] | None] = [None]
    for token_id, one in zip(prompt[1:], known, strict=True):
        ranked = [(token_id, one.logprob, one.rank)]
        ranked += [(top.token_id, top.logprob, rank) for rank, top in enumerate(one.top_logprobs, 1)]
        shown.append(
            {
                str(of): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.decode([of])}
                for of, logprob, rank in ranked
            }
        )
    return {"prompt_logprobs": shown}
