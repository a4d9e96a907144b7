"""`halfmoon plan`: which workers, how many and with what parallelism, for a workload and its targets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from halfmoon.cli.plan_tables import print_plan
from halfmoon.cli.profile_store import DEFAULT_STATE_DIR, LedgerUrl, StateDir, profile_file
from halfmoon.cli.progress_bars import stage_bars
from halfmoon.cli.simulate import Criterion, TbtOf
from halfmoon.errors import InvalidRequest
from halfmoon.plan.compose_file import compose_text
from halfmoon.plan.plan_file import parse_plan
from halfmoon.plan.planning import PlanResult, make_plan
from halfmoon.plan.plot import check_plot, write_plot
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.summary import summary_of
from halfmoon.sim.latency_sources.hardware import DEVICES, device
from halfmoon.sim.workloads.lengths import KNOWN_LENGTHS


class Objective(StrEnum):
    """What the best layout has most of, or fewest of."""

    GPUS = "gpus"
    PRICE = "price"
    PER_GPU = "goodput-per-gpu"
    PER_DOLLAR = "goodput-per-dollar"


class Affinity(StrEnum):
    """high: KV may go from node to node; low: it stays within one; auto: whichever is better."""

    AUTO = "auto"
    HIGH = "high"
    LOW = "low"


class KvCodecs(StrEnum):
    """Of KV between nodes; auto: whichever is best, where the network is slow."""

    AUTO = "auto"
    RAW = "raw"
    INT8 = "int8"
    INT4 = "int4"


def plan(
    model: Annotated[str, typer.Option(help="a known name, a config.json, a Hugging Face id; with --latency any")],
    gpu: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}; several kinds: h100:2x8,a100-80g:4x8")],
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
            help="a profile's path, ledger:NAME, aiconfigurator:MODEL, distserve:MODEL, or GPU=SOURCE,…; "
            "default: the model's roofline",
        ),
    ] = None,
    prefill_gpu: Annotated[str | None, typer.Option(help="the kind that prefill workers have")] = None,
    decode_gpu: Annotated[str | None, typer.Option(help="the kind that decode workers have")] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="GPU=DOLLARS an hour instead of the catalogue's; repeat it for more")
    ] = None,
    kv_codec: Annotated[KvCodecs, typer.Option(help="of KV between nodes")] = KvCodecs.AUTO,
    network: Annotated[float | None, typer.Option(help="Gbit/s of each node; default: the catalogue's")] = None,
    context: Annotated[int | None, typer.Option(min=2, help="tokens of a sequence; default: the model's")] = None,
    max_running: Annotated[
        int | None, typer.Option(min=1, help="sequences of one worker; default: the profile's, or 256")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=2, help="of one pass; of a trace the first; default: 1000, or 4000 of a trace"),
    ] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="leaves nothing out but by bounds; several times as long")
    ] = False,
    seed: Annotated[int, typer.Option(help="of all that is drawn")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes; default: one for each core")] = None,
    output: Annotated[Path, typer.Option(help="file for `halfmoon up --plan`")] = Path("plan.yaml"),
    compose: Annotated[
        Path | None, typer.Option(help="writes the workers for Docker Compose: a file beside docker-compose.yml")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="draws attainment and goodput over the rate: a .png or .html file")
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    ledger_url: LedgerUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="prints the plan as JSON")] = False,
) -> None:
    """Finds the layout that meets the targets with the fewest GPUs, or serves most with each."""
    try:
        _check_files(output, compose, plot)
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
            latency=None if latency is None else _latency(latency, state_dir, ledger_url),
            max_running=max_running,
            num_requests=requests,
            seed=seed,
            prefill_gpu=prefill_gpu,
            decode_gpu=decode_gpu,
            prices=_prices(price or []),
            kv_codec=kv_codec.value,
            network_gbit_per_s=network,
            context_tokens=context,
            is_thorough=thorough,
        )
        found = _planned(request, jobs, with_curves=plot is not None)
        summary = summary_of(found)
        output.write_text(found.file_text)
        if compose is not None:
            compose.write_text(compose_text(parse_plan(found.file_text, output)))
        if plot is not None:
            write_plot(plot, summary)
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error
    if as_json:
        print(json.dumps(summary))
    else:
        _print(summary, output, plot)


def _check_files(output: Path, compose: Path | None, plot: Path | None) -> None:
    """Before the search, which takes longer."""
    for path in (output, compose):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            what = f"{path} is a directory" if path.is_dir() else f"{path.parent} is no directory"
            raise InvalidRequest(f"the plan cannot be written: {what}", param="output")
    if plot is not None:
        check_plot(plot)


def _planned(request: PlanRequest, jobs: int | None, *, with_curves: bool) -> PlanResult:
    with stage_bars(Console(stderr=True)) as advance:
        return make_plan(request, jobs, advance, with_curves=with_curves)


def _latency(text: str, state_dir: Path, ledger_url: str | None) -> str:
    """One source, or GPU=SOURCE for each; profiles of the ledger as files."""
    parts = [part.rpartition("=") for part in text.split(",")]
    return ",".join(gpu + sign + profile_file(one, state_dir, ledger_url) for gpu, sign, one in parts)


def _prices(given: Sequence[str]) -> dict[str, float]:
    prices = {}
    for text in given:
        gpu, _, dollars = text.partition("=")
        try:
            prices[device(gpu).name] = float(dollars)
        except ValueError as error:
            raise InvalidRequest(
                f"{text!r} is no price: give GPU=DOLLARS an hour, as h100=2.5", param="price"
            ) from error
    return prices


def _print(summary: dict[str, Any], output: Path, plot: Path | None) -> None:
    console = Console()
    print_plan(summary, console)
    if plot is not None:
        console.print(f"drawn: {plot}", soft_wrap=True, highlight=False)
    console.print(f"written: {output}; start it with `halfmoon up --plan {output}`", soft_wrap=True, highlight=False)
