"""What the console sees of the last minutes: figures over time, decisions, hot prefixes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import HalfmoonError, NoCapacity, Unavailable
from halfmoon.ledger.models import RequestRow
from halfmoon.policy.admission.classes import QosClass
from halfmoon.policy.admission.refusal import Refused
from halfmoon.policy.view.key_table import Keys
from services.gateway.cluster.member import Member
from services.gateway.cluster.membership import Membership
from services.gateway.routing.choices import Choices
from services.gateway.telemetry.decisions import Decisions
from services.gateway.telemetry.time_series import Ended, Sample, Series

_SAMPLE_S = 1.0
_NO_CLASS = "none"  # what was refused before its class was known

_MAX_PREFIXES = 4_096
_REMEMBERED_S = 120.0
_MAX_LEFT = 256


class RecentTelemetry:
    """Owns them. Bounded, and gone with the gateway: what lasts is in the ledger."""

    def __init__(self) -> None:
        self.series = Series()
        self.decisions = Decisions()
        self.prefixes = HotPrefixes()
        self.departures = RecentlyLeft()

    def note_members(self, members: Sequence[Member], now_s: float) -> None:
        """The workers as they are now."""
        self.series.sample(sample_of(members), now_s)
        self.departures.note({member.worker_id: member.role for member in members}, now_s)

    async def follow(self, membership: Membership, clock: Callable[[], float]) -> None:
        """Notes the workers every second, for ever."""
        while True:
            self.note_members(membership.members(), clock())
            await asyncio.sleep(_SAMPLE_S)

    def note_ended(
        self, row: RequestRow, choices: Choices, gaps_s: Sequence[float], refusal: str, now_s: float
    ) -> None:
        """One HTTP request that ended, with its row; `refusal` says why, should it have been refused."""
        first = choices.all[0].request if choices.all else None
        ended = Ended(
            qos_class=row.qos_class or _NO_CLASS,
            is_good=first is not None and row.status == "ok" and is_good(row, first.qos),
            refusal=refusal if row.status == "rejected" else None,
            is_failed=row.status == "error",
            prompt_tokens=row.prompt_tokens,
            cached_tokens=row.cached_tokens,
            ttft_s=row.ttft_s,
            gaps_s=gaps_s,
        )
        self.series.note(ended, now_s)
        for choice in choices.all:
            self.decisions.note_ended(choice.request.request_id, choice.progress, row.status, row.e2e_s)


def is_good(row: RequestRow, qos: QosClass) -> bool:
    """Whether what was measured keeps the class's promises."""
    in_time = qos.ttft_s is None or (row.ttft_s is not None and row.ttft_s <= qos.ttft_s)
    return in_time and (qos.tbt_s is None or row.mean_tbt_s is None or row.mean_tbt_s <= qos.tbt_s)


def refusal_of(error: HalfmoonError) -> str:
    """In a word, why a request was not let in."""
    if isinstance(error, Refused):
        return error.reason
    if isinstance(error, NoCapacity):
        return "no room"
    return "no worker" if isinstance(error, Unavailable) else "bad request"


def sample_of(members: Sequence[Member]) -> Sample:
    """The members' last reports."""
    total = sum(member.identity.total_blocks for member in members)
    free = sum(member.load.free_blocks for member in members)
    return Sample(
        num_running=sum(member.load.num_running for member in members),
        num_waiting=sum(member.load.num_waiting for member in members),
        used_share=1 - free / total if total else None,
        output_tokens_total={member.worker_id: member.load.num_output_tokens_total for member in members},
        prefill_tokens_total={member.worker_id: member.load.num_prefill_tokens_total for member in members},
    )


@dataclass(slots=True)
class _Prefix:
    num_tokens: int
    num_uses: int = 0
    num_replicas: int = 0  # workers that had all of it when it was last asked for
    last_s: float = 0.0


class HotPrefixes:
    """Owns the counts, by the key of each prefix's last block; what was not asked for longest goes first."""

    def __init__(self, limit: int = _MAX_PREFIXES) -> None:
        self._limit = limit
        self._prefixes: OrderedDict[int, _Prefix] = OrderedDict()

    def note(self, keys: Keys, depths: NDArray[np.int64], block_tokens: int, now_s: float) -> None:
        """One request. `depths` is `BlockIndex.match` of its keys."""
        depth = min(int(depths.max(initial=0)), len(keys))
        if depth == 0:
            return
        key = int(keys[depth - 1])
        prefix = self._prefixes.setdefault(key, _Prefix(depth * block_tokens))
        self._prefixes.move_to_end(key)
        prefix.num_uses += 1
        prefix.num_replicas = int((depths >= depth).sum())
        prefix.last_s = now_s
        if len(self._prefixes) > self._limit:
            self._prefixes.popitem(last=False)

    def hottest(self, limit: int, now_s: float) -> list[dict[str, Any]]:
        """Those that saved the most tokens, as JSON has it."""
        ranked = sorted(self._prefixes.items(), key=lambda item: -item[1].num_uses * item[1].num_tokens)
        return [
            {
                "key": key.to_bytes(8, "little").hex(),
                "tokens": prefix.num_tokens,
                "uses": prefix.num_uses,
                "replicas": prefix.num_replicas,
                "age_s": now_s - prefix.last_s,
            }
            for key, prefix in ranked[:limit]
        ]


class RecentlyLeft:
    """Owns who was a member a moment ago and is none now. Has no clock."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}
        self._left: dict[str, tuple[str, float]] = {}  # role, when

    def note(self, present: Mapping[str, str], now_s: float) -> None:
        """Who is a member now, with the roles."""
        for worker_id in self._present.keys() - present.keys():
            self._left[worker_id] = (self._present[worker_id], now_s)
        self._left = {
            worker_id: (role, left_s)
            for worker_id, (role, left_s) in list(self._left.items())[-_MAX_LEFT:]
            if worker_id not in present and now_s - left_s < _REMEMBERED_S
        }
        self._present = dict(present)

    def shown(self, now_s: float) -> list[dict[str, Any]]:
        """As JSON has it."""
        return [
            {"worker_id": worker_id, "role": role, "left_s_ago": now_s - left_s}
            for worker_id, (role, left_s) in self._left.items()
        ]
