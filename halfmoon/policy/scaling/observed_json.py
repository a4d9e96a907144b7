"""An observation as JSON values, which gateways send and the planner reads; several gateways' observations as one.

Times are ages, since the two have different clocks, and what has no limit is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.scaling.observation import Observation, ObservedWorker, Traffic, WorkerSpeed


def observation_json(seen: Observation, now_s: float) -> dict[str, Any]:
    """The observation as JSON values."""
    speed = seen.speed
    return {
        "workers": [
            {
                "worker_id": worker.worker_id,
                "role": worker.role,
                "epoch": worker.epoch,
                "changed_s_ago": _limit(now_s - worker.changed_s),
                "waiting_tokens": worker.waiting_tokens,
                "num_running": worker.num_running,
                "context_tokens": worker.context_tokens,
                "can_change": worker.can_change,
            }
            for worker in seen.workers
        ],
        "traffic": seen.traffic._asdict(),
        "speed": {
            "prefill": list(speed.prefill),
            "step": list(speed.step),
            "max_running": _limit(speed.max_running),
            "kv_tokens": _limit(speed.kv_tokens),
        },
        "ttft_s": _limit(seen.ttft_s),
        "tpot_s": _limit(seen.tpot_s),
    }


def observation_from(value: Mapping[str, Any], now_s: float) -> Observation:
    """The observation that these values say. Raises KeyError, TypeError or ValueError for others."""
    speed = value["speed"]
    workers = tuple(
        ObservedWorker(**{name: field for name, field in worker.items() if name != "changed_s_ago"}, changed_s=changed)
        for worker in value["workers"]
        for changed in [now_s - _unlimited(worker["changed_s_ago"])]
    )
    models = PrefillModel(*speed["prefill"]), StepModel(*speed["step"])
    limits = _unlimited(speed["max_running"]), _unlimited(speed["kv_tokens"])
    targets = _unlimited(value["ttft_s"]), _unlimited(value["tpot_s"])
    return Observation(workers, Traffic(**value["traffic"]), WorkerSpeed(*models, *limits), *targets)


def of_all_gateways(latest: Observation, others: Sequence[Observation], num_gateways: int) -> Observation:
    """The latest observation with the traffic of all gateways, each of which sees its own requests alone.

    Those that are not known yet count as much as the known ones in the mean.
    """
    traffic = sum((other.traffic for other in others), latest.traffic)
    known = 1 + len(others)
    if num_gateways > known:
        grown = {
            name: round(count * num_gateways / known) if isinstance(count, int) else count * num_gateways / known
            for name, count in traffic._asdict().items()
            if name != "seconds"
        }
        traffic = traffic._replace(**grown)
    ttft_s, tpot_s = (min(getattr(seen, name) for seen in (latest, *others)) for name in ("ttft_s", "tpot_s"))
    return replace(latest, traffic=traffic, ttft_s=ttft_s, tpot_s=tpot_s)


def _limit(value: float) -> float | None:
    return None if math.isinf(value) else value


def _unlimited(value: float | None) -> float:
    return math.inf if value is None else float(value)
