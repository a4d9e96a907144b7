"""`halfmoon drain`: a worker takes no new work, finishes what it has, and ends."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from halfmoon.cli.gateway_options import GatewayOptions, run_command
from halfmoon.cli.terminal.option_groups import with_option_groups
from halfmoon.rpc.control_api import ControlApi

DRAIN_S = 660.0  # a request runs for ten minutes at most, unless gateways were told otherwise

Name = Annotated[str, typer.Argument(help="Worker id, or how it begins, as `halfmoon top` shows it.")]
Force = Annotated[bool, typer.Option("--force", help="Also where it is refused for the cluster's sake.")]


@with_option_groups
def drain(
    name: Name,
    options: GatewayOptions,
    force: Force = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Returns when the worker has left.")] = True,
) -> None:
    """Lets a worker finish its work and end; `halfmoon up` does not start it again.

    It takes no new requests from now on. Prompts and hand-overs that it has begun finish, and so do its answers.
    """
    terminal = Console()

    async def work(api: ControlApi) -> None:
        worker_id = (await api.change(name, "drain", {"force": force}))["worker_id"]
        terminal.print(f"{worker_id} drains", highlight=False)
        if wait:
            await until_left(api, worker_id)
            terminal.print(f"{worker_id} has left", highlight=False)

    run_command(options, work)


async def until_left(api: ControlApi, worker_id: str) -> None:
    """Returns once the worker is no member. Raises Unavailable if that takes too long."""
    why = f"{worker_id} has not finished its work"
    await api.until(lambda workers: all(worker["worker_id"] != worker_id for worker in workers), DRAIN_S, why)
