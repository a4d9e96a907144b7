"""`halfmoon bench URL`: how many requests a second a server takes within targets for TTFT and TPOT."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from rich.console import Console

from halfmoon.cli.terminal.option_groups import with_option_groups
from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.replay.client import found_server
from halfmoon.replay.outcome import ReplayTargets
from halfmoon.replay.sweep import Sweep, SweepLoad, highest_kept, markdown_table
from halfmoon.rpc.tls.http_context import CA_HELP, CA_VARIABLE
from halfmoon.sim.workloads.lengths import KNOWN_LENGTHS, named_lengths

_TOLERANCE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What is sent."""

    PANEL: ClassVar[str] = "Load"
    rates: Annotated[
        str | None, typer.Option(help="Requests per second, separated by commas. Default: a search from --start on.")
    ] = None
    start: Annotated[float, typer.Option(min=0.01, help="Where the search starts.")] = 1.0
    most: Annotated[float, typer.Option(min=0.01, help="Highest rate of the search.")] = 1000.0
    lengths: Annotated[
        str, typer.Option(help=f"Lengths of prompts and answers: in=512,out=64, or {', '.join(KNOWN_LENGTHS)}.")
    ] = "in=256,out=64"
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals at each rate; at least 20 requests.")] = 20
    seed: Annotated[int, typer.Option(min=0, max=10_000, help="Random seed of arrivals, lengths and prompts.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The latency targets."""

    PANEL: ClassVar[str] = "Targets"
    slo_ttft: Annotated[float, typer.Option(min=0.001, help="Target for the time to first token, in seconds.")] = 2.0
    slo_tpot: Annotated[
        float, typer.Option(min=0.0001, help="Target for a request's mean time between tokens, in seconds.")
    ] = 0.1
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of requests that must meet both for a rate to be kept.")
    ] = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Who is asked, and how."""

    PANEL: ClassVar[str] = "Server"
    chat: Annotated[
        bool, typer.Option("--chat", help="Asks /v1/chat/completions with words, not /v1/completions with token ids.")
    ] = False
    model: Annotated[str | None, typer.Option(help="Model to ask for. Default: the first of /v1/models.")] = None
    api_key: Annotated[str | None, typer.Option(envvar="HALFMOON_API_KEY", help="API key, where one is needed.")] = None
    ca: Annotated[Path | None, typer.Option(envvar=CA_VARIABLE, help=CA_HELP)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Files to write."""

    PANEL: ClassVar[str] = "Output"
    json_file: Annotated[Path | None, typer.Option("--json", help="Writes the figures to this JSON file.")] = None
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Writes the table to this file.")] = None


@with_option_groups
def bench(
    url: Annotated[str, typer.Argument(help="Any server with OpenAI's API, such as http://127.0.0.1:8000.")],
    load: LoadOptions,
    targets: TargetOptions,
    server: ServerOptions,
    output: OutputOptions,
) -> None:
    """Measures goodput, TTFT and TPOT at request rates, and finds the highest rate within the targets.

    Requests arrive as a Poisson process, whether or not earlier ones are answered. Each prompt is new. Answers have
    their full length (`ignore_eos`), as far as the server knows that parameter.
    """
    terminal = Console(stderr=True)
    try:
        sweep_load = SweepLoad(
            named_lengths(load.lengths),
            load.seconds,
            load.seed,
            ReplayTargets(targets.slo_ttft, targets.slo_tpot),
            targets.attainment,
        )
        rates = _rates(load.rates)
        found = asyncio.run(found_server(url, server.model, server.api_key, server.ca, is_chat=server.chat))
        sweep = Sweep(found, sweep_load, lambda rate, num: terminal.print(f"{rate:.3g} a second, {num} requests …"))
        if rates:
            for rate in rates:
                sweep.measure(rate)
        else:
            sweep.search(load.start, _TOLERANCE, load.most)
    except HalfmoonError as error:
        terminal.print(f"halfmoon: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    _report(sweep, output)


def _report(sweep: Sweep, output: OutputOptions) -> None:
    table, best = markdown_table(sweep.points), highest_kept(sweep.points)
    print(table)
    share = f"{sweep.load.attainment:.0%} of requests"
    print(f"highest rate with {share} in time: {'none' if best is None else f'{best.rate_per_s:.3g} a second'}")
    late_s = max((point.summary.sent_late_p99_s for point in sweep.points), default=0.0)
    if late_s > 0.1 * sweep.load.targets.ttft_s:
        print(f"this client sent requests up to {late_s:.2f} s late: it was a limit, too")
    if output.markdown_file is not None:
        output.markdown_file.write_text(table)
    if output.json_file is not None:
        figures = {
            "highest_rate_per_s": None if best is None else best.rate_per_s,
            "rates": [point.as_json() for point in sorted(sweep.points, key=lambda one: one.rate_per_s)],
        }
        output.json_file.write_text(json.dumps(figures, indent=2) + "\n")


def _rates(text: str | None) -> Sequence[float]:
    try:
        rates = [float(one) for one in text.split(",")] if text else []
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise InvalidRequest("--rates are numbers above 0, separated by commas", param="rates")
    return rates
