"""`halfmoon simulate`: simulates one cluster under one workload."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from halfmoon.cli.profile_store import LedgerOptions, profile_file
from halfmoon.cli.terminal.option_groups import with_option_groups
from halfmoon.errors import InvalidRequest
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.latency_sources.latency_model import LatencySource
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.simulate_point import Point, PointRequest, simulate_point
from halfmoon.sim.workloads.lengths import KNOWN_LENGTHS


class Criterion(StrEnum):
    """joint: the share of requests that meet all targets. marginal: the smallest share over the targets."""

    JOINT = "joint"
    MARGINAL = "marginal"


class TbtOf(StrEnum):
    """The gaps of a request that the TBT target applies to."""

    LONGEST = "longest"
    LONGEST_TENTH = "longest-tenth"


class Arrivals(StrEnum):
    """The arrival process of a drawn workload."""

    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The simulated cluster."""

    PANEL: ClassVar[str] = "Cluster"
    cluster: Annotated[Path, typer.Option(help="YAML or JSON file with workers, network and policies.")]
    latency: Annotated[
        str | None,
        typer.Option(
            help="A profile's path, ledger:NAME, roofline:MODEL@GPU, aiconfigurator:MODEL@GPU or distserve:MODEL. "
            "Default: the cluster file's."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The requests."""

    PANEL: ClassVar[str] = "Workload"
    workload: Annotated[str, typer.Option(help=f"A trace's path, or {'|'.join(KNOWN_LENGTHS)}|in=512,out=64.")]
    rate: Annotated[float | None, typer.Option(help="Requests per second. Default: the trace's own rate.")] = None
    requests: Annotated[int | None, typer.Option(min=1, help="Number of requests; of a trace the first.")] = None
    arrivals: Annotated[Arrivals, typer.Option(help="Arrival process of a drawn workload.")] = Arrivals.POISSON
    cv: Annotated[float, typer.Option(help="Coefficient of variation of the gaps between gamma arrivals.")] = 1.0
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The latency targets; those not given are the cluster file's."""

    PANEL: ClassVar[str] = "Targets"
    ttft: Annotated[float | None, typer.Option(help="Target for the time to first token, in seconds.")] = None
    tpot: Annotated[float | None, typer.Option(help="Target for the mean time per output token, in seconds.")] = None
    tbt: Annotated[float | None, typer.Option(help="Target for the gaps between tokens of a request, in seconds.")] = (
        None
    )
    tbt_of: Annotated[
        TbtOf | None, typer.Option(help="Gaps that --tbt applies to: the longest, or the mean of the longest tenth.")
    ] = None
    attainment: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that must meet the targets.")] = 0.9
    criterion: Annotated[
        Criterion, typer.Option(help="joint: a request must meet all targets; marginal: each target counts by itself.")
    ] = Criterion.JOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What to print."""

    PANEL: ClassVar[str] = "Output"
    as_json: Annotated[bool, typer.Option("--json", help="Prints the result with every request's times as JSON.")] = (
        False
    )


@with_option_groups
def simulate(
    cluster: ClusterOptions,
    workload: WorkloadOptions,
    targets: TargetOptions,
    output: OutputOptions,
    ledger: LedgerOptions,
) -> None:
    """Simulates a cluster and prints TTFT, TPOT and TBT, and how many requests meet their targets."""

    def source_of(text: str) -> LatencySource:
        return latency_source(profile_file(text, ledger.state_dir, ledger.ledger_url))

    try:
        point = _simulated(_request(cluster, workload, targets), source_of)
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error
    summary = point.summary(with_requests=output.as_json)
    if output.as_json:
        print(json.dumps(summary))
    else:
        _print(point.spec, summary)


def _request(cluster: ClusterOptions, workload: WorkloadOptions, targets: TargetOptions) -> PointRequest:
    return PointRequest(
        cluster=str(cluster.cluster),
        workload=workload.workload,
        latency=cluster.latency,
        rate_per_s=workload.rate,
        num_requests=workload.requests,
        process=workload.arrivals.value,
        cv=workload.cv,
        ttft_s=targets.ttft,
        tpot_s=targets.tpot,
        tbt_s=targets.tbt,
        tbt_of=None if targets.tbt_of is None else targets.tbt_of.value,
        attainment=targets.attainment,
        criterion=targets.criterion.value,
        seed=workload.seed,
    )


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
        times = [_milliseconds(time_s) for time_s in summary[column].values()]
        target_s, share = targets[f"{name}_s"], summary[f"attainment_{name}"]
        title = f"TBT ({targets['tbt_of']})" if name == "tbt" else name.upper()
        table.add_row(title, *times, _milliseconds(target_s), f"{share:.1%}")
    console.print(table)
    outcomes = ", ".join(f"{num} {name}" for name, num in summary["outcomes"].items() if num)
    console.print(f"{summary['num_requests']} requests in {summary['duration_s']:.1f} s: {outcomes}")
    met = "" if summary["is_met"] else ", which is less than asked for"
    console.print(f"attainment ({summary['criterion']}) {summary['attainment']:.1%}{met}")
    per_gpu = summary["goodput_per_s_per_gpu"]
    console.print(
        f"goodput {summary['goodput_per_s']:.3g} requests/s on {spec.num_devices} GPUs, {per_gpu:.3g} on each"
    )
    busy = np.array([worker["busy"] for worker in summary["workers"]])
    console.print(f"workers are busy {busy.min():.0%} to {busy.max():.0%} of the time")


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.1f} ms"
