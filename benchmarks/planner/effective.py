"""Share of a trace's requests that meet their targets at its own rate: `python -m benchmarks.planner effective`.

Mooncake's paper compares this (FAST '25, sections 5.1 and 5.2: the effective request ratio at TBT thresholds of 100,
200 and 300 ms, TTFT of 30 s). Its gains are ratios of two such shares, not of the rates that two clusters sustain.
"""

from __future__ import annotations

from collections.abc import Mapping

from halfmoon.sim.cluster.cluster_spec import ClusterSpec, SloTargets
from halfmoon.sim.result import quantiles
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Workload

TBT_MS = (100, 200, 300)


def show_effective(systems: Mapping[str, ClusterSpec], workload: Workload, ttft_s: float) -> None:
    """Prints a row per system, with the first one's gain over it."""
    print("| system | effective at 100 ms | 200 ms | 300 ms | gain of the first | mean TTFT s | cached tokens |")
    print("|---|---|---|---|---|---|---|")
    ours: list[float] = []
    for name, spec in systems.items():
        result = simulate(spec, workload)
        shares = [result.attainment(SloTargets(ttft_s, tbt_s=ms / 1000, tbt_of="longest-tenth")).joint for ms in TBT_MS]
        ours = ours or shares
        gains = ", ".join(
            f"{best / share - 1:+.0%}" if share else "–" for best, share in zip(ours, shares, strict=True)
        )
        cells = " | ".join(f"{share:.1%}" for share in shares)
        cached = result.cached_tokens.sum() / workload.prompt_tokens.sum()
        mean_s = quantiles(result.ttft_s)["mean"] or 0.0
        print(f"| {name} | {cells} | {gains} | {mean_s:.2f} | {cached:.1%} |", flush=True)
