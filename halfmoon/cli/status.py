"""`halfmoon status`: what of a running system is on which host, how fast their links are, and whether it serves."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from halfmoon.cli.profile_store import DEFAULT_STATE_DIR
from halfmoon.cli.terminal.host_tables import Cluster, hosts_tables
from halfmoon.rpc.credentials.operator_token import client_token
from halfmoon.up.state.written_state import ServiceList, running_services

_ANSWER_S = 3.0


def status(
    state_dir: Annotated[
        Path, typer.Option(help="State directory of `halfmoon up` or `halfmoon join`.")
    ] = DEFAULT_STATE_DIR,
) -> None:
    """Shows which services run, on which hosts and since when. The exit status is 1 unless they serve, or only join."""
    terminal = Console()
    listed = running_services(state_dir)
    if listed is None:
        text = f"no `halfmoon up` runs with the state directory {state_dir}: name its own by --state-dir"
        terminal.out(text, highlight=False)
        raise typer.Exit(1)
    terminal.print(services_table(listed, time.time()))
    if listed.joins:
        terminal.out(f"workers for the gateways at {listed.joins}", highlight=False)
        return
    answer = asyncio.run(health(listed.url)) if listed.url else "the gateways have not started yet"
    if listed.url and not answer:
        for table in hosts_tables(asyncio.run(cluster(listed.url, client_token(None, listed.url, state_dir)))):
            terminal.print(table)
    terminal.out(f"{listed.url} {answer or 'serves'}".strip(), highlight=False)
    raise typer.Exit(1 if answer else 0)


def services_table(listed: ServiceList, now_s: float) -> Table:
    """Returns the table of what runs at `now_s`, seconds since the epoch."""
    table = Table("service", "host", "process", "runs for", box=None)
    for service in sorted(listed.services, key=lambda one: (one.host, one.name)):
        table.add_row(service.name, service.host, str(service.pid), _duration(now_s - service.since_s))
    return table


async def health(url: str) -> str | None:
    """Returns why the gateways cannot serve, or None if they can."""
    try:
        async with _session() as session, session.get(f"{url}/health") as response:
            return None if response.status == 200 else f"cannot place a request: {(await response.text()).strip()}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"does not answer: {error}"


async def cluster(url: str, token: str | None) -> Cluster:
    """Returns the gateway's view of hosts and links; nothing where it does not tell it without a token."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with _session() as session, session.get(f"{url}/halfmoon/v1/cluster", headers=headers) as response:
            return dict(await response.json()) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(ssl=False)  # it is known from the state directory, maybe under another name
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_ANSWER_S))


def _duration(seconds: float) -> str:
    whole = int(max(seconds, 0))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if whole >= 2 * size:
            return f"{whole // size} {unit}"
    return f"{whole} s"
