"""`halfmoon plan`: which workers, how many and with what parallelism, for a workload and its targets."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from halfmoon.errors import InvalidRequest
from halfmoon.plan.planning import PlanResult, make_plan
from halfmoon.plan.plot import check_plot, write_plot
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.summary import summary_of
from halfmoon.profile_store import DEFAULT_STATE_DIR, LedgerUrl, StateDir, profile_file
from halfmoon.sim.hardware import DEVICES
from halfmoon.sim.lengths import KNOWN_LENGTHS
from halfmoon.sim_command import Criterion, TbtOf


class Objective(StrEnum):
    """What the best layout has most of, or fewest of."""

    GPUS = "gpus"
    PER_GPU = "goodput-per-gpu"
    PER_DOLLAR = "goodput-per-dollar"


class Affinity(StrEnum):
    """high: KV may go from node to node; low: it stays within one; auto: whichever is better."""

    AUTO = "auto"
    HIGH = "high"
    LOW = "low"


def plan(
    model: Annotated[str, typer.Option(help="a known shape, a config.json, or with --latency any name")],
    gpu: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}")],
    workload: Annotated[str, typer.Option(help=f"a trace's path, or {'|'.join(KNOWN_LENGTHS)}|in=512,out=64")],
    ttft: Annotated[float, typer.Option(help="target, seconds")],
    tpot: Annotated[float, typer.Option(help="target, seconds")],
    tbt: Annotated[float | None, typer.Option(help="target of each request's gaps between tokens, seconds")] = None,
    tbt_of: Annotated[
        TbtOf, typer.Option(help="its longest gap, or the mean of the longest tenth")
    ] = TbtOf.LONGEST_TENTH,
    nodes: Annotated[int, typer.Option(min=1, help="hosts")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="of each host")] = 8,
    rate: Annotated[float | None, typer.Option(help="requests a second that the layout has to hold")] = None,
    attainment: Annotated[float, typer.Option(help="share of requests that must meet both targets")] = 0.9,
    criterion: Annotated[Criterion, typer.Option(help="what meeting them is")] = Criterion.JOINT,
    objective: Annotated[
        Objective | None, typer.Option(help="default: gpus (fewest for the rate), or goodput-per-gpu without --rate")
    ] = None,
    affinity: Annotated[Affinity, typer.Option(help="where prefill and decode stand")] = Affinity.AUTO,
    latency: Annotated[
        str | None,
        typer.Option(
            "--latency",
            "--profile",
            help="a profile's path, ledger:NAME, distserve:MODEL; default: the model's roofline",
        ),
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="sequences of one worker")] = 256,
    requests: Annotated[
        int | None, typer.Option(min=2, help="simulated each time; of a trace the first; default: 1000")
    ] = None,
    seed: Annotated[int, typer.Option(help="of all that is drawn")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes; default: one for each core")] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    ledger_url: LedgerUrl = None,
    output: Annotated[Path, typer.Option(help="file for `halfmoon up --plan`")] = Path("plan.yaml"),
    plot: Annotated[
        Path | None, typer.Option(help="draws attainment and goodput over the rate: a .png or .html file")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="prints the plan as JSON")] = False,
) -> None:
    """Finds the layout that meets the targets with the fewest GPUs, or serves most with each."""
    try:
        request = PlanRequest(
            model=model,
            gpu=gpu,
            workload=workload,
            ttft_s=ttft,
            tpot_s=tpot,
            tbt_s=tbt,
            tbt_of=tbt_of.value,
            num_nodes=nodes,
            gpus_per_node=gpus_per_node,
            rate_per_s=rate,
            attainment=attainment,
            criterion=criterion.value,
            objective=None if objective is None else objective.value,
            affinity=affinity.value,
            latency=None if latency is None else profile_file(latency, state_dir, ledger_url),
            max_running=max_running,
            num_requests=requests,
            seed=seed,
        )
        _check_files(output, plot)
        found = _planned(request, jobs, with_curves=plot is not None)
        summary = summary_of(found)
        output.write_text(found.file_text)
        if plot is not None:
            write_plot(plot, summary)
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error
    if as_json:
        print(json.dumps(summary))
    else:
        _print(summary, output, plot)


def _check_files(output: Path, plot: Path | None) -> None:
    """Before the search, which takes longer."""
    if not output.parent.is_dir():
        raise InvalidRequest(f"the plan cannot be written: {output.parent} is no directory", param="output")
    if plot is not None:
        check_plot(plot)


def _planned(request: PlanRequest, jobs: int | None, *, with_curves: bool) -> PlanResult:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        return make_plan(request, jobs, advance, with_curves=with_curves)


def _print(summary: dict[str, Any], output: Path, plot: Path | None) -> None:
    console = Console()
    table = Table(
        "layout", "GPUs", "$/h", "holds req/s", "each GPU", "for $1", "both / TTFT / TPOT met", "TTFT ms", "TPOT ms"
    )
    for one in summary["layouts"]:
        table.add_row(
            one["layout"],
            str(one["num_gpus"]),
            f"{one['price_per_hour']:.2f}",
            f"{one['goodput_per_s']:.3g}",
            f"{one['goodput_per_s_per_gpu']:.3g}",
            f"{one['goodput_per_dollar']:.0f}",
            _shares(one),
            _quantiles(one["ttft_s"]),
            _quantiles(one["tpot_s"]),
        )
    console.print(table)
    at = "the rate asked for" if len({one["rate_per_s"] for one in summary["layouts"]}) == 1 else "what each holds"
    console.print(f"met shares, and p50 / p90 / p99 of times, at {at}; {summary['criterion']} criterion")
    colocated = summary["colocated"]
    if colocated is None:
        console.print("no colocated layout meets the targets")
    else:
        console.print(
            f"{summary['over_colocated']:.2f} times the goodput for each GPU of the best colocated layout, "
            f"{colocated['layout']} ({colocated['goodput_per_s_per_gpu']:.3g})"
        )
    for name, one in summary["sensitivity"].items():
        console.print(f"{name}: {_shares(one)} met, TTFT {_quantiles(one['ttft_s'])} ms", highlight=False)
    if plot is not None:
        console.print(f"drawn: {plot}", soft_wrap=True, highlight=False)
    console.print(f"written: {output}; start it with `halfmoon up --plan {output}`", soft_wrap=True, highlight=False)


def _shares(one: dict[str, Any]) -> str:
    return " / ".join(f"{one[f'attainment_{name}']:.1%}" for name in ("joint", "ttft", "tpot"))


def _quantiles(found: dict[str, float | None]) -> str:
    shown = [found[name] for name in ("p50", "p90", "p99")]
    return " / ".join("–" if one is None else f"{1000 * one:.0f}" for one in shown)
