"""`halfmoon role`: a worker serves another role from now on."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from halfmoon.cli.gateway_options import GatewayOptions, run_command
from halfmoon.cli.terminal.option_groups import with_option_groups
from halfmoon.cli.workers.drain import Force, Name
from halfmoon.policy.view.worker_view import ROLES
from halfmoon.rpc.control_api import ControlApi


@with_option_groups
def role(
    name: Name,
    new: Annotated[str, typer.Argument(metavar="ROLE", help="prefill, decode or both.")],
    options: GatewayOptions,
    force: Force = False,
) -> None:
    """Changes what a worker does while it serves: prefill, decode or both.

    Its process, weights and caches stay. What it has accepted finishes; a new request that was just on its way there is
    placed elsewhere. A worker that is started again has the role of its own settings.
    """
    if new not in ROLES:
        raise typer.BadParameter(f"a role is one of {', '.join(ROLES)}", param_hint="ROLE")

    async def work(api: ControlApi) -> None:
        changed = await api.change(name, "role", {"role": new, "force": force})
        before, now = changed["before"], changed["role"]
        text = f"serves {now}" if before != now else f"served {now} already"
        Console().print(f"{changed['worker_id']} {text}", highlight=False)

    run_command(options, work)
