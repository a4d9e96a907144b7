"""The autopilot against fixed ratios of roles and an oracle, live: `halfmoon up`, its planner, HTTP, real time.

    python -m benchmarks.scaling_live [--seconds 40] [--cycle phases] [--fixed 3]     # 16 simulated workers
    python -m benchmarks.scaling_live --workers 4 --ratio 1:1:2 --ratio 0:0:4         # as much traffic for each of 4

One system serves all rows one after the other, on the same requests with other tokens; before each row roles are set by
force. Simulated workers: the fixed ratios are those that the simulator finds best, and the simulator's attainment on
the same requests is in the last column. The oracle sets the ratios that the simulator finds best for each phase alone,
all workers at once, with the lead that is best there. Real workers are in `benchmarks/scaling_real`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.live_system import running_system
from benchmarks.scaling import (
    ANSWERS,
    BURSTS,
    LATENCY,
    LEADS_S,
    LIMITS,
    NUM_WORKERS,
    PLANNER,
    PROMPTS,
    RULES,
    TARGETS,
    Phase,
    Phased,
    all_splits,
    attainments,
    autopilot,
    estimated,
    fixed,
    oracle,
    phased,
)
from halfmoon.background import running
from halfmoon.policy.scaling.observation import Split
from halfmoon.policy.view.worker_view import ROLES
from halfmoon.replay.client import Gateway
from halfmoon.replay.cluster import discover_gateway
from halfmoon.replay.outcome import Outcome, ReplayTargets
from halfmoon.replay.player import played, played_sessions
from halfmoon.replay.sessions import Session, Turn
from halfmoon.rpc.control_api import ControlApi, control_api
from halfmoon.sim.workloads.workload import Workload

_IDLE_S = 180.0
_START_S = 600.0


class Row(NamedTuple):
    """One way to set roles."""

    name: str
    first: Split
    changes: tuple[tuple[float, Split], ...] = ()  # at seconds
    acts: bool = False


class Live:
    """Owns nothing: one system, by its control API and its HTTP API."""

    def __init__(self, api: ControlApi, gateway: Gateway) -> None:
        self._api = api
        self._gateway = gateway
        self._targets = ReplayTargets()
        self._played = 0

    async def set_targets(self, targets: ReplayTargets) -> None:
        """Sets what requests are to meet, once."""
        self._targets = targets
        await self._api.put(
            "/halfmoon/v1/classes/default", {"version": 0, "ttft_s": targets.ttft_s, "tbt_s": targets.tbt_s}
        )

    async def at_once(self, split: Split, workload: Workload, num_at_once: int) -> list[Outcome]:
        """Requests in a closed loop of `num_at_once`, by a fixed ratio."""
        await self._mode("off")
        await self._idle()
        await self._set(split)
        lengths = zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True)
        sessions = [Session(0.0, (Turn(*each),)) for each in lengths]
        outcomes = await played_sessions(sessions, self._gateway, self._played, num_at_once)
        self._played += len(workload)
        return [outcome for each in outcomes for outcome in each]

    async def row(self, row: Row, work: Phased) -> tuple[list[float], int, float]:
        """Attainment of each phase and of all, the autopilot's changes, and how late requests were sent."""
        await self._mode("off")
        await self._idle()
        await self._set(row.first)
        before = await self._num_changes()
        await self._mode("act" if row.acts else "off")
        async with running(self._follow(row)):
            outcomes = await played(work.workload, self._gateway, lambda: None, self._played)
        self._played += len(work.workload)
        late_s = float(np.percentile([outcome.sent_late_s for outcome in outcomes], 99))
        changes = await self._num_changes() - before if row.acts else 0
        return _shares(outcomes, work, self._targets), changes, late_s

    async def _follow(self, row: Row) -> None:
        now_s = 0.0
        for at_s, split in row.changes:
            await asyncio.sleep(max(at_s - now_s, 0.0))
            now_s = max(at_s, now_s)
            await self._set(split)

    async def _set(self, split: Split) -> None:
        """Sets the roles, those with the least to do first; the last of a phase cannot go before another came."""
        for _ in range(3):
            workers = await self._api.workers()
            now = {role: [one for one in workers if one["role"] == role] for role in ROLES}
            wanted = [role for role in ROLES for _ in range(split.of(role) - len(now[role]))]
            leaving = [
                worker
                for role in ROLES
                for worker in sorted(now[role], key=_load)[: max(len(now[role]) - split.of(role), 0)]
            ]
            pairs = zip(leaving, wanted, strict=True)
            changes = [self._api.change(one["worker_id"], "role", {"role": role, "force": True}) for one, role in pairs]
            if not [error for error in await asyncio.gather(*changes, return_exceptions=True) if error is not None]:
                return
            if not leaving:
                return
        raise RuntimeError(f"the roles cannot be set to {split}")

    async def _mode(self, mode: str) -> None:
        version = (await self._api.get("/halfmoon/v1/autopilot?limit=1"))["version"]
        await self._api.put("/halfmoon/v1/autopilot", {"mode": mode, "version": version})
        await asyncio.sleep(2.5)  # it looks once a second, and the mode is a second old at most

    async def _idle(self) -> None:
        def nothing_runs(workers: Sequence[Any]) -> bool:
            return not any(one["load"]["num_running"] + one["load"]["num_waiting"] for one in workers)

        await self._api.until(nothing_runs, _IDLE_S, "the workers are not idle")

    async def _num_changes(self) -> int:
        rows: Any = await self._api.get("/halfmoon/v1/worker_changes?limit=1000")
        return sum(row["changed_by"] == "autopilot" for row in rows)


@asynccontextmanager
async def live(settings: Mapping[str, Any], engine: Sequence[str], num_workers: int) -> AsyncIterator[Live]:
    """A system with its planner, and half of its workers prefill (rounded down), the others decode.

    A person's changes count for nothing, since the benchmark's are some. `engine`: options of `halfmoon up`.
    """
    num_prefill = num_workers // 2
    roles = ("--prefill", str(num_prefill), "--decode", str(num_workers - num_prefill))
    with tempfile.TemporaryDirectory() as directory:
        config, state_dir = Path(directory) / "up.json", Path(directory) / "state"
        every = {"gateway": {"role_dwell_s": 0, "admission": "off"}, "planner": PLANNER}
        config.write_text(json.dumps({**every, **settings}))
        async with (
            running_system(("--config", str(config), *engine, *roles), state_dir, num_workers, _START_S) as url,
            control_api(url, "benchmark", None, state_dir) as api,
        ):
            yield Live(api, await discover_gateway(url, hides_length="simulation" in settings))


@asynccontextmanager
async def _live_simulation(num_workers: int) -> AsyncIterator[Live]:
    prefill, step = LATENCY.prefill[0].model, LATENCY.step[0].model
    figures = {
        "prefill": list(prefill),
        "step": list(step),
        "kv_tokens": LATENCY.kv_tokens,
        "kv_token_bytes": LATENCY.kv_bytes_per_token,
        "max_batch_tokens": LIMITS.max_batch_tokens,
        "chunk_tokens": LIMITS.chunk_tokens,
        "max_running": LIMITS.max_running,
    }
    with tempfile.TemporaryDirectory() as directory:
        profile = Path(directory) / "profile.json"
        profile.write_text(json.dumps(figures))
        settings = {"simulation": {"profile": str(profile), "length": "seed"}}
        async with live(settings, ("--engine", "sim"), num_workers) as system:
            yield system


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycle", choices=("phases", "bursts"), default="phases")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=float, default=1.0, help="factor of every rate")
    parser.add_argument("--fixed", type=int, default=3, help="fixed ratios, the simulator's best first")
    parser.add_argument(
        "--ratio", type=split_of, action="append", help="PREFILL:DECODE:BOTH: instead, these fixed ratios"
    )
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, help="simulated ones; rates follow their number")
    args = parser.parse_args()
    load = args.load * args.workers / NUM_WORKERS
    asyncio.run(_simulated(cycle_of((PROMPTS, ANSWERS, BURSTS), args, load), args))


def cycle_of(phases: tuple[Phase, Phase, Phase], args: argparse.Namespace, load: float) -> Phased:
    """Prompts, answers and, if they are asked for, bursts by turns, at `load` times their rates."""
    prompts, answers, bursts = [phase._replace(rate_per_s=phase.rate_per_s * load) for phase in phases]
    cycle = (prompts, answers) * 3 if args.cycle == "phases" else (prompts, answers, bursts) * 2
    return phased(cycle, args.seconds, args.seed)


async def _simulated(work: Phased, args: argparse.Namespace) -> None:
    targets = ReplayTargets(TARGETS.ttft_s or 0.0, TARGETS.tpot_s or 0.0)
    rows, simulator = await asyncio.to_thread(_rows, work, args)
    print_head(work, targets, "simulator | ")
    async with _live_simulation(args.workers) as system:
        await system.set_targets(targets)
        for row in rows:
            print_row(row, *await system.row(row, work), f"{simulator[row.name]:.1%} | ")


def _rows(work: Phased, args: argparse.Namespace) -> tuple[list[Row], dict[str, float]]:
    """What is to be run, and the simulator's attainments."""
    splits = all_splits(args.workers)
    tried = args.ratio
    if tried is None:
        tried = sorted(splits, key=lambda split: -estimated(split, work.workload).attainment(TARGETS).joint)
        tried = tried[: 2 * args.fixed]
    results = {split: attainments(fixed(split, work.workload), work.starts_s)[-1] for split in tried}
    best = args.ratio or sorted(results, key=lambda split: -results[split])[: args.fixed]
    of_phase = {}
    for phase in dict.fromkeys(work.phases):
        alone = phased([phase], args.seconds, args.seed + 1).workload
        shares = {split: estimated(split, alone).attainment(TARGETS).joint for split in splits}
        good = [split for split in splits if shares[split] >= max(shares.values()) - 0.005]
        of_phase[phase] = good[len(good) // 2]
    leads = [_changes(work, of_phase, lead_s) for lead_s in LEADS_S]
    ideals = [attainments(oracle(lead[0][1], lead, work.workload), work.starts_s)[-1] for lead in leads]
    ideal = max(ideals)
    changes = leads[ideals.index(ideal)]
    first = Split(args.workers // 2, args.workers - args.workers // 2)
    names = ", ".join(f"{phase.name} {split}" for phase, split in of_phase.items())
    rows = [
        Row("autopilot", first, acts=True),
        Row(f"oracle ({names})", changes[0][1], changes[1:]),
        *(Row(str(split), split) for split in best),
    ]
    simulated = {str(split): results[split] for split in best}
    simulated["autopilot"] = attainments(autopilot(first, work.workload, RULES)[0], work.starts_s)[-1]
    return rows, simulated | {rows[1].name: ideal}


def _changes(work: Phased, of_phase: Mapping[Phase, Split], lead_s: float) -> tuple[tuple[float, Split], ...]:
    starts = zip(work.starts_s, work.phases, strict=True)
    return tuple((max(start_s + lead_s, 0.0), of_phase[phase]) for start_s, phase in starts)


def _shares(outcomes: Sequence[Outcome], work: Phased, targets: ReplayTargets) -> list[float]:
    good = np.array([outcome.meets(targets) for outcome in outcomes])
    edges = [*np.searchsorted(work.workload.start_s, work.starts_s), len(good)]
    return [*(float(good[a:b].mean()) if b > a else 1.0 for a, b in itertools.pairwise(edges)), float(good.mean())]


def print_head(work: Phased, targets: ReplayTargets, more: str = "") -> None:
    """The head of the table, with further columns."""
    rate = f"{len(work.workload)} requests in {work.workload.duration_s:.0f} s"
    print(f"live: {rate}, TTFT {targets.ttft_s:g} s, TPOT {1000 * targets.tbt_s:g} ms")
    names = " | ".join(phase.name for phase in work.phases)
    print(f"| roles | all | {names} | changes | sent late p99 | {more}", flush=True)


def print_row(row: Row, shares: Sequence[float], changes: int, late_s: float, more: str = "") -> None:
    """A row of it: what `Live.row` returned."""
    phases = " | ".join(f"{share:.0%}" for share in shares[:-1])
    print(f"| {row.name} | {shares[-1]:.1%} | {phases} | {changes or ''} | {1000 * late_s:.0f} ms | {more}", flush=True)


def split_of(text: str) -> Split:
    """The ratio of roles that PREFILL:DECODE:BOTH says."""
    return Split(*map(int, text.split(":")))


def _load(worker: Any) -> float:
    load = worker["load"]
    return float(load["num_running"] + load["num_waiting"])


if __name__ == "__main__":
    main()
