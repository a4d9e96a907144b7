"""What the console shows of the last minutes: figures over time, decisions, hot prefixes, workers that left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from halfmoon.ledger.models import RequestRow
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.models.refinement import PredictionErrors
from halfmoon.policy.placement.replication import CopyDecision
from halfmoon.policy.values import DecodeReason, Disaggregation, Placement, PrefillReason, PromptSharing
from halfmoon.policy.view.hot_prefixes import HotPrefixes
from services.gateway.cluster.member import Member
from services.gateway.cluster.membership import Membership
from services.gateway.progress import Progress
from services.gateway.request import GatewayRequest
from services.gateway.telemetry.decisions import Decisions
from services.gateway.telemetry.observed_cluster import ObservedTraffic
from services.gateway.telemetry.time_series import Ended, Sample, Series

_SAMPLE_S = 1.0
BAD_REQUEST, RATE_LIMIT = "bad request", "rate limit"  # why a request was rejected, if it was not for the cluster
_NO_CLASS = "none"  # of a request that was refused before its class was known
_REMEMBERED_S = 120.0
_MAX_LEFT = 256


PeerOutcome = Literal["served", "declined", "late", "slow", "away", "unfit", "failed", "broken", "paused", "busy"]
"""What became of offering a request to a peer gateway: docs/reference/metrics.md."""

_MOVES = ("moved", "ends_soon", "not_loaded", "stays", "failed")

POOL_DECISIONS: Mapping[str, tuple[str, ...]] = {
    "prefill_worker": get_args(PrefillReason),
    "decode_worker": get_args(DecodeReason),
    "prefix": ("worker", "store", "local", "slower", "below_threshold", "unknown"),  # where it is to come from
    "disaggregation": get_args(Disaggregation),
    "sharing": get_args(PromptSharing),  # of a prompt by several prefill workers
    "direct_restore": get_args(Disaggregation),
    "copy": get_args(CopyDecision),
    "move": _MOVES,  # of an answer whose decode worker leaves
    "hot_spot": _MOVES,  # of an answer whose decode worker is busier than another
}
"""What the gateway decides about the pool of KV, and the reasons that it counts."""


class RecentTelemetry:
    """Owns the figures of the last minutes. They are bounded and end with the gateway; the ledger keeps the rest."""

    def __init__(self) -> None:
        self.series = Series()
        self.decisions = Decisions()
        self.traffic = ObservedTraffic()
        self.prefixes = HotPrefixes()
        self.recently_left = RecentlyLeft()
        self.prediction_errors = {kind: PredictionErrors() for kind in ("ttft", "tbt", "transfer")}
        self.pool_decisions: Counter[tuple[str, str]] = Counter()  # by decision and reason: see `POOL_DECISIONS`
        self.prefill_devices: Counter[str] = Counter()  # how often a worker of each was to compute a prompt
        self.prefill_degrees: Counter[int] = Counter()  # shared prompts, by the number of workers that computed them
        self.peer_offers: Counter[tuple[str, PeerOutcome]] = Counter()  # by the peer's address

    def note_members(self, members: Sequence[Member], now_s: float) -> None:
        """Takes the workers as they are now."""
        self.series.sample(sample_of(members), now_s)
        self.recently_left.note({member.worker_id: Left(member.role, member.host) for member in members}, now_s)

    async def follow(self, membership: Membership, clock: Callable[[], float]) -> None:
        """Notes the workers every second, forever."""
        while True:
            self.note_members(membership.members(), clock())
            await asyncio.sleep(_SAMPLE_S)

    def note_placed(self, placement: Placement, *, is_failover: bool) -> None:
        """Counts what was decided about a new request, or about one that lost a worker."""
        reasons = {
            "prefill_worker": placement.prefill_reason,
            "decode_worker": placement.decode_reason,
            "direct_restore" if is_failover else "disaggregation": placement.disaggregation,
            "sharing": placement.sharing,
        }
        for decision, reason in reasons.items():
            if reason is not None:
                self.pool_decisions[decision, reason] += 1
        self.prefill_devices[placement.prefill.device] += 1
        if placement.segments is not None:
            self.prefill_degrees[placement.segments.degree] += 1

    def offers_to(self, peer: str) -> dict[PeerOutcome, int]:
        """How often what became of offers to this peer."""
        return {outcome: count for (url, outcome), count in self.peer_offers.items() if url == peer}

    def note_prediction(self, progress: Progress) -> None:
        """Compares predicted and measured times. Predictions are of the first attempt: others teach nothing."""
        if not progress.is_complete or progress.num_retries:
            return
        pairs = {
            "ttft": (progress.predicted_ttft_s, progress.ttft_s),
            "tbt": (progress.predicted_tbt_s, progress.mean_tbt_s),
            "transfer": (progress.predicted_transfer_s, progress.transfer_s),
        }
        for kind, (predicted_s, measured_s) in pairs.items():
            if predicted_s and measured_s:
                self.prediction_errors[kind].add(predicted_s, measured_s)

    def note_ended(
        self, request: GatewayRequest, row: RequestRow, gaps_s: Sequence[float], reason: str, now_s: float
    ) -> None:
        """Takes a request that ended, with its row; `reason` says in a word why it was rejected, if it was."""
        refusal = reason if row.status == "rejected" else None
        is_served = bool(request.by_prompt or request.passed) and row.status == "ok"
        ended = Ended(
            qos_class=None if refusal == BAD_REQUEST else row.qos_class or _NO_CLASS,
            is_good=is_served and is_good(row, request.qos),
            refusal=refusal,
            is_failed=row.status == "error",
            prompt_tokens=row.prompt_tokens,
            cached_tokens=row.cached_tokens,
            ttft_s=row.ttft_s,
            gaps_s=gaps_s,
        )
        self.series.note(ended, now_s)
        if refusal is None and request.by_prompt and row.status != "cancelled":
            self.traffic.ended(row, request.qos, now_s)
        elif refusal not in (None, BAD_REQUEST, RATE_LIMIT):
            self.traffic.refused(now_s)
        for output in request.outputs:
            self.decisions.note_ended(output.request_id, output.progress, row.status, row.e2e_s)


def is_good(row: RequestRow, qos: QosClass) -> bool:
    """Whether the measured times meet the class's targets."""
    in_time = qos.ttft_s is None or (row.ttft_s is not None and row.ttft_s <= qos.ttft_s)
    return in_time and (qos.tbt_s is None or row.mean_tbt_s is None or row.mean_tbt_s <= qos.tbt_s)


def sample_of(members: Sequence[Member]) -> Sample:
    """Adds up the members' latest reports."""
    total = sum(member.identity.total_blocks for member in members)
    free = sum(member.load.free_blocks for member in members)
    return Sample(
        num_running=sum(member.load.num_running for member in members),
        num_waiting=sum(member.load.num_waiting for member in members),
        used_share=1 - free / total if total else None,
        output_tokens_total={member.worker_id: member.load.num_output_tokens_total for member in members},
        prefill_tokens_total={member.worker_id: member.load.num_prefill_tokens_total for member in members},
    )


class Left(NamedTuple):
    """What is remembered of a worker that left."""

    role: str
    host: str


class RecentlyLeft:
    """Owns the workers that left a moment ago: the console shows them until they return or are forgotten."""

    def __init__(self) -> None:
        self._present: dict[str, Left] = {}
        self._left: dict[str, tuple[Left, float]] = {}  # what left, when

    def note(self, present: Mapping[str, Left], now_s: float) -> None:
        """Takes the current members by their ids."""
        for worker_id in self._present.keys() - present.keys():
            self._left[worker_id] = (self._present[worker_id], now_s)
        self._left = {
            worker_id: (left, left_s)
            for worker_id, (left, left_s) in list(self._left.items())[-_MAX_LEFT:]
            if worker_id not in present and now_s - left_s < _REMEMBERED_S
        }
        self._present = dict(present)

    def shown(self, now_s: float) -> list[dict[str, Any]]:
        """The workers that left, as JSON values."""
        return [
            {"worker_id": worker_id, "role": left.role, "host": left.host, "left_s_ago": now_s - left_s}
            for worker_id, (left, left_s) in self._left.items()
        ]
