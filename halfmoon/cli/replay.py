"""`halfmoon replay TRACE`: replays a trace against simulated workers or a running gateway."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from halfmoon.cli.output_file import check_can_write
from halfmoon.cli.terminal.option_groups import with_option_groups
from halfmoon.errors import HalfmoonError, InvalidRequest, leaf_errors
from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.replay.client import Gateway
from halfmoon.replay.cluster import discover_gateway, simulated_cluster
from halfmoon.replay.outcome import ReplayTargets, Summary, summarized
from halfmoon.replay.player import played
from halfmoon.replay.report import report_tables
from halfmoon.replay.virtual import simulated
from halfmoon.rpc.tls.http_context import CA_HELP, CA_VARIABLE
from halfmoon.sim.latency_sources.worker_profile import DEFAULT_PROFILE, PROFILES, load_profile
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Workload, check_duration
from halfmoon.up.run import prepared_model
from halfmoon.up.specs.simulated import SimulatedWorkers
from halfmoon.up.up_options import PreparedModel, UpOptions

_SPEED = 4.0
_PLACEMENTS, _ADMISSIONS = ", ".join(get_args(PlacementMode)), ", ".join(get_args(AdmissionMode))

Mode = TypeVar("Mode", bound=str)
Modes = tuple[PlacementMode, AdmissionMode]
Summaries = dict[tuple[str, str], Summary]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of one replay; targets are in the trace's seconds."""

    speed: float
    targets: ReplayTargets
    url: str | None
    ca: Path | None  # authorities of the URL's certificate
    cluster: UpOptions
    modes: tuple[Modes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceOptions:
    """How much of the trace is replayed, and how fast."""

    PANEL: ClassVar[str] = "Pace"
    load: Annotated[float, typer.Option(help="Multiplies the trace's request rate; workers keep their speed.")] = 1.0
    requests: Annotated[int | None, typer.Option(min=1, help="Replays only the first requests, this many.")] = None
    speed: Annotated[
        float | None,
        typer.Option(help="Speeds up both arrivals and workers by this factor. Default: 4, or 1 with --url."),
    ] = None
    virtual: Annotated[
        bool,
        typer.Option("--virtual", help="Replays in the simulator on a fake clock: same policies, no processes."),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What the trace is replayed against."""

    PANEL: ClassVar[str] = "Cluster"
    url: Annotated[str | None, typer.Option(help="Replays against this running gateway, with the modes it has.")] = None
    ca: Annotated[Path | None, typer.Option(envvar=CA_VARIABLE, help=CA_HELP)] = None
    prefill: Annotated[int, typer.Option(min=1, max=4096, help="Number of simulated prefill workers.")] = 8
    decode: Annotated[int, typer.Option(min=1, max=4096, help="Number of simulated decode workers.")] = 8
    profile: Annotated[
        str, typer.Option(help=f"Latencies of simulated workers: {', '.join(PROFILES)}, or a JSON file.")
    ] = DEFAULT_PROFILE
    sim_processes: Annotated[int, typer.Option(min=1, help="Processes that share the simulated workers.")] = 1
    model: Annotated[str, typer.Option(help="Model whose tokenizer the gateway uses.")] = "demo"
    engine: Annotated[str, typer.Option(help="Engine of the workers to start: only 'sim', simulated workers.")] = "sim"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """The modes that are compared; every pair is replayed."""

    PANEL: ClassVar[str] = "Policies"
    placement: Annotated[
        str, typer.Option(help=f"Placement modes to compare, separated by commas: {_PLACEMENTS}, or all.")
    ] = "kvcache-centric"
    admission: Annotated[
        str, typer.Option(help=f"Admission modes to compare, separated by commas: {_ADMISSIONS}, or all.")
    ] = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The latency targets, in the trace's seconds."""

    PANEL: ClassVar[str] = "Targets"
    slo_ttft: Annotated[float, typer.Option(help="Target for the time to first token, in seconds.")] = 30.0
    slo_tbt: Annotated[float, typer.Option(help="Target for a request's mean time between tokens, in seconds.")] = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Files to write."""

    PANEL: ClassVar[str] = "Output"
    json_file: Annotated[Path | None, typer.Option("--json", help="Writes the results to this JSON file.")] = None
    state_dir: Annotated[Path, typer.Option(help="Directory for logs and ledgers.")] = Path(".halfmoon/replay")


@with_option_groups
def replay(
    trace: Annotated[Path, typer.Argument(help="Mooncake or plain JSON lines, or Azure CSV.")],
    pace: PaceOptions,
    cluster: ClusterOptions,
    policies: PolicyOptions,
    targets: TargetOptions,
    output: OutputOptions,
) -> None:
    """Replays a trace and compares how well each pair of placement and admission modes serves it.

    Times in the report are the trace's. Against simulated workers, arrivals and modelled latencies run --speed times as
    fast; what gateway and network really take is then counted --speed times as long as it is. With --virtual nothing
    runs and --speed does not matter: the whole trace takes about a minute a pair of modes.
    """
    terminal = Console()
    try:
        if output.json_file is not None:
            check_can_write(output.json_file, "the results")
        workload = _workload(trace, pace)
        options = _replay_options(pace, cluster, policies, targets, output)
        _check_target(pace, cluster)
        if pace.virtual:
            summaries = _simulated(workload, options, terminal)
        else:
            summaries = asyncio.run(_replayed(workload, options, terminal))
    except (HalfmoonError, ExceptionGroup) as err:
        for error in leaf_errors(err):
            if not isinstance(error, HalfmoonError):
                raise
            terminal.out(f"halfmoon: {error}", style="red", highlight=False)
        raise typer.Exit(1) from err
    terminal.print(*report_tables(summaries, terminal.width), sep="\n")
    if output.json_file is not None:
        rows = [{"placement": p, "admission": a, **summary.as_json()} for (p, a), summary in summaries.items()]
        output.json_file.write_text(json.dumps(rows, indent=2) + "\n")


def _workload(trace: Path, pace: PaceOptions) -> Workload:
    workload = read_workload(trace)
    check_duration(workload.duration_s / _positive(pace.load, "--load"), "give a higher --load", "load")
    workload = workload.scaled(pace.load)
    return workload if pace.requests is None else workload.first(pace.requests)


def _replay_options(
    pace: PaceOptions,
    cluster: ClusterOptions,
    policies: PolicyOptions,
    targets: TargetOptions,
    output: OutputOptions,
) -> ReplayOptions:
    default_speed = _SPEED if cluster.url is None else 1.0
    speed = _positive(default_speed if pace.speed is None else pace.speed, "--speed")
    return ReplayOptions(
        speed,
        ReplayTargets(_positive(targets.slo_ttft, "--slo-ttft"), _positive(targets.slo_tbt, "--slo-tbt")),
        cluster.url,
        cluster.ca,
        UpOptions(
            cluster.model,
            num_prefill=cluster.prefill,
            num_decode=cluster.decode,
            port=0,
            console=False,
            slo="off",  # the replay makes the class
            simulation=SimulatedWorkers(cluster.profile, speed, length="seed", num_processes=cluster.sim_processes),
            state_dir=output.state_dir.absolute(),
        ),
        tuple(product(_modes(policies.placement, PlacementMode), _modes(policies.admission, AdmissionMode))),
    )


def _check_target(pace: PaceOptions, cluster: ClusterOptions) -> None:
    if cluster.engine != "sim":
        raise InvalidRequest("only simulated workers are started: for real ones start `halfmoon up`, then give --url")
    if pace.virtual and cluster.url is not None:
        raise InvalidRequest("--virtual replays in the simulator, --url against a running gateway: choose one")


def _bars(terminal: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=terminal, disable=not terminal.is_terminal)


def _simulated(workload: Workload, options: ReplayOptions, terminal: Console) -> Summaries:
    assert options.cluster.simulation is not None
    profile = load_profile(options.cluster.simulation.profile)
    counts = options.cluster.num_prefill, options.cluster.num_decode
    summaries: Summaries = {}
    with _bars(terminal) as bars:
        for modes in options.modes:
            on_progress = partial(_show, bars, bars.add_task(", ".join(modes), total=len(workload)))
            outcomes = simulated(workload, profile, counts, modes, options.targets, on_progress)
            summaries[modes] = summarized(outcomes, options.targets, workload.duration_s)
    return summaries


def _show(bars: Progress, task: TaskID, num_done: int, num: int) -> None:
    bars.update(task, completed=num_done, total=num)


async def _replayed(workload: Workload, options: ReplayOptions, terminal: Console) -> Summaries:
    summaries: Summaries = {}
    started = f"{datetime.now():%Y%m%d-%H%M%S}"  # every replay starts with an empty ledger
    with _bars(terminal) as bars:

        def bar(title: str) -> Callable[[], None]:
            task = bars.add_task(title, total=len(workload))
            return lambda: bars.advance(task)

        if options.url is not None:
            gateway = await discover_gateway(options.url, options.speed, ca=options.ca)
            return {("as it is", "as it is"): await _played(workload, gateway, options.targets, bar(options.url))}
        model = await prepared_model(options.cluster.model, terminal)
        for placement, admission in options.modes:
            cluster = replace(
                options.cluster,
                placement=placement,
                admission=admission,
                state_dir=options.cluster.state_dir / started / f"{placement}-{admission}",
            )
            done = bar(f"{placement}, {admission}")
            summaries[placement, admission] = await _on_simulated(workload, cluster, model, options.targets, done)
    return summaries


async def _on_simulated(
    workload: Workload, options: UpOptions, model: PreparedModel, targets: ReplayTargets, on_done: Callable[[], None]
) -> Summary:
    async def work() -> Summary:
        gateway = await cluster.start(targets)
        return await _played(workload, gateway, targets, on_done)

    async with simulated_cluster(options, model) as cluster:
        return await cluster.while_well(work())


async def _played(workload: Workload, gateway: Gateway, targets: ReplayTargets, on_done: Callable[[], None]) -> Summary:
    return summarized(await played(workload, gateway, on_done), targets, workload.duration_s)


def _modes(names: str, kind: object) -> tuple[Mode, ...]:
    known = get_args(kind)
    modes = known if names == "all" else tuple(name.strip() for name in names.split(","))
    for name in modes:
        if name not in known:
            raise InvalidRequest(f"unknown mode {name!r}: choose from {', '.join(known)}")
    return modes  # type: ignore[return-value]  # every name is one of `known`


def _positive(value: float, name: str) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidRequest(f"{name} must be finite and above 0")
    return value
