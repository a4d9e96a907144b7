"""`halfmoon top`: shows the console's figures in a terminal, from the same control API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from halfmoon.cli.terminal.host_tables import links_tables
from halfmoon.rpc.tls.http_context import client_context, unreached
from halfmoon.up.config.human_bytes import human_bytes

_TIMEOUT_S = 5.0
_MINUTES = 5
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 24
_BAR_WIDTH = 6
_ROLE_STYLES = {"prefill": "blue", "decode": "yellow", "both": "green"}
_NOTHING = "–"

Worker = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TopOptions:
    """Options of `halfmoon top`."""

    gateway: str
    token: str | None = None  # the operator token
    interval_s: float = 2.0
    ca: Path | None = None  # authorities of the gateway's certificate; None: the system's
    num_workers: int = 20  # rows of workers, the busiest first


class Snapshot(NamedTuple):
    """The gateway's answers at one moment."""

    cluster: Mapping[str, Any]
    series: Mapping[str, Any]
    classes: Sequence[Mapping[str, Any]]
    tenants: Sequence[Mapping[str, Any]] = ()


class NoSnapshot(Exception):
    """The gateway did not give its figures; the message is for the user."""


async def snapshot(session: aiohttp.ClientSession, options: TopOptions) -> Snapshot:
    """Asks the gateway once. Raises NoSnapshot."""
    cluster = await _ask(session, f"{options.gateway}/halfmoon/v1/cluster")
    series = await _ask(session, f"{options.gateway}/halfmoon/v1/series?minutes={_MINUTES}")
    classes = await _ask(session, f"{options.gateway}/halfmoon/v1/classes")
    if "workers" not in cluster or "together" not in series or "classes" not in classes:
        raise NoSnapshot(f"{options.gateway} is not a Halfmoon gateway")
    return Snapshot(cluster, series, classes["classes"], await _tenants_of(session, options))


async def top(options: TopOptions, terminal: Console, *, once: bool = False) -> int:
    """Draws until Ctrl-C, or once, and returns the exit status."""
    headers = {"Authorization": f"Bearer {options.token}"} if options.token else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.TCPConnector(ssl=client_context(options.ca, options.gateway) or True)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        if once:
            return await _once(session, options, terminal)
        with Live(console=terminal, screen=True, auto_refresh=False) as live:
            known: Snapshot | None = None
            known_s = 0.0
            while True:
                problem = None
                try:
                    known, known_s = await snapshot(session, options), time.monotonic()
                except NoSnapshot as error:
                    age = f" (figures below are {time.monotonic() - known_s:.0f} s old)" if known else ""
                    problem = f"{error}{age}"
                live.update(draw(known, options.num_workers, problem), refresh=True)
                await asyncio.sleep(options.interval_s)


def draw(seen: Snapshot | None, num_workers: int, problem: str | None = None) -> RenderableType:
    """Builds the screen; `problem` says why the figures are old or missing."""
    parts: list[RenderableType] = [] if problem is None else [Panel(Text(problem), style="red")]
    if seen is None:
        return Group(*parts)
    missing = seen.cluster.get("missing")
    if missing:
        parts.append(Panel(Text(f"Requests are refused: there is no {' and no '.join(missing)}."), style="yellow"))
    return Group(
        *parts,
        _headline(seen),
        _figures(seen.series),
        _classes(seen),
        *_tenants(seen, num_workers),
        _workers(seen, num_workers),
        *links_tables(seen.cluster),
    )


def spark(values: Sequence[float | None]) -> str:
    """Draws the last values as a line of blocks, with a gap for each missing value."""
    last = values[-_SPARK_WIDTH:]
    most = max((value for value in last if value is not None), default=0.0)
    heights = [None if value is None else int(value / most * (len(_SPARKS) - 1)) if most else 0 for value in last]
    return "".join(" " if height is None else _SPARKS[height] for height in heights)


def duration(value_s: float | None) -> str:
    """Formats a time with three digits, in ms or s."""
    if value_s is None:
        return _NOTHING
    return f"{1000 * value_s:.3g} ms" if value_s < 1 else f"{value_s:.3g} s"


def busiest(cluster: Mapping[str, Any]) -> list[Worker]:
    """Sorts workers: departed ones first, then by requests and by memory in use."""
    members = sorted(cluster["workers"], key=lambda worker: (-_requests(worker), -_used(worker), worker["worker_id"]))
    return [*cluster.get("departed", ()), *members]


async def _ask(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    try:
        async with session.get(url) as response:
            body = await response.json(content_type=None)
            if response.status != 200:
                raise NoSnapshot(f"the gateway answered {response.status}: {body['error']['message']}")
            return dict(body)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NoSnapshot(f"no gateway at {url.partition('/halfmoon')[0]}: {unreached(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NoSnapshot(f"{url} is not part of a Halfmoon gateway") from error


async def _tenants_of(session: aiohttp.ClientSession, options: TopOptions) -> Sequence[Mapping[str, Any]]:
    """Returns the tenants, which only operators with a token are shown; nothing without one."""
    if options.token is None:
        return ()
    try:
        return list((await _ask(session, f"{options.gateway}/halfmoon/v1/tenants"))["tenants"])
    except (NoSnapshot, KeyError):
        return ()


async def _once(session: aiohttp.ClientSession, options: TopOptions, terminal: Console) -> int:
    try:
        terminal.print(draw(await snapshot(session, options), options.num_workers))
    except NoSnapshot as error:
        terminal.out(f"halfmoon: {error}", style="red", highlight=False)
        return 1
    return 0


def _headline(seen: Snapshot) -> Text:
    cluster = seen.cluster
    text = Text()
    text.append("halfmoon ", style="bold")
    text.append(f"{cluster.get('served_model') or 'no model'}  ", style="bold blue")
    text.append(
        f"{cluster['gateway_id']}  up {cluster['uptime_s'] / 60:.0f} min  "
        f"{len(cluster['workers'])} workers, last {_MINUTES} min",
        style="dim",
    )
    return text


def _figures(series: Mapping[str, Any]) -> Table:
    together, rates, requests = series["together"], series["rates"], series["requests"]
    table = Table.grid(padding=(0, 2))
    lines: tuple[tuple[str, str, Sequence[float | None]], ...] = (
        ("requests/s", _rate(requests["ended"]), requests["ended"]),
        ("good/s", _rate(requests["good"]), requests["good"]),
        ("prompt tokens/s", _rate(rates["prompt_tokens"]), rates["prompt_tokens"]),
        ("output tokens/s", _rate(rates["output_tokens"]), rates["output_tokens"]),
        ("TTFT", _percentiles(together["ttft_s"]), series["ttft_s"]["p50"]),
        ("TBT", _percentiles(together["tbt_s"]), series["tbt_s"]["p50"]),
        ("running", _now(series["num_running"]), series["num_running"]),
        ("KV in use", _share(series["used_share"]), series["used_share"]),
    )
    for name, value, line in lines:
        table.add_row(Text(name, style="dim"), value, Text(spark(line), style="cyan"))
    return table


def _classes(seen: Snapshot) -> Table:
    """Builds the table of classes; a share below the class's attainment is yellow."""
    goals = {row["name"]: row["attainment"] for row in seen.classes}
    table = Table("class", "requests", "in time", "refused", "failed", box=None, header_style="dim", padding=(0, 2))
    for name, counts in seen.series["together"]["classes"].items():
        ended = counts["ended"]
        in_time = f"{100 * counts['good'] / ended:.1f} %" if ended else _NOTHING
        style = "yellow" if ended and counts["good"] / ended < goals.get(name, 0.0) else ""
        table.add_row(Text(name), str(ended), Text(in_time, style=style), str(counts["refused"]), str(counts["failed"]))
    return table


def _tenants(seen: Snapshot, num_rows: int) -> list[Table]:
    """Builds the table of tenants, those with most requests first; nothing without tenants."""
    if not seen.tenants:
        return []
    names = ("tenant", "requests in 24 h", "refused", "prompt tokens", "cached", "output tokens", "KV stored")
    table = Table(*names, box=None, header_style="dim", padding=(0, 2))
    ranked = sorted(seen.tenants, key=lambda one: (-((one["usage"] or {}).get("num_requests", 0)), one["name"]))
    for tenant in ranked[:num_rows]:
        used = tenant["usage"] or {}
        counts = ("num_requests", "num_refused", "prompt_tokens", "cached_tokens", "output_tokens")
        table.add_row(
            Text(tenant["name"]), *(str(used.get(name, 0)) for name in counts), human_bytes(tenant["stored_kv_bytes"])
        )
    if len(ranked) > num_rows:
        table.caption = f"and {len(ranked) - num_rows} more"
    return [table]


def _workers(seen: Snapshot, num_workers: int) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1))
    hosts = ("host",) if len(seen.cluster.get("hosts", ())) > 1 else ()
    for name in ("worker", "role", "KV", "run", "wait", "step", "predicted", *hosts):
        table.add_column(name, no_wrap=True)
    ranked = busiest(seen.cluster)
    for worker in ranked[:num_workers]:
        table.add_row(*_worker(worker, seen.cluster["silent_after_s"]), *(Text(worker[name]) for name in hosts))
    if len(ranked) > num_workers:
        table.caption = f"and {len(ranked) - num_workers} more"
    return table


def _worker(worker: Worker, silent_after_s: float) -> list[RenderableType]:
    name, role = worker["worker_id"], Text(worker["role"], style=_ROLE_STYLES[worker["role"]])
    if "left_s_ago" in worker:
        gone = Text(f"✕ gone {worker['left_s_ago']:.0f} s ago", style="bold red")
        return [Text(name, style="red"), role, gone, "", "", "", ""]
    load, used = worker["load"], _used(worker)
    filled = round(used * _BAR_WIDTH)
    bar = Text("█" * filled, style=_ROLE_STYLES[worker["role"]]) + Text("░" * (_BAR_WIDTH - filled), style="dim")
    silent = f" silent {worker['age_s']:.0f} s" if worker["age_s"] > silent_after_s else ""
    state = " draining" if load["draining"] else silent
    return [
        Text(name + state),
        role,
        bar + Text(f" {100 * used:3.0f} %"),
        str(load["num_running"]),
        str(load["num_waiting"]),
        duration(worker["measured_step_s"]),
        duration(worker["predicted_step_s"]),
    ]


def _requests(worker: Worker) -> int:
    return int(worker["load"]["num_running"] + worker["load"]["num_waiting"])


def _used(worker: Worker) -> float:
    total = worker["total_blocks"]
    return 1 - worker["load"]["free_blocks"] / total if total else 0.0


def _latest(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _rate(values: Sequence[float | None]) -> str:
    latest = _latest(values)
    return _NOTHING if latest is None else f"{latest:.1f}"


def _now(values: Sequence[float | None]) -> str:
    latest = _latest(values)
    return _NOTHING if latest is None else f"{latest:.0f}"


def _share(values: Sequence[float | None]) -> str:
    latest = _latest(values)
    return _NOTHING if latest is None else f"{100 * latest:.0f} %"


def _percentiles(quantiles: Mapping[str, float | None]) -> str:
    return f"{duration(quantiles['p50'])} / {duration(quantiles['p99'])} p99"
