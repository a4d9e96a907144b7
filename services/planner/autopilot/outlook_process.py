"""Asks for an outlook in a process of its own, since it takes seconds of a core.

The process, `python -m services.planner.autopilot.outlook_process`, reads one JSON object from stdin and writes one:
the outlook, or null.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from halfmoon.errors import DeadlineExceeded, ServiceFailed
from halfmoon.plan.traffic_outlook import Outlook, RecentTraffic, outlook
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.scaling.observation import Split, WorkerSpeed
from halfmoon.policy.scaling.pressure import Demand
from halfmoon.rpc.credentials.child_environment import child_environment

_MODULE = "services.planner.autopilot.outlook_process"
_NICE = 10  # below the priority of workers on the same host
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # matrices are tiny: several spin for each other
_DEADLINE_S = 100.0
_MAX_LINE_BYTES = 1 << 20


async def request_outlook(recent: RecentTraffic) -> Outlook | None:
    """The outlook. Raises ServiceFailed or DeadlineExceeded; the process has ended in any case."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", _MODULE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        env={
            **child_environment(os.environ, _MODULE),
            **_ONE_THREAD,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    try:
        async with asyncio.timeout(_DEADLINE_S):
            answer, _ = await process.communicate(json.dumps(_written(recent)).encode() + b"\n")
    except TimeoutError as error:
        raise DeadlineExceeded(f"no outlook within {_DEADLINE_S:g} s") from error
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        raise ServiceFailed(f"the outlook's process ended with exit status {process.returncode}")
    return _outlook_from(json.loads(answer))


def main() -> None:
    """Answers what stdin asks."""
    os.nice(_NICE)
    found = outlook(_read(json.loads(sys.stdin.readline())))
    sys.stdout.write(json.dumps(None if found is None else found._asdict()))


def _written(recent: RecentTraffic) -> dict[str, Any]:
    """JSON values, with null for what has no limit."""
    written: dict[str, Any] = _limited(asdict(recent))
    return written


def _limited(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _limited(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_limited(inner) for inner in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _read(line: dict[str, Any]) -> RecentTraffic:
    prefill, step, max_running, kv_tokens = line["speed"]
    ages_s, prompts, outputs = (
        np.asarray(line[name], dtype=np.float64) for name in ("ages_s", "prompt_tokens", "output_tokens")
    )
    speed = WorkerSpeed(PrefillModel(*prefill), StepModel(*step), _unlimited(max_running), _unlimited(kv_tokens))
    targets = _unlimited(line["ttft_s"]), _unlimited(line["tpot_s"])
    split, roles = Split(*line["split"]), tuple(line["roles"])
    return RecentTraffic(ages_s, prompts, outputs, speed, *targets, line["attainment"], split, roles)


def _outlook_from(value: dict[str, Any] | None) -> Outlook | None:
    if value is None:
        return None
    return Outlook(**{**value, "demand": Demand(*value["demand"]), "target": Split(*value["target"])})


def _unlimited(value: float | None) -> float:
    return math.inf if value is None else value


if __name__ == "__main__":
    main()
