"""What the autopilot sees of this gateway: its workers, what comes and what ends, and the targets that apply."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from halfmoon.ledger.models import RequestRow
from halfmoon.policy.admission.qos_classes import NO_PROMISES, QosClass
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.scaling.observation import Observation, ObservedWorker, WorkerSpeed
from halfmoon.policy.scaling.traffic_meter import TrafficMeter
from services.gateway.cluster.member import Member

_CLASS_S = 300.0  # a class without requests for as long sets no targets


class _Targets(NamedTuple):
    ttft_s: float
    tpot_s: float
    seen_s: float


class ObservedTraffic:
    """Owns the counts of what came and ended, and the targets of the classes that have requests."""

    def __init__(self) -> None:
        self._meter = TrafficMeter()
        self._classes: dict[str, _Targets] = {}

    def came(self, work_s: float, now_s: float) -> None:
        """Counts a request that was placed; its prompt takes `work_s` on an idle worker."""
        self._meter.came(work_s, now_s)

    def refused(self, now_s: float) -> None:
        """Counts a request that was refused for want of capacity."""
        self._meter.refused(now_s)

    def ended(self, row: RequestRow, qos: QosClass, now_s: float) -> None:
        """Counts a request that was served, or failed."""
        limits = _Targets(_or_inf(qos.ttft_s), _or_inf(qos.tbt_s), now_s)
        self._classes[qos.name] = limits
        is_done = row.status == "ok"
        self._meter.ended(
            in_ttft=is_done and _or_inf(row.ttft_s) <= limits.ttft_s,
            in_tpot=is_done and (row.mean_tbt_s or 0.0) <= limits.tpot_s,
            now_s=now_s,
        )

    def observation(self, members: Sequence[Member], seconds: int, now_s: float) -> Observation:
        """The workers that stay, the last seconds' traffic, and the strictest targets of the classes with requests."""
        self._classes = {name: one for name, one in self._classes.items() if one.seen_s > now_s - _CLASS_S}
        targets = list(self._classes.values()) or [_Targets(_or_inf(NO_PROMISES.ttft_s), math.inf, now_s)]
        return Observation(
            tuple(_worker(member) for member in members if not member.load.draining),
            self._meter.window(seconds, now_s),
            _speed(members),
            min(one.ttft_s for one in targets),
            min(one.tpot_s for one in targets),
        )


def _worker(member: Member) -> ObservedWorker:
    load = member.load
    num_decoding = load.num_running - load.num_prefilling
    return ObservedWorker(
        member.worker_id,
        member.role,
        member.role_epoch,
        member.role_since_s,
        member.prompts.num_waiting,
        num_decoding + load.num_reserved,
        load.context_tokens,
        can_change=member.identity.can_change_role,
    )


def _speed(members: Sequence[Member]) -> WorkerSpeed:
    """The median worker: each coefficient of those that are measured; of decode steps, of those that decode."""
    prefills = [member.latency.prefill for member in members if any(member.latency.prefill)]
    steps = [member.latency.tbt for member in members if member.role != "prefill" and any(member.latency.step)]
    return WorkerSpeed(
        PrefillModel(*_medians(prefills)),
        StepModel(*_medians(steps)),
        median(member.identity.max_running or math.inf for member in members) if members else math.inf,
        median(member.identity.total_blocks * member.identity.layout.block_tokens for member in members)
        if members
        else math.inf,
    )


def _medians(models: Sequence[tuple[float, ...]]) -> list[float]:
    return [median(values) for values in zip(*models, strict=True)] if models else []


def _or_inf(value_s: float | None) -> float:
    return math.inf if value_s is None else value_s
