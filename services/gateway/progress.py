"""How far one output has come: its tokens and its measured times. Time is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halfmoon.pb.prefill_pb2 import FirstToken, HandedOver, Phase
from halfmoon.pb.types_pb2 import PromptLogprob, Token
from halfmoon.policy.models.overheads import handover_s


class Progress:
    """Owns the measurements of one output. Times are seconds since `arrived_s`, on the gateway's monotonic clock."""

    def __init__(self, arrived_s: float, num_prompt_tokens: int = 0) -> None:
        self.arrived_s = arrived_s
        self.prompt_tokens = num_prompt_tokens
        self.cached_tokens = 0
        self.loaded_tokens = 0  # cached tokens that came from the store
        self.prompt_logprobs: Sequence[PromptLogprob] = ()  # of the prompt's tokens after the first
        self.embedding: Sequence[float] = ()  # of the prompt, if it was asked for
        self.phases: list[Phase] = []  # of the first attempt, as the prefill worker reported them
        self.output_token_ids: list[int] = []
        self.prefill_worker: str | None = None
        self.decode_worker: str | None = None
        self.num_retries = 0
        self.moves: list[int] = []  # gaps before each move to another decode worker
        self.moved: list[tuple[float, float]] = []  # the new workers' queue and compute time, as they reported them
        self.is_resumed = False  # begun by an earlier request, of which this is a repeat
        self.is_complete = False  # ended by itself, or at one of the client's stop strings
        self.qos_class: str | None = None  # None until it is admitted or refused
        self.predicted_ttft_s: float | None = None  # at admission
        self.predicted_tbt_s: float | None = None
        self.predicted_queue_s: float | None = None  # wait at the prefill worker
        self.predicted_prefill_s: float | None = None  # from there to the first token
        self.predicted_transfer_s: float | None = None  # loading what is not computed meanwhile
        self.queue_s: float | None = None
        self.prefill_s: float | None = None
        self.ttft_s: float | None = None
        self.gaps_s: list[float] = []  # TBT, one for each token after the first
        self.num_drafts = self.num_right_drafts = 0  # tokens that workers guessed, and how many were right
        self._last_token_s = arrived_s

    def note_prefill(self, first: FirstToken) -> None:
        """Takes the prefill worker's figures of the first attempt. Later attempts recompute our own tokens."""
        if self.queue_s is None:
            self.queue_s, self.prefill_s = first.queue_s, first.compute_s
            self.cached_tokens, self.loaded_tokens = first.num_cached_tokens, first.num_loaded_tokens
            self.phases += first.phases
            self.prompt_logprobs, self.embedding = first.prompt_logprobs, first.embedding
        elif len(self.moved) < len(self.moves):
            self.moved.append((first.queue_s, first.compute_s))

    @property
    def transfer_s(self) -> float | None:
        """How long the first attempt's prefill worker loaded KV for; None if it loaded none."""
        restores = [phase for phase in self.phases if phase.kind == Phase.RESTORE and phase.num_tokens]
        return restores[0].end_s - restores[0].start_s if restores else None

    def note_handed_over(self, handed_over: HandedOver) -> None:
        """Takes the prefill worker's figures of the first attempt's transfer."""
        if not self.num_retries and handed_over.HasField("transfer"):
            self.phases.append(handed_over.transfer)

    def note_tokens(self, token_ids: Sequence[int], at_s: float) -> None:
        """Takes tokens that arrived together."""
        for token_id in token_ids:
            if self.ttft_s is None:
                self.ttft_s = at_s - self.arrived_s
            else:
                self.gaps_s.append(max(0.0, at_s - self._last_token_s))
            self._last_token_s = at_s
            self.output_token_ids.append(token_id)

    def note_drafts(self, tokens: Iterable[Token]) -> None:
        """Takes the outcome of the guesses of the steps that gave these tokens."""
        for token in tokens:
            self.num_drafts += token.num_drafts
            self.num_right_drafts += token.num_right_drafts

    def note_resumed(self, first: FirstToken, cached_tokens: int, token_ids: Sequence[int], at_s: float) -> None:
        """Takes what an earlier request computed. Its first token came when the worker says, its gaps are unknown."""
        self.note_prefill(first)
        self.is_resumed, self.cached_tokens = True, cached_tokens
        self.loaded_tokens = min(self.loaded_tokens, cached_tokens)  # a later attempt loads of the answer, too
        self.ttft_s = first.queue_s + first.compute_s
        self.output_token_ids += token_ids
        self._last_token_s = at_s

    @property
    def last_token_s(self) -> float:
        """When the latest token came."""
        return self._last_token_s - self.arrived_s

    @property
    def mean_tbt_s(self) -> float | None:
        """TPOT: mean gap between tokens; None with fewer than two."""
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else None

    @property
    def mean_arrival_gap_s(self) -> float | None:
        """Mean gap between messages with tokens of this output: tokens that came together share one."""
        gaps_s = [gap_s for gap_s in self.gaps_s if gap_s > 0.0]
        return sum(gaps_s) / len(gaps_s) if gaps_s else None

    @property
    def handover_s(self) -> float | None:
        """What the hand-over added to the first gap; None with too few tokens to tell."""
        return handover_s(self.gaps_s)
