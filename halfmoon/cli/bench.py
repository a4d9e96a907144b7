"""`halfmoon bench URL…`: how much load servers of OpenAI's API take within targets for TTFT and TPOT, by turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from rich.console import Console

from halfmoon.cli.output_file import check_can_write
from halfmoon.cli.terminal.option_groups import with_option_groups
from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.plan.plot import check_plot, write_plot
from halfmoon.replay.bench_load import BenchLoad, DrawnTurns, LoadAmount, Pace, RequestLoad, SessionLoad, trace_load
from halfmoon.replay.bench_report import failure_lines, markdown_table, plot_spec, ratio_lines, search_line
from halfmoon.replay.client import Gateway, discover_server
from halfmoon.replay.outcome import ReplayTargets
from halfmoon.replay.sweep import Sweep, SweepOptions, highest_kept
from halfmoon.rpc.tls.http_context import CA_HELP, CA_VARIABLE
from halfmoon.sim.workloads.lengths import KNOWN_LENGTHS, named_lengths

_TOLERANCE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What is sent."""

    PANEL: ClassVar[str] = "Load"
    rates: Annotated[
        str | None,
        typer.Option(
            help="Requests (or conversations) per second, separated by commas. Default: a search from --start on; "
            "a trace's own rate."
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        typer.Option(help="Conversations or agents at once, separated by commas, instead of --rates: a closed loop."),
    ] = None
    start: Annotated[float, typer.Option(min=0.01, help="Where the search starts.")] = 1.0
    most: Annotated[float, typer.Option(min=0.01, help="Highest rate of the search.")] = 1000.0
    lengths: Annotated[
        str, typer.Option(help=f"Lengths of prompts and answers: in=512,out=64, or {', '.join(KNOWN_LENGTHS)}.")
    ] = "in=256,out=64"
    turns: Annotated[
        int, typer.Option(min=1, max=1000, help="Turns of a conversation or job; each has the earlier ones before it.")
    ] = 1
    think: Annotated[
        float, typer.Option(min=0, help="Seconds between an answer and the next turn: a reader, or an agent's tool.")
    ] = 1.0
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace to send instead: Mooncake or plain JSON lines, Azure CSV, or sessions (session_id)."),
    ] = None
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals at each rate; at least 20 requests.")] = 20
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests (or conversations) at each rate, instead of --seconds.")
    ] = None
    repeat: Annotated[int, typer.Option(min=1, help="Rounds at each rate; servers take turns in each.")] = 1
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
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model to ask for; repeated: one for each URL. Default: the first of /v1/models."),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="HALFMOON_API_KEY", help="API key of the first URL; repeated: one for each URL."),
    ] = None
    ca: Annotated[Path | None, typer.Option(envvar=CA_VARIABLE, help=CA_HELP)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Files to write."""

    PANEL: ClassVar[str] = "Output"
    json_file: Annotated[Path | None, typer.Option("--json", help="Writes the figures to this JSON file.")] = None
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Writes the report to this file.")] = None
    plot: Annotated[Path | None, typer.Option(help="Plots the points into a .png or .html file.")] = None


@with_option_groups
def bench(
    urls: Annotated[
        list[str],
        typer.Argument(
            help="Servers with OpenAI's API, such as http://127.0.0.1:8000 or NAME=URL. The first is the base."
        ),
    ],
    load: LoadOptions,
    targets: TargetOptions,
    server: ServerOptions,
    output: OutputOptions,
) -> None:
    """Measures goodput, TTFT and TPOT at request rates, and finds the highest rate within the targets.

    Requests arrive as a Poisson process, whether or not earlier ones are answered. Each prompt is new. Answers have
    their full length (`ignore_eos`), as far as the server knows that parameter. With several servers each rate is
    measured on one after the other, in changing order, and figures are compared with the first one's: give the same
    server twice to see what the machine's noise alone makes.

    --turns makes conversations, --concurrency lets so many of them run at once and counts jobs an hour.
    """
    terminal = Console(stderr=True)
    try:
        for path in (output.json_file, output.markdown_file):
            if path is not None:
                check_can_write(path, "the results")
        if output.plot is not None:
            check_plot(output.plot)
        options = SweepOptions(
            ReplayTargets(targets.slo_ttft, targets.slo_tpot), targets.attainment, load.seed, load.repeat
        )
        pace: Pace = "rate" if load.concurrency is None else "at once"
        bench_load, values = _load(load, pace, options.targets)
        servers = asyncio.run(_servers(urls, server))
        for one in servers:
            if one.leaves_out:
                names = " and ".join(sorted(one.leaves_out))
                terminal.print(
                    f"{one.name} refuses {names}: lengths or counts of its answers are its own", markup=False
                )
        unit = "a second" if pace == "rate" else "at once"
        sweep = Sweep(
            servers,
            bench_load,
            options,
            lambda name, value, num: terminal.print(
                f"{name}: {f'{value:.3g} {unit}' if value else 'one at a time'}, {num} requests …", markup=False
            ),
        )
        try:
            if values:
                for value in values:
                    sweep.measure(value)
            else:
                sweep.search(load.start, _TOLERANCE, load.most)
        finally:
            if sweep.points:  # those that were measured before Ctrl-C, too
                _report(sweep, pace, output)
    except HalfmoonError as error:
        terminal.out(f"halfmoon: {error}", style="red", highlight=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _load(load: LoadOptions, pace: Pace, targets: ReplayTargets) -> tuple[BenchLoad, Sequence[float]]:
    """What is sent, and at which points; none: they are searched."""
    if load.rates is not None and load.concurrency is not None:
        raise InvalidRequest("--rates is an open loop and --concurrency a closed one: choose one", param="rates")
    values = _values(load.rates, "rates") if pace == "rate" else _values(load.concurrency, "concurrency")
    if pace == "at once" and not (values and all(value == round(value) for value in values)):
        raise InvalidRequest("--concurrency are whole numbers, separated by commas", param="concurrency")
    amount = LoadAmount(load.seconds, load.requests)
    if load.trace is not None:
        source, own_rate = trace_load(load.trace, amount, pace, targets)
        if not values and own_rate == 0:
            raise InvalidRequest(f"{load.trace} has no different times: give --concurrency", param="trace")
        return source, values or [own_rate]
    lengths = named_lengths(load.lengths)
    if load.turns > 1 or pace == "at once":
        return SessionLoad(DrawnTurns(lengths, load.turns, load.think), amount, pace, targets), values
    return RequestLoad(lengths, amount), values


async def _servers(urls: Sequence[str], options: ServerOptions) -> list[Gateway]:
    """The servers, each with a name of its own. Raises Unavailable if one does not answer."""
    models, keys = options.model or [], options.api_key or []
    for values, name in ((models, "--model"), (keys, "--api-key")):
        if len(values) not in (0, 1, len(urls)):
            raise InvalidRequest(f"{name} is given {len(values)} times for {len(urls)} servers: once, or once for each")
    servers: list[Gateway] = []
    for index, text in enumerate(urls):
        before, separator, after = text.partition("=")
        name, url = (before, after) if separator and "://" not in before else ("", text)
        model = models[index] if len(models) > 1 else next(iter(models), None)
        key = keys[index] if index < len(keys) else None
        found = await discover_server(url, model, key, options.ca, is_chat=options.chat, name=name)
        num_same = sum(one.name.partition(" #")[0] == found.name for one in servers)
        servers.append(replace(found, name=f"{found.name} #{num_same + 1}") if num_same else found)
    return servers


def _report(sweep: Sweep, pace: Pace, output: OutputOptions) -> None:
    names = [server.name for server in sweep.servers]
    best = {name: highest_kept(sweep.points, name) for name in names}
    unit = "a second" if pace == "rate" else "at once"
    share = f"{sweep.options.attainment:.0%} of requests"
    lines = [*ratio_lines(sweep.points, names[0], pace), *failure_lines(sweep.points, pace)]
    for name, point in best.items():
        whose = f" of {name}" if len(names) > 1 else ""
        if point is None:
            highest = search_line(sweep, name) if sweep.least else "none"
        else:
            highest = f"{point.value:.3g} {unit}"
        lines.append(f"highest {'rate' if pace == 'rate' else 'number'}{whose} with {share} in time: {highest}")
    late_s = max((point.summary.sent_late_p99_s for point in sweep.points), default=0.0)
    if late_s > 0.1 * sweep.options.targets.ttft_s:
        lines.append(f"this client sent requests up to {late_s:.2f} s late: it was a limit, too")
    report = markdown_table(sweep.points, pace) + "\n" + "".join(f"- {line}\n" for line in lines)
    print(report, end="")
    if output.markdown_file is not None:
        output.markdown_file.write_text(report)
    if output.json_file is not None:
        figures = {
            "pace": pace,
            "highest": {name: None if point is None else point.value for name, point in best.items()},
            "points": [point.as_json() for point in sorted(sweep.points, key=lambda one: one.value)],
        }
        output.json_file.write_text(json.dumps(figures, indent=2) + "\n")
    if output.plot is not None:
        write_plot(output.plot, plot_spec(sweep.points, names, sweep.options.attainment, pace))


def _values(text: str | None, name: str) -> Sequence[float]:
    try:
        values = [float(one) for one in text.split(",")] if text else []
    except ValueError:
        values = [0.0]
    if not all(0 < value < float("inf") for value in values):
        raise InvalidRequest(f"--{name} are numbers above 0, separated by commas", param=name)
    return values
