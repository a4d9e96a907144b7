"""`halfmoon simulate`: one cluster under one workload, without any of it."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from halfmoon.errors import InvalidRequest
from halfmoon.sim.asked_workload import asked_workload
from halfmoon.sim.cluster import ClusterSpec, Targets
from halfmoon.sim.lengths import KNOWN_LENGTHS
from halfmoon.sim.report import request_rows, simulation_summary
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate as run_simulation
from halfmoon.sim.spec_file import read_cluster
from halfmoon.sim.workload import Workload


class Criterion(StrEnum):
    """joint: a request counts when it meets all targets. marginal: the smallest of their shares."""

    JOINT = "joint"
    MARGINAL = "marginal"


class TbtOf(StrEnum):
    """Which of a request's gaps the TBT target is held against."""

    LONGEST = "longest"
    LONGEST_TENTH = "longest-tenth"


class Arrivals(StrEnum):
    """The process of a drawn workload."""

    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"


def simulate(
    cluster: Annotated[Path, typer.Option(help="YAML or JSON: workers, network, policies")],
    workload: Annotated[str, typer.Option(help=f"a trace's path, or {'|'.join(KNOWN_LENGTHS)}|in=512,out=64")],
    latency: Annotated[str | None, typer.Option(help="a profile's path, distserve:MODEL or roofline:MODEL@GPU")] = None,
    rate: Annotated[float | None, typer.Option(help="requests a second; a trace keeps its own without it")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="how many; of a trace the first")] = None,
    arrivals: Annotated[Arrivals, typer.Option(help="of a drawn workload")] = Arrivals.POISSON,
    cv: Annotated[float, typer.Option(help="variation of gamma's gaps")] = 1.0,
    ttft: Annotated[float | None, typer.Option(help="target, seconds")] = None,
    tpot: Annotated[float | None, typer.Option(help="target, seconds")] = None,
    tbt: Annotated[float | None, typer.Option(help="target of each request's gaps between tokens, seconds")] = None,
    tbt_of: Annotated[TbtOf | None, typer.Option(help="its longest gap, or the mean of the longest tenth")] = None,
    attainment: Annotated[float, typer.Option(min=0, max=1, help="share of requests that must meet them")] = 0.9,
    criterion: Annotated[Criterion, typer.Option(help="what meeting them is")] = Criterion.JOINT,
    seed: Annotated[int, typer.Option(help="of all that is drawn")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="prints every request's times as JSON")] = False,
) -> None:
    """Simulates a cluster: every request's TTFT, TPOT and TBT, and how many meet their targets."""
    try:
        spec = read_cluster(cluster, latency)
        kept = spec.targets
        wanted = Targets(
            kept.ttft_s if ttft is None else ttft,
            kept.tpot_s if tpot is None else tpot,
            kept.tbt_s if tbt is None else tbt,
            kept.tbt_of if tbt_of is None else tbt_of.value,
        )
        asked = asked_workload(workload, rate, requests, arrivals.value, cv, seed)
        found = _run(spec, asked, seed)
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error
    summary = simulation_summary(spec, found, wanted, attainment, criterion.value)
    if as_json:
        print(json.dumps({**summary, "requests": request_rows(asked, found)}))
    else:
        _print(spec, summary)


def _run(spec: ClusterSpec, workload: Workload, seed: int) -> SimResult:
    console = Console(stderr=True)
    columns = TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(workload))
        return run_simulation(spec, workload, seed, lambda done, total: bar.update(task, completed=done))


def _print(spec: ClusterSpec, summary: dict[str, Any]) -> None:
    console = Console()
    table = Table("", "mean", "p50", "p90", "p99", "target", "met by")
    targets = summary["targets"]
    gap = "longest_gap_s" if targets["tbt_of"] == "longest" else "tail_gap_s"
    for name, column in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("tbt", gap)):
        shown = [_milliseconds(one) for one in summary[column].values()]
        target_s, share = targets[f"{name}_s"], summary[f"attainment_{name}"]
        title = f"TBT ({targets['tbt_of']})" if name == "tbt" else name.upper()
        table.add_row(title, *shown, _milliseconds(target_s), f"{share:.1%}")
    console.print(table)
    outcomes = ", ".join(f"{num} {name}" for name, num in summary["outcomes"].items() if num)
    console.print(f"{summary['num_requests']} requests in {summary['duration_s']:.1f} s: {outcomes}")
    met = "" if summary["is_met"] else ", which is less than asked for"
    console.print(f"attainment ({summary['criterion']}) {summary['attainment']:.1%}{met}")
    per_gpu = summary["goodput_per_s_per_gpu"]
    console.print(
        f"goodput {summary['goodput_per_s']:.3g} requests/s on {spec.num_devices} GPUs, {per_gpu:.3g} on each"
    )
    busy = np.array([one["busy"] for one in summary["workers"]])
    console.print(f"workers are busy {busy.min():.0%} to {busy.max():.0%} of the time")


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.1f} ms"
