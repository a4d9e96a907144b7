"""What the engine is asked and what it answers: plain values, no torch.

The same `SamplingParams` travel from the gateway through the prefill worker to the decode worker, so that any process
can continue where another stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from halfmoon.kv.owner import SHARED, KVOwner

FinishReason = Literal["stop", "length", "cancelled", "error", "constraint"]
Pooling = Literal["last", "mean"]
ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]

JSON_STYLE: Any = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,32})?"}
"""White space in JSON, as llguidance's options: a space, or a new line and its indentation, but no more in a row.

Models write JSON in either form. Forced out of the form that it has in mind, a small one writes nonsense; with white
space of any length it may go on forever.
"""
ONE_LINE_STYLE: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,  # else that of JSON_STYLE, the default, would count
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON on one line. A schema asks for it under the key `x-guidance`."""

ERROR_TOKEN_ID = -1  # of a row, or of a whole step, that failed
CONSTRAINT_TOKEN_ID = -2  # of a row whose constraint allows no token, or exceeds its limits


@dataclass(frozen=True, slots=True)
class Constraint:
    """A required form of the output.

    `source` is a JSON schema, a regular expression, a JSON list of texts, or a grammar (Lark or GBNF). It binds what
    follows the token `ends_reasoning`, if there is one. With `begins_reasoning` it binds the whole output, unless that
    begins with this token.
    """

    kind: ConstraintKind
    source: str
    begins_reasoning: int | None = None
    ends_reasoning: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Token `i` of the output depends only on logits, these values and `(seed, i)`.

    It never depends on the batch, the process or the chunking. (The logits themselves do on GPUs,
    and where torch attends on CPUs, in their last bits: two nearly equal tokens can change places.)

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off; seed is always set (the gateway draws one). If
    there are `allowed_token_ids`, no others are drawn. The last token of a bad word is not drawn after its others, and
    none that ends the output before `min_tokens`; both give way where they would leave no token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_top_logprobs: int | None = None  # None: no logprobs; 0: of the chosen token only
    num_prompt_logprobs: int | None = None  # likewise, of the prompt's tokens: its whole prefix is computed for them
    pooling: Pooling | None = None  # makes an embedding of the prompt; the mean, too, needs its whole prefix

    def forbidden(self) -> NDArray[np.bool_]:
        """Which ids up to the largest allowed one are not allowed: [largest id + 1]; empty if all are allowed.

        There can be as many as the vocabulary has: made once a request.
        """
        allowed = np.array(self.allowed_token_ids, dtype=np.int64)
        forbidden = np.ones(int(allowed.max(initial=-1)) + 1, dtype=np.bool_)
        forbidden[allowed] = False
        return forbidden


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to run. `prefill_only` computes one token, then keeps the KV until it is cancelled.

    `output_token_ids` are tokens that another worker already generated for this request: they are prefilled with
    the prompt, count against `max_tokens`, and the first token computed here has position `len(output_token_ids)`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    prefill_only: bool = False
    held_tokens: int = 0  # leading tokens whose KV the reader of a prefill-only request has already
    priority: int = 0  # smaller runs first
    class_priority: int = 0  # its class's part of `priority`
    max_pause_s: float = 0.0  # how long its answer may be paused for higher classes at a time; 0: never
    tbt_target_s: float | None = None  # `chunk_target_s`: bounds prompts that are computed beside its answer
    arrival_s: float = 0.0
    tenant_salt: bytes = b""  # requests with the same salt share prefixes
    owner: KVOwner = SHARED  # who is charged for its KV in the store
    keeps_partial: bool = False  # prefill-only, read by nobody: it ends once its last, partial block is kept


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log, of the distribution before temperature) at one output position."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first
    rank: int = 0  # of a prompt's token: its place among all tokens, from 1


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token, with log-probabilities where they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token. `position` counts output tokens from 0; `finish_reason` is set on the last."""

    request_id: str
    token_id: int
    position: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first token: of the prompt's tokens after its first
    embedding: tuple[float, ...] = ()  # likewise, if it was asked for: hidden_size values
    num_drafts: int = 0  # with the last token that a step gives a sequence: guessed tokens that ran behind its newest
    num_right_drafts: int = 0  # of these, how many were what was drawn
