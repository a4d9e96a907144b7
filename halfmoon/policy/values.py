"""Plain values that several shelves share: a request, its targets, what is predicted of it, and its placement."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.models.segments import SegmentPlan
from halfmoon.policy.view.worker_view import WorkerView

NOTHING_CACHED: NDArray[np.int64] = np.zeros(1, dtype=np.int64)  # `BlockIndex.match` of a prompt with no known block


@dataclass(frozen=True, slots=True)
class AdmissionTargets:
    """The latencies that admission compares predictions with; None sets no limit."""

    ttft_s: float | None
    tbt_s: float | None


NO_TARGETS = AdmissionTargets(None, None)


class UnloadedLatency(NamedTuple):
    """Predicted latency of a request on an otherwise idle cluster; 0 where nothing is known."""

    ttft_s: float = 0.0
    tbt_s: float = 0.0


class DecodeLoad(NamedTuple):
    """Decode load of one row, possibly averaged over a period."""

    batch: float  # sequences
    context_tokens: float  # of all sequences together


class DecodeLoads(NamedTuple):
    """Decode load of every row of the cluster view."""

    batch: Floats  # [num_rows] sequences
    context_tokens: Floats  # [num_rows] of all sequences together

    def of(self, row: int) -> DecodeLoad:
        """The load of one row."""
        return DecodeLoad(float(self.batch[row]), float(self.context_tokens[row]))


class TtftPrediction(NamedTuple):
    """Predicted TTFT of one prompt on every row of the cluster view. All arrays are [num_rows]."""

    seconds: Floats  # from now; meaningless for rows without a prefill worker
    cached_tokens: Floats  # already on the worker
    fetched_tokens: Floats  # further part of the prefix that the best source has
    queue_s: Floats  # part of `seconds` before the worker starts on this prompt
    sources: NDArray[np.int64] | None = None  # holder from which each row would load, -1 for none; None: no row would
    transfer_s: Floats | None = None  # loading what is not computed meanwhile; None: no row would load
    ready_s: Floats | None = None  # until the steps behind what is loaded may begin; None: no row would load

    def source_of(self, row: int) -> int:
        """The holder from which the row would load; -1 for none."""
        return -1 if self.sources is None else int(self.sources[row])

    def transfer_s_of(self, row: int) -> float:
        """Seconds that the row would load for."""
        return 0.0 if self.transfer_s is None else float(self.transfer_s[row])

    def ready_s_of(self, row: int) -> float:
        """Seconds until the steps behind what the row would load may begin."""
        return 0.0 if self.ready_s is None else float(self.ready_s[row])


class Neighbours(NamedTuple):
    """The requests that decode on one worker while it would compute a prompt."""

    load: DecodeLoad
    tbt_target_s: float  # the least that their classes allow; inf without targets
    mean_life_s: float  # from first to last token of each
    prompts_s: float  # work of other prompts there, and of those that usually come in `mean_life_s`


NO_NEIGHBOURS = Neighbours(DecodeLoad(0, 0.0), math.inf, 0.0, 0.0)

Disaggregation = Literal[
    "kept_cached",
    "kept_loaded",
    "kept_short",
    "kept_idle",
    "kept_alone",
    "not_faster",
    "not_short",
    "neighbours",
    "no_room",
    "unknown",
    "off",
]
"""Why a decode worker computes a prompt itself, or gets its KV: see `placement/conditional.py`."""

PrefillReason = Literal[
    "only", "cached", "loaded", "shortest_queue", "least_ttft", "other_host", "least_loaded", "random"
]
"""What speaks for the prefill worker of a placement: see `Ranking.why_prefill`."""

DecodeReason = Literal[
    "only", "stays", "most_held", "least_cost", "least_loaded", "random", "computes_prompt", "both_roles"
]
"""What speaks for the decode worker of a placement: see `Ranking.best_decode`."""


PromptSharing = Literal["shared", "not_faster", "too_short", "none_idle", "unable", "needs_one"]
"""Why several prefill workers compute a prompt, or one does: see `placement/prompt_sharing.py`."""


class MostSeen(NamedTuple):
    """How many tokens those of a request attend to at most: fewer than inf under a KV policy."""

    prompt: float = math.inf
    answer: float = math.inf


SEEN_WHOLE = MostSeen()


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A prompt to place, which may grow by `max_tokens`. No worker in `exclude` may take any part of it."""

    num_prompt_tokens: int
    max_tokens: int
    exclude: tuple[str, ...] = ()
    kv_factor: float = 1.0  # bytes of its KV in a hand-over; below 1 at a lower precision
    num_output: float = 0.0  # predicted; 0 if unknown
    priority: int = 0  # smaller goes first
    least_tokens: int = 0  # the answer has at least as many
    is_failover: bool = False  # it had workers, and lost one of them; its prompt includes the tokens that it has
    targets: AdmissionTargets = NO_TARGETS  # workers that meet them are preferred
    tbt_target_s: float = math.inf  # bounds prompts beside its answer; inf: none
    qos_class: str = ""
    class_priority: int | None = None  # None: nobody is paused for it
    max_pause_s: float = 0.0  # how long it may be paused at a time
    may_share: bool = True  # several workers may compute its prompt: nothing is made of the tokens within it
    most_seen: MostSeen = SEEN_WHOLE
    cached_blocks: NDArray[np.int64] = field(
        default_factory=lambda: NOTHING_CACHED, compare=False, repr=False
    )  # `BlockIndex.match`

    def context_tokens(self, num_output: float = 0.0) -> float:
        """Tokens that a decode step sees of it, behind so many of its answer."""
        return min(self.num_prompt_tokens + num_output, self.most_seen.answer)

    @property
    def num_gaps(self) -> float:
        """Gaps between the tokens of its answer, as predicted, at least one."""
        return max((self.num_output or self.max_tokens) - 1, 1.0)

    @property
    def applicable_targets(self) -> AdmissionTargets:
        """The targets that apply: an answer of one token has no TBT."""
        return self.targets if self.max_tokens > 1 else replace(self.targets, tbt_s=None)


@dataclass(frozen=True, slots=True)
class Placement:
    """The two workers of a request; a worker of role `both` is both of them. Seconds are predictions, from now."""

    prefill: WorkerView
    decode: WorkerView
    ttft_s: float = 0.0
    tbt_s: float = 0.0  # when the answer begins
    tbt_target_s: float = math.inf  # of the request; inf: none
    cached_tokens: int = 0
    fetched_tokens: int = 0  # further part of the prefix that the best source has
    source: int = -1  # that holder's number in the block index; -1 for none
    transfer_s: float = 0.0  # loading what is not computed meanwhile
    ready_s: float = 0.0  # until the steps behind what is loaded may begin: less than `transfer_s` by layer
    queue_s: float = 0.0  # part of `ttft_s` before the prefill worker starts on the prompt
    overhead_s: float = 0.0  # part of `ttft_s` that is neither queue nor prefill
    work_s: float = 0.0  # restoring and computing the prompt on an idle worker
    handover_s: float = 0.0  # from the first token until the KV is on the decode worker
    handover_bytes: float = 0.0
    held_tokens: int = 0  # leading ones whose KV the decode worker has
    behind_s: float = 0.0  # prefill work still queued on the prefill worker when the first token is there
    ranked_by: TtftPrediction | None = field(default=None, compare=False, repr=False)  # of all workers
    disaggregation: Disaggregation | None = None  # None on a worker of role `both`, where there is nothing to choose
    prefill_reason: PrefillReason | None = None  # None on a decode worker
    decode_reason: DecodeReason | None = None
    segments: SegmentPlan | None = None  # how the prompt is cut; None: the prefill worker computes all of it
    helpers: tuple[WorkerView, ...] = ()  # other workers that compute segments, in their order
    sharing: PromptSharing | None = None  # None where prompts are not shared

    def shares(self, num_prompt_tokens: int) -> list[Placement]:
        """The placement as each prefill worker works on it: what others compute is cached there. Its own is first."""
        if self.segments is None:
            return [self]
        starts = (self.cached_tokens, *self.segments.ends)
        lengths = [end - start for start, end in pairwise(starts)]
        own = [sum(lengths[number :: self.segments.degree]) for number in range(self.segments.degree)]
        return [
            replace(self, prefill=worker, cached_tokens=num_prompt_tokens - num_tokens)
            for worker, num_tokens in zip((self.prefill, *self.helpers), (own[-1], *own[:-1]), strict=True)
        ]

    @property
    def decode_address(self) -> str:
        """Where the prefill worker sends the KV; empty if it keeps it."""
        return "" if self.is_colocated else self.decode.address

    @property
    def prefill_s(self) -> float:
        """Part of `ttft_s` from the start on the prefill worker to the first token."""
        return max(self.ttft_s - self.queue_s - self.overhead_s, 0.0)

    @property
    def is_colocated(self) -> bool:
        """Whether one worker computes the prompt and decodes."""
        return self.prefill.worker_id == self.decode.worker_id
