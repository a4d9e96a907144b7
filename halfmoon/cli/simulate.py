"""`halfmoon simulate`: one cluster under one workload, without any of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from halfmoon.cli.profile_store import DEFAULT_STATE_DIR, LedgerUrl, StateDir, profile_file
from halfmoon.errors import InvalidRequest
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.latency_sources.latency_model import LatencySource
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.simulate_point import Point, PointRequest, simulate_point
from halfmoon.sim.workloads.lengths import KNOWN_LENGTHS


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
    latency: Annotated[
        str | None,
        typer.Option(
            help="a profile's path, ledger:NAME, roofline:MODEL@GPU, aiconfigurator:MODEL@GPU, distserve:MODEL"
        ),
    ] = None,
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
    state_dir: StateDir = DEFAULT_STATE_DIR,
    ledger_url: LedgerUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="prints every request's times as JSON")] = False,
) -> None:
    """Simulates a cluster: every request's TTFT, TPOT and TBT, and how many meet their targets."""
    try:
        request = PointRequest(
            cluster=str(cluster),
            workload=workload,
            latency=latency,
            rate_per_s=rate,
            num_requests=requests,
            process=arrivals.value,
            cv=cv,
            ttft_s=ttft,
            tpot_s=tpot,
            tbt_s=tbt,
            tbt_of=None if tbt_of is None else tbt_of.value,
            attainment=attainment,
            criterion=criterion.value,
            seed=seed,
        )
        found = _simulated(request, lambda text: latency_source(profile_file(text, state_dir, ledger_url)))
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error
    summary = found.summary(with_requests=as_json)
    if as_json:
        print(json.dumps(summary))
    else:
        _print(found.spec, summary)


def _simulated(request: PointRequest, source_of: Callable[[str], LatencySource]) -> Point:
    console = Console(stderr=True)
    columns = TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        return simulate_point(request, lambda done, total: bar.update(task, completed=done, total=total), source_of)


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
