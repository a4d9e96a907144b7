"""The autopilot against every fixed ratio of roles and an oracle, on 16 simulated workers.

    python -m benchmarks.scaling phases|bursts|steady [--seed 1] [--seconds 120]
    python -m benchmarks.scaling trace --trace AzureLLMInferenceTrace_code.csv --speed 20

- phases: prompt-heavy and answer-heavy traffic by turns; bursts: with a mixed phase of bursts after each pair.
- steady: an hour of the mixed phase without bursts, which needs no change.
- trace: the requests of a file, `--speed` times as fast.

The oracle knows the phases: at the beginning of each it sets the ratio that did best on that phase alone, all workers
at once; of several lead times the best one counts. All run in the same simulator on the same requests. Of fixed ratios
those with the best estimates are simulated by the policies, which takes ten times as long.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from halfmoon.config.planner import AutopilotConfig
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.scaling.autopilot import Autopilot, Decision
from halfmoon.policy.scaling.observation import Observation, Split
from halfmoon.policy.scaling.rules import ScalingRules
from halfmoon.policy.view.worker_view import ROLES, Role
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Network, SloTargets, WorkerGroup
from halfmoon.sim.latency_sources.worker_profile import coefficients
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import ArrivalProcess, arrivals
from halfmoon.sim.workloads.lengths import Lognormal
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Workload

NUM_WORKERS = 16
TARGETS = SloTargets(ttft_s=4.0, tpot_s=0.1)
LATENCY = coefficients(
    "benchmark", PrefillModel(0.02, 4e-4, 0.0), StepModel(0.06, 1.5e-3, 2e-7), kv_tokens=200_000, kv_token_bytes=131_072
)
LIMITS = BatchLimits(max_batch_tokens=4096, chunk_tokens=512, max_running=64)
NETWORK = Network(bytes_per_s=25e9, latency_s=1e-3)
LEADS_S = (-10.0, -5.0, 0.0, 5.0)  # of the oracle's changes, before or after a phase begins
PLANNER = {"autopilot_dwell_s": 10.0, "autopilot_person_s": 0.0}
RULES = AutopilotConfig.model_validate(PLANNER).scaling_rules()  # as a planner with these settings has them


class Phase(NamedTuple):
    """One kind of traffic."""

    name: str
    rate_per_s: float
    prompt_tokens: float
    output_tokens: float
    process: ArrivalProcess = "poisson"
    cv: float = 1.0


PROMPTS = Phase("prompts", 8.0, 3000, 20)
ANSWERS = Phase("answers", 14.0, 200, 160)
BURSTS = Phase("bursts", 7.0, 1000, 120, "gamma", 2.5)
MIXED = Phase("mixed", 9.0, 1000, 120)
SIGMA = 0.5  # of the logarithms of all lengths


@dataclass(frozen=True)
class Phased:
    """A workload, and the times at which its phases begin."""

    workload: Workload
    phases: tuple[Phase, ...]
    starts_s: tuple[float, ...]


def phased(phases: Sequence[Phase], seconds: float, seed: int) -> Phased:
    """The phases one after the other, each for `seconds`."""
    rng = np.random.default_rng(seed)
    starts, prompts, outputs = [], [], []
    for number, phase in enumerate(phases):
        drawn = arrivals(phase.process, int(3 * phase.rate_per_s * seconds) + 10, phase.rate_per_s, rng, phase.cv)
        within = drawn[drawn < seconds]
        starts.append(within + number * seconds)
        prompts.append(Lognormal(phase.prompt_tokens, SIGMA).sample(len(within), rng, 16_000))
        outputs.append(Lognormal(phase.output_tokens, SIGMA).sample(len(within), rng, 2_000))
    workload = Workload(np.concatenate(starts), np.concatenate(prompts), np.concatenate(outputs))
    return Phased(workload, tuple(phases), tuple(number * seconds for number in range(len(phases))))


def cluster(split: Split) -> ClusterSpec:
    """The cluster in one ratio of roles."""
    groups = tuple(WorkerGroup(role, split.of(role), LATENCY, LIMITS) for role in ROLES if split.of(role))
    return ClusterSpec(groups, NETWORK, targets=TARGETS)


class Recorded:
    """The autopilot as a simulation's controller. Owns its decisions."""

    every_s = 1.0  # as the planner looks

    def __init__(self, rules: ScalingRules) -> None:
        self._autopilot = Autopilot(rules)
        self.window_s = rules.window_s
        self.decisions: list[tuple[float, Decision]] = []
        self.num_changes = 0

    def changes(self, seen: Observation, now_s: float) -> Iterable[tuple[str, Role]]:
        """The autopilot's decision."""
        decision = self._autopilot.decide(seen, now_s)
        if not self.decisions or decision.changes or decision.reason != self.decisions[-1][1].reason:
            self.decisions.append((now_s, decision))
        if decision.action != "change_role" or decision.role is None:
            return
        self.num_changes += 1
        yield decision.worker_id, decision.role


class Timetable:
    """Sets given splits at given times, all workers at once."""

    every_s = 0.5
    window_s = 1

    def __init__(self, splits: Sequence[tuple[float, Split]]) -> None:
        self._splits = list(splits)

    def changes(self, seen: Observation, now_s: float) -> Iterable[tuple[str, Role]]:
        """All changes that are due, of the workers with the least to do."""
        due = [split for at_s, split in self._splits if at_s <= now_s]
        self._splits = [(at_s, split) for at_s, split in self._splits if at_s > now_s]
        if not due:
            return
        target, now = due[-1], seen.split
        wanted = [role for role in ROLES for _ in range(target.of(role) - now.of(role))]
        by_load = sorted(seen.workers, key=lambda worker: worker.context_tokens + worker.waiting_tokens)
        for role in ROLES:
            for worker in [worker for worker in by_load if worker.role == role][
                : max(now.of(role) - target.of(role), 0)
            ]:
                yield worker.worker_id, wanted.pop()


def fixed(split: Split, workload: Workload) -> SimResult:
    """A fixed ratio."""
    return simulate(cluster(split), workload, with_gaps=False)


def estimated(split: Split, workload: Workload) -> SimResult:
    """A fixed ratio with requests placed by load alone: a guess at a tenth of the time."""
    return simulate(cluster(split), workload, policies="never", with_gaps=False)


def oracle(first: Split, splits: Sequence[tuple[float, Split]], workload: Workload) -> SimResult:
    """Ratios set at given times."""
    return simulate(cluster(first), workload, with_gaps=False, controller=Timetable(splits))


def autopilot(split: Split, workload: Workload, rules: ScalingRules) -> tuple[SimResult, Recorded]:
    """The autopilot, from a ratio on."""
    recorded = Recorded(rules)
    result = simulate(cluster(split), workload, with_gaps=False, controller=recorded)
    return result, recorded


def all_splits(num_workers: int = NUM_WORKERS) -> list[Split]:
    """Every ratio of prefill to decode, and with a half and all workers of role `both`."""
    return [
        Split(prefill, num_workers - both - prefill, both)
        for both in (0, num_workers // 2)
        for prefill in range(1, num_workers - both)
    ] + [Split(0, 0, num_workers)]


def attainments(result: SimResult, starts_s: Sequence[float]) -> list[float]:
    """The joint attainment of the requests of each phase, and of all of them last."""
    edges = [*np.searchsorted(result.start_s, starts_s), len(result.start_s)]
    parts = [result.rows(int(a), int(b)).attainment(TARGETS).joint for a, b in itertools.pairwise(edges)]
    return [*parts, result.attainment(TARGETS).joint]


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("phases", "bursts", "steady", "trace"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="of a phase")
    parser.add_argument("--load", type=float, default=1.0, help="factor of every rate")
    parser.add_argument("--verified", type=int, default=6, help="fixed ratios, best estimates first, by the policies")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=float, default=20.0)
    parser.add_argument("--only-autopilot", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print every decision")
    args = parser.parse_args()
    work = _work(args)
    rate = f"{len(work.workload)} requests in {work.workload.duration_s:.0f} s"
    print(f"{args.what}: {rate}, TTFT {TARGETS.ttft_s:g} s, TPOT {1000 * (TARGETS.tpot_s or 0):g} ms")
    names = [phase.name for phase in work.phases] if work.phases else ["trace"]
    print(f"| roles | all | {' | '.join(names)} | changes |")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        start = Split(NUM_WORKERS // 2, NUM_WORKERS // 2, 0)
        running = pool.submit(autopilot, start, work.workload, RULES)
        if not args.only_autopilot:
            _rivals(args, work, pool)
        result, recorded = running.result()
    _row("autopilot", attainments(result, work.starts_s), str(recorded.num_changes))
    for at_s, decision in recorded.decisions if args.verbose else ():
        p, t = decision.pressure, decision.predicted
        print(
            f"{at_s:7.1f} {decision.split} -> {decision.target} {decision.action} {decision.role or ''} "
            f"({decision.reason}) pressed {p.prefill:.2f} {p.decode:.2f} -> {t.prefill:.2f} {t.decode:.2f}"
        )


def _rivals(args: argparse.Namespace, work: Phased, pool: ProcessPoolExecutor) -> None:
    splits = all_splits()
    estimates = list(pool.map(estimated, splits, [work.workload] * len(splits)))
    order = sorted(range(len(splits)), key=lambda index: -estimates[index].attainment(TARGETS).joint)
    splits = [splits[index] for index in order[: args.verified]]
    results = list(pool.map(fixed, splits, [work.workload] * len(splits)))
    rows = sorted(
        ((attainments(result, work.starts_s), split) for split, result in zip(splits, results, strict=True)),
        key=lambda row: -row[0][-1],
    )
    for shares, split in rows if args.verbose else rows[:4]:
        _row(str(split), shares, "")
    if len(work.phases) > 1:
        best = _best_splits(args, work, all_splits(), pool)
        tried = [
            [
                (max(start_s + lead_s, 0.0), best[phase.name])
                for start_s, phase in zip(work.starts_s, work.phases, strict=True)
            ]
            for lead_s in LEADS_S
        ]
        firsts = [splits[0][1] for splits in tried]
        found = pool.map(oracle, firsts, tried, [work.workload] * len(tried))
        scores = [attainments(result, work.starts_s) for result in found]
        lead = int(np.argmax([score[-1] for score in scores]))
        ratios = ", ".join(f"{name} {split}" for name, split in best.items())
        _row(f"oracle ({ratios}; {LEADS_S[lead]:+g} s)", scores[lead], "")


def _best_splits(
    args: argparse.Namespace, work: Phased, splits: Sequence[Split], pool: ProcessPoolExecutor
) -> dict[str, Split]:
    """The best ratio for each kind of phase alone; of equal ones the one in the middle."""
    best = {}
    for phase in dict.fromkeys(work.phases):
        alone = phased([phase], args.seconds, args.seed + 1).workload
        found = list(pool.map(estimated, splits, [alone] * len(splits)))
        shares = [result.attainment(TARGETS).joint for result in found]
        good = [split for split, share in zip(splits, shares, strict=True) if share >= max(shares) - 0.005]
        best[phase.name] = good[len(good) // 2]
    return best


def _work(args: argparse.Namespace) -> Phased:
    if args.what == "trace":
        return Phased(read_workload(args.trace).scaled(args.speed), (), (0.0,))
    if args.what == "steady":
        return phased([MIXED._replace(rate_per_s=MIXED.rate_per_s * args.load)], 3600.0, args.seed)
    cycle = (PROMPTS, ANSWERS) * 3 if args.what == "phases" else (PROMPTS, ANSWERS, BURSTS) * 2
    return phased([phase._replace(rate_per_s=phase.rate_per_s * args.load) for phase in cycle], args.seconds, args.seed)


def _row(name: str, shares: Sequence[float], changes: str) -> None:
    print(
        f"| {name} | {shares[-1]:.1%} | {' | '.join(f'{share:.0%}' for share in shares[:-1])} | {changes} |", flush=True
    )


if __name__ == "__main__":
    main()
