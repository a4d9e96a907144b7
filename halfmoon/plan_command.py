"""`halfmoon plan`: which workers, how many and with what parallelism, for a workload and its targets."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from halfmoon.errors import InvalidRequest
from halfmoon.plan.goodput import Goal
from halfmoon.plan.plan_file import plan_text
from halfmoon.plan.question import Question, default_rules
from halfmoon.plan.search import Plan, Rated, layout_trial, search
from halfmoon.plan.verdict import Verdict, judged, sensitivity
from halfmoon.sim.cluster import Targets
from halfmoon.sim.hardware import DEVICES, device
from halfmoon.sim.latency_sources import latency_source
from halfmoon.sim.lengths import KNOWN_LENGTHS
from halfmoon.sim_command import Arrivals, Criterion, asked_workload


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
        typer.Option("--latency", "--profile", help="a profile's path, distserve:MODEL; default: the model's roofline"),
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="sequences of one worker")] = 256,
    requests: Annotated[int, typer.Option(min=2, help="simulated each time; of a trace the first")] = 1000,
    seed: Annotated[int, typer.Option(help="of all that is drawn")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes; default: one for each core")] = None,
    output: Annotated[Path, typer.Option(help="file for `halfmoon up --plan`")] = Path("plan.yaml"),
    as_json: Annotated[bool, typer.Option("--json", help="prints the plan as JSON")] = False,
) -> None:
    """Finds the layout that meets the targets with the fewest GPUs, or serves most with each."""
    source_text = latency or f"roofline:{model}"
    wanted = objective or (Objective.PER_GPU if rate is None else Objective.GPUS)
    try:
        if not output.parent.is_dir():
            raise InvalidRequest(f"the plan cannot be written: {output.parent} is no directory", param="output")
        on, source = device(gpu), latency_source(source_text)
        question = Question(
            source,
            on,
            nodes,
            gpus_per_node,
            asked_workload(workload, 1.0, requests, Arrivals.POISSON, 1.0, seed),
            Goal(Targets(ttft, tpot), attainment, criterion.value),
            default_rules(on, gpus_per_node, source, max_running),
            wanted.value,
            rate,
            affinity.value,
            seed,
        )
        found = _searched(question, jobs or os.cpu_count() or 1)
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error
    verdicts = [_verdict(question, found, one) for one in found.best]
    what_if = sensitivity(question, found.models, found.best[0].layout, verdicts[0].rate_per_s)
    output.write_text(plan_text(question, model, source_text, found.best[0], verdicts[0]))
    summary = _summary(question, found, verdicts, what_if)
    if as_json:
        print(json.dumps(summary))
    else:
        _print(summary, output)


def _searched(question: Question, jobs: int) -> Plan:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        _pool(jobs) as pool,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        return search(question, pool, advance)


@contextmanager
def _pool(jobs: int) -> Iterator[Executor]:
    """Processes, or this one alone for one job. What waits is dropped when somebody interrupts."""
    pool: Executor = (
        ThreadPoolExecutor(1)
        if jobs == 1
        else ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _verdict(question: Question, found: Plan, one: Rated) -> Verdict:
    """At the rate that was asked for, or at the most that the layout holds."""
    trial = layout_trial(question, found.models, one.layout)
    return judged(trial, question.rate_per_s or one.goodput_per_s, one.layout.num_units)


def _summary(question: Question, found: Plan, verdicts: list[Verdict], what_if: dict[str, Verdict]) -> dict[str, Any]:
    best, colocated = found.best[0], found.colocated
    return {
        "gpu": question.gpu.name,
        "objective": question.objective,
        "criterion": question.goal.criterion,
        "attainment_asked": question.goal.attainment,
        "targets": {"ttft_s": question.goal.targets.ttft_s, "tpot_s": question.goal.targets.tpot_s},
        "layouts": [{**_rated(one), **_judged(verdict)} for one, verdict in zip(found.best, verdicts, strict=True)],
        "disaggregated": None if found.disaggregated is None else _rated(found.disaggregated),
        "colocated": None if colocated is None else _rated(colocated),
        "over_colocated": None if colocated is None else best.per_gpu / colocated.per_gpu,
        "sensitivity": {name: _judged(verdict) for name, verdict in what_if.items()},
        "latency": sorted({model.source for model in found.models.values()}),
        "num_simulated": found.num_simulated,
        "num_ruled_out": found.num_ruled_out,
    }


def _rated(one: Rated) -> dict[str, Any]:
    return {
        "layout": str(one.layout),
        "workers": [
            {"role": each.role, "count": one.layout.num_units * each.num, **each.parallelism._asdict()}
            for each in one.layout.sets
        ],
        "num_gpus": one.layout.num_gpus,
        "price_per_hour": one.price_per_hour,
        "goodput_per_s": one.goodput_per_s,
        "goodput_per_s_per_gpu": one.per_gpu,
        "goodput_per_dollar": one.per_dollar,
    }


def _judged(verdict: Verdict) -> dict[str, Any]:
    shares = verdict.attainment
    return {
        "rate_per_s": verdict.rate_per_s,
        "attainment_joint": shares.joint,
        "attainment_ttft": shares.ttft,
        "attainment_tpot": shares.tpot,
        "ttft_s": verdict.ttft_s,
        "tpot_s": verdict.tpot_s,
    }


def _print(summary: dict[str, Any], output: Path) -> None:
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
    console.print(f"written: {output}; start it with `halfmoon up --plan {output}`", soft_wrap=True, highlight=False)


def _shares(one: dict[str, Any]) -> str:
    return " / ".join(f"{one[f'attainment_{name}']:.1%}" for name in ("joint", "ttft", "tpot"))


def _quantiles(found: dict[str, float | None]) -> str:
    shown = [found[name] for name in ("p50", "p90", "p99")]
    return " / ".join("–" if one is None else f"{1000 * one:.0f}" for one in shown)
