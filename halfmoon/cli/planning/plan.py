"""`halfmoon plan`: finds roles, counts and parallelism of workers for a workload and its targets."""

from __future__ import annotations

import json
import os
from typing import Any

import typer
from rich.console import Console

from halfmoon.cli.output_file import check_can_write
from halfmoon.cli.planning.options import (
    HardwareOptions,
    OutputOptions,
    SearchOptions,
    TargetOptions,
    WorkloadOptions,
    plan_request,
)
from halfmoon.cli.profile_store import LedgerOptions
from halfmoon.cli.terminal.map_table import print_map
from halfmoon.cli.terminal.option_groups import with_option_groups
from halfmoon.cli.terminal.plan_tables import print_plan
from halfmoon.cli.terminal.progress_bars import stage_bars
from halfmoon.errors import InvalidRequest
from halfmoon.plan.compose_file import compose_text
from halfmoon.plan.plan_file import parse_plan
from halfmoon.plan.planning import PlanResult, make_plan
from halfmoon.plan.plot import check_plot, plot_spec, write_plot
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.summary import summary_of
from halfmoon.plan.targets.map_plot import map_spec
from halfmoon.plan.targets.map_summary import map_summary
from halfmoon.plan.targets.target_grid import around
from halfmoon.plan.targets.target_map import make_map
from halfmoon.sim.latency_sources.model_catalogue import is_short_name


@with_option_groups
def plan(
    workload: WorkloadOptions,
    targets: TargetOptions,
    hardware: HardwareOptions,
    search: SearchOptions,
    output: OutputOptions,
    ledger: LedgerOptions,
) -> None:
    """Finds the layout that meets the targets with the fewest GPUs or, without --rate, the highest goodput per GPU.

    With --map it says instead over which targets separate prefill and decode workers pay.
    """
    try:
        _check_files(output)
        request = plan_request(workload, targets, hardware, search, ledger, of_map=output.target_map is not None)
        if output.target_map is not None:
            _map(request, targets, search.jobs, output)
        else:
            _plan(request, search.jobs, output)
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error


def _plan(request: PlanRequest, jobs: int | None, output: OutputOptions) -> None:
    with stage_bars(Console(stderr=True)) as advance:
        result = make_plan(request, jobs, advance, with_curves=output.plot is not None)
    summary = summary_of(result)
    _write(result, summary, output)
    if output.as_json:
        print(json.dumps(summary))
    else:
        _print(summary, request.model, output)


def _map(request: PlanRequest, targets: TargetOptions, jobs: int | None, output: OutputOptions) -> None:
    assert output.target_map is not None
    ttfts_s, tpots_s = (() if one is None else around(one) for one in (targets.ttft, targets.tpot))
    with stage_bars(Console(stderr=True)) as advance:
        summary = map_summary(make_map(request, ttfts_s, tpots_s, jobs, advance))
    write_plot(output.target_map, map_spec(summary))
    if output.as_json:
        print(json.dumps(summary))
    else:
        print_map(summary, Console())
        Console().out(f"map: {output.target_map}", highlight=False)


def _check_files(output: OutputOptions) -> None:
    """Raises InvalidRequest for files that cannot be written, before a search that may take minutes."""
    paths = [path for path in (output.output, output.compose, output.plot, output.target_map) if path is not None]
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise InvalidRequest("two outputs have the same file: give each a name of its own", param="output")
    for path in (output.output, output.compose):
        if path is not None:
            check_can_write(path, "the plan")
    for path in (output.plot, output.target_map):
        if path is not None:
            check_plot(path)
            check_can_write(path, "the plot")


def _write(result: PlanResult, summary: dict[str, Any], output: OutputOptions) -> None:
    output.output.write_text(result.file_text)
    if output.compose is not None:
        output.compose.write_text(compose_text(parse_plan(result.file_text, output.output)))
    if output.plot is not None:
        write_plot(output.plot, plot_spec(summary))


def _print(summary: dict[str, Any], model: str, output: OutputOptions) -> None:
    console = Console()
    print_plan(summary, console)
    if output.plot is not None:
        console.out(f"plot: {output.plot}", highlight=False)
    path = output.output
    where = " --model DIRECTORY" if is_short_name(model) else ""
    console.out(f"plan: {path}; start it with `halfmoon up --plan {path}{where}`", highlight=False)
