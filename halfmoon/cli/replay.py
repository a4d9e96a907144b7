"""`halfmoon replay TRACE`."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from halfmoon.errors import HalfmoonError, InvalidRequest, leaf_errors
from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.replay.client import Gateway
from halfmoon.replay.cluster import found_gateway, simulated_cluster
from halfmoon.replay.outcome import ReplayTargets, Summary, summarized
from halfmoon.replay.player import played
from halfmoon.replay.report import report_table
from halfmoon.replay.virtual import simulated
from halfmoon.sim.latency_sources.worker_profile import DEFAULT_PROFILE, PROFILES, load_profile
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Workload
from halfmoon.up.run import prepared_model
from halfmoon.up.service_specs import PreparedModel, UpOptions
from halfmoon.up.simulated import SimulatedWorkers

_SPEED = 4.0

Mode = TypeVar("Mode", bound=str)
Modes = tuple[PlacementMode, AdmissionMode]
Summaries = dict[tuple[str, str], Summary]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What is replayed, how fast, against what, and what it is measured by (the trace's seconds)."""

    speed: float
    targets: ReplayTargets
    url: str | None
    cluster: UpOptions
    modes: tuple[Modes, ...]


def replay(
    trace: Annotated[Path, typer.Argument(help="Mooncake or plain JSON lines, or Azure CSV")],
    speed: Annotated[
        float | None, typer.Option(help="arrivals and workers are so many times as fast (default 4, or 1 with --url)")
    ] = None,
    load: Annotated[float, typer.Option(help="arrivals alone are so many times as frequent as in the trace")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="only so many requests, from the first")] = None,
    url: Annotated[str | None, typer.Option(help="a running gateway to replay against, as it is")] = None,
    engine: Annotated[str, typer.Option(help="of the workers that are started: 'sim', simulated ones")] = "sim",
    prefill: Annotated[int, typer.Option(min=1, help="simulated prefill workers")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="simulated decode workers")] = 8,
    profile: Annotated[str, typer.Option(help=f"latencies: {', '.join(PROFILES)}, or a JSON file")] = DEFAULT_PROFILE,
    placement: Annotated[str, typer.Option(help="modes, by commas, or all")] = "kvcache-centric",
    admission: Annotated[str, typer.Option(help="modes, by commas, or all")] = "predicted",
    slo_ttft: Annotated[float, typer.Option(help="target for the time to first token, s")] = 30.0,
    slo_tbt: Annotated[float, typer.Option(help="target for a request's mean time between tokens, s")] = 0.1,
    model: Annotated[str, typer.Option(help="whose tokenizer the gateway uses")] = "demo",
    sim_processes: Annotated[int, typer.Option(min=1, help="processes that share the simulated workers")] = 1,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="on a fake clock, in the simulator: same policies, no processes")
    ] = False,
    state_dir: Annotated[Path, typer.Option(help="logs and ledgers")] = Path(".halfmoon/replay"),
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures there")] = None,
) -> None:
    """Replays a trace and says how well it was served, for each placement and admission mode side by side.

    Times in the report are the trace's. Against simulated workers, arrivals and modelled latencies run --speed times as
    fast; what gateway and network take really is then counted --speed times as long as it is. With --virtual nothing
    runs and --speed does not matter: the whole trace takes about a minute a pair of modes.
    """
    terminal = Console()
    try:
        if json_file is not None:
            _check_can_write(json_file)
        workload = read_workload(trace).scaled(_positive(load, "--load"))
        workload = workload if requests is None else workload.first(requests)
        if speed is None:
            speed = _SPEED if url is None else 1.0
        options = ReplayOptions(
            _positive(speed, "--speed"),
            ReplayTargets(_positive(slo_ttft, "--slo-ttft"), _positive(slo_tbt, "--slo-tbt")),
            url,
            UpOptions(
                model,
                num_prefill=prefill,
                num_decode=decode,
                port=0,
                console=False,
                slo="off",  # the replay makes the class
                simulation=SimulatedWorkers(profile, speed, length="seed", num_processes=sim_processes),
                state_dir=state_dir.absolute(),
            ),
            tuple(product(_chosen(placement, PlacementMode), _chosen(admission, AdmissionMode))),
        )
        if engine != "sim":
            raise InvalidRequest(
                "only simulated workers are started: for real ones start `halfmoon up`, then give --url"
            )
        if virtual and url is not None:
            raise InvalidRequest("--virtual replays in the simulator, --url against a running gateway: choose one")
        summaries = (
            _simulated(workload, options, terminal) if virtual else asyncio.run(_replayed(workload, options, terminal))
        )
    except (HalfmoonError, ExceptionGroup) as err:
        for error in leaf_errors(err):
            if not isinstance(error, HalfmoonError):
                raise
            terminal.print(f"halfmoon: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from err
    terminal.print(report_table(summaries))
    if json_file is not None:
        rows = [{"placement": p, "admission": a, **found.as_json()} for (p, a), found in summaries.items()]
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


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
    started = f"{datetime.now():%Y%m%d-%H%M%S}"  # every replay begins with an empty ledger
    with _bars(terminal) as bars:

        def bar(title: str) -> Callable[[], None]:
            task = bars.add_task(title, total=len(workload))
            return lambda: bars.advance(task)

        if options.url is not None:
            gateway = await found_gateway(options.url, options.speed)
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


def _chosen(names: str, kind: object) -> tuple[Mode, ...]:
    known = get_args(kind)
    chosen = known if names == "all" else tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in known:
            raise InvalidRequest(f"there is no mode {name!r}: there are {', '.join(known)}")
    return chosen  # type: ignore[return-value]  # checked to be of that kind


def _positive(value: float, name: str) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidRequest(f"{name} must be above 0, and finite")
    return value


def _check_can_write(file: Path) -> None:
    """Before a replay that may take an hour. Raises InvalidRequest."""
    if not os.access(file.parent, os.W_OK) or file.is_dir():
        raise InvalidRequest(
            f"the figures cannot be written to {file}: give --json a file in a directory that is there"
        )
