"""How far one request has come: its tokens and its measured times. Time is an argument."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.pb.prefill_pb2 import FirstToken, HandedOver, Phase
from halfmoon.policy.admission.refusal import Refused
from halfmoon.policy.models.overheads import handover_s


class Progress:
    """Owns the measurements of one request. Times are seconds since `arrived_s`, the gateway's monotonic clock."""

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.loaded_tokens = 0  # of the cached ones, those that came from the store
        self.phases: list[Phase] = []  # of the first attempt, as its prefill worker told them
        self.output_token_ids: list[int] = []
        self.prefill_worker: str | None = None
        self.decode_worker: str | None = None
        self.num_retries = 0
        self.is_complete = False  # it ended by itself, or the client's stop strings ended it
        self.qos_class: str | None = None
        self.predicted_ttft_s: float | None = None  # when it was admitted, or refused
        self.predicted_tbt_s: float | None = None
        self.predicted_queue_s: float | None = None  # until its turn on the prefill worker
        self.predicted_prefill_s: float | None = None  # from there to the first token
        self.queue_s: float | None = None
        self.prefill_s: float | None = None
        self.ttft_s: float | None = None
        self.gaps_s: list[float] = []  # TBT, one for each token after the first
        self._last_token_s = arrived_s

    def note_refused(self, refusal: Refused) -> None:
        """What admission predicted."""
        self.predicted_ttft_s, self.predicted_tbt_s = refusal.ttft_s, refusal.tbt_s

    def note_prefill(self, first: FirstToken) -> None:
        """What the prefill worker said of the first attempt; later ones recompute our own tokens."""
        if self.queue_s is None:
            self.queue_s, self.prefill_s = first.queue_s, first.compute_s
            self.cached_tokens, self.loaded_tokens = first.num_cached_tokens, first.num_loaded_tokens
            self.phases += first.phases

    def note_handed_over(self, handed_over: HandedOver) -> None:
        """What the prefill worker said of the first attempt's transfer."""
        if not self.num_retries and handed_over.HasField("transfer"):
            self.phases.append(handed_over.transfer)

    def note_tokens(self, token_ids: Sequence[int], at_s: float) -> None:
        """Tokens that arrived together."""
        for token_id in token_ids:
            if self.ttft_s is None:
                self.ttft_s = at_s - self.arrived_s
            else:
                self.gaps_s.append(max(0.0, at_s - self._last_token_s))
            self._last_token_s = at_s
            self.output_token_ids.append(token_id)

    @property
    def mean_tbt_s(self) -> float | None:
        """TPOT: mean gap between tokens; None with fewer than two."""
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else None

    @property
    def handover_s(self) -> float | None:
        """As the gatekeeper takes it; None where there are too few tokens to tell."""
        return handover_s(self.gaps_s)

    @property
    def max_tbt_s(self) -> float | None:
        """The longest gap between tokens; None with fewer than two."""
        return max(self.gaps_s, default=None)
