"""One request's progress through the engine. No torch."""

from __future__ import annotations

import threading
from array import array
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.engine.request import EngineRequest, FinishReason, SamplingParams, TokenLogprobs
from halfmoon.engine.scheduling.restore_order import Restore
from halfmoon.engine.scheduling.speculation import Speculation
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.kv_policy import (
    Chooser,
    KVPolicy,
    effective_policy,
    kv_policy_of,
    num_at_once,
    num_findable,
    num_reusable,
)
from halfmoon.policy.preemption import Pauses

SequenceState = Literal["waiting", "running", "paused", "reserved", "held", "removed"]


class KVChoice(NamedTuple):
    """Where a policy's choice goes at the end of the prompt: K and V of as many tokens as `blocks` hold."""

    blocks: list[int]
    num_candidates: int  # leading tokens of the prompt that are chosen from
    chooser: Chooser


class Sequence:
    """Owns the token ids of one request and how many of them have their K and V in memory.

    `blocks` are references that the scheduler took from the pool; it has given back those of the range `dropped`, which
    no layer sees any more: their ids only keep the others' places. A prefill-only sequence that has its token is
    `held`.
    """

    def __init__(self, request: EngineRequest, order: int, restore: Restore | None = None) -> None:
        self.request = request
        self.order = order  # in which they came
        self.rank = (request.priority, request.arrival_s, order)  # smaller runs first; unique
        self.pauses = Pauses(request.class_priority, request.max_pause_s)
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self._ids = array("q")
        self.num_before = len(self.token_ids)  # when its computing began here, or began again
        self.num_computed = 0  # leading tokens whose K and V are in `blocks`
        self.num_cached = 0  # of those, how many came from the prefix cache
        self.num_received = 0  # of those, how many came from another worker
        self.num_loaded = 0  # of those, how many were loaded while others were computed
        self.restore = restore  # what remains to be loaded
        self.blocks: list[int] = []
        self.dropped = range(0)
        self.policy = kv_policy_of(request.tenant_salt)
        self.choice: KVChoice | None = None  # what is still to be chosen
        self.not_handed_over = range(0)  # blocks that the policy leaves out where one worker computes and one decodes
        self.block_keys: list[bytes] = []  # of the leading full blocks, as far as they have been needed
        self.num_known_blocks = 0  # leading blocks that the prefix cache has seen
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the tokens after the first, if wanted, as far as computed
        self.pooled: list[float] = []  # the sum of what is pooled so far, if it is wanted
        self.speculation: Speculation | None = None  # what may be guessed of its next tokens
        self.state: SequenceState = "waiting"
        self.is_moved_out = False  # paused, and what it has computed is not in `blocks`
        self.written = Written()  # what may be copied out of `blocks` for a prefill-only sequence
        self.kv_lock = threading.Lock()  # held while K and V are copied, and while `blocks` are released

    @property
    def request_id(self) -> str:
        """The request's name."""
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        """How the request's tokens are drawn."""
        return self.request.sampling

    @cached_property
    def forbidden(self) -> NDArray[np.bool_]:
        """See `SamplingParams.forbidden`."""
        return self.sampling.forbidden()

    def ids(self) -> array[int]:
        """`token_ids` as int64, to which only new ones are added with each call."""
        self._ids.extend(self.token_ids[len(self._ids) :])
        return self._ids

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt, without any output."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens so far, wherever they were computed."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to run before the next one can be drawn: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token, made by a step since its computing began, is left to run."""
        return self.num_uncomputed == 1 and len(self.token_ids) > self.num_before

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether what runs next yields log-probabilities of the prompt."""
        return self.sampling.num_prompt_logprobs is not None and self.num_output == 0

    @property
    def needs_all_outputs(self) -> bool:
        """Whether every token of the prompt has to run, because something is made of what the model says to it."""
        return self.wants_prompt_logprobs or (self.sampling.pooling == "mean" and self.num_output == 0)

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose K and V may come from elsewhere: at least one is left to compute."""
        if self.needs_all_outputs:
            return 0
        return num_reusable(self.policy, self.num_prompt, len(self.token_ids))

    @property
    def num_findable(self) -> int:
        """Leading computed tokens whose K and V others may share."""
        return num_findable(self.policy, self.num_prompt, self.num_computed)

    @property
    def effective_policy(self) -> KVPolicy | None:
        """The policy by which what is computed next sees; None: it sees everything before it."""
        return effective_policy(self.policy, self.num_prompt, self.num_computed)

    def num_at_once(self, num_tokens: int) -> int:
        """How many of the next `num_tokens` run in one step."""
        return num_at_once(self.policy, self.num_prompt, self.num_computed, num_tokens)

    @property
    def kept_blocks(self) -> list[int]:
        """The blocks that are its own: those that were not given back, in order."""
        return self.blocks[: self.dropped.start] + self.blocks[self.dropped.stop :]

    def num_unseen(self, block_tokens: int) -> int:
        """Tokens that its policy keeps what runs next from seeing. Of layers' own windows forecasts know nothing."""
        return 0 if self.policy is None else len(self.dropped) * block_tokens

    @property
    def handover_blocks(self) -> list[int]:
        """The blocks whose tokens are handed over, in order."""
        return self.blocks[: self.not_handed_over.start] + self.blocks[self.not_handed_over.stop :]

    def num_arriving(self, block_tokens: int) -> int:
        """Uncomputed tokens that need no computing if the step behind them waits for their layers; 0: it cannot."""
        is_choosing = self.policy is not None and self.policy.chooses
        if self.restore is None or self.num_computed % block_tokens or is_choosing:
            return 0
        block = self.num_computed // block_tokens
        if block >= self.restore.num_blocks:
            return 0
        return self.restore.arriving_end(block) * block_tokens - self.num_computed

    def num_ready(self, block_tokens: int, num_skipped: int = 0) -> int:
        """Uncomputed tokens behind the first `num_skipped` that can be computed now: others wait for blocks."""
        start = self.num_computed + num_skipped
        stop = None if self.restore is None else self.restore.stop(start // block_tokens)
        return (len(self.token_ids) if stop is None else max(start, stop * block_tokens)) - start

    @property
    def has_begun(self) -> bool:
        """Whether any of its tokens were computed here."""
        return self.num_computed > self.num_cached + self.num_loaded

    def skip_loaded(self, block_tokens: int) -> None:
        """Counts tokens loaded right after the computed ones as computed."""
        restore = self.restore
        while restore is not None and self.num_computed % block_tokens == 0:
            block = self.num_computed // block_tokens
            if block >= restore.num_blocks:
                self.restore = restore = None
            elif restore.is_loaded(block):
                self.num_computed += block_tokens
                self.num_loaded += block_tokens
            else:
                return

    @property
    def max_tokens_ever(self) -> int:
        """Most tokens whose K and V this sequence can need: the last output token is never run."""
        new = 1 if self.request.prefill_only else self.sampling.max_tokens
        return self.num_prompt + max(new - 1, self.num_output)

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the newest output token is the last one; None if it is not."""
        token_id, sampling = self.token_ids[-1], self.sampling
        is_stop = token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos)
        if is_stop and self.num_output > sampling.min_tokens:
            return "stop"
        return "length" if self.num_output >= sampling.max_tokens else None
