"""`halfmoon restart`: workers are started again, one after the other, while the system serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from halfmoon.cli.gateway_options import GatewayOptions, run_command
from halfmoon.cli.terminal.option_groups import with_option_groups
from halfmoon.cli.workers.drain import Force, until_left
from halfmoon.rpc.control_api import ControlApi, Worker

_RETURN_S = 900.0  # to load the weights and join


@with_option_groups
def restart(
    options: GatewayOptions,
    names: Annotated[
        list[str] | None, typer.Argument(help="Worker ids, or how they begin; without any, all workers.")
    ] = None,
    force: Force = False,
) -> None:
    """Starts workers again, one after the other: each finishes its work first, and the next waits until it is back.

    What started a worker starts it again: `halfmoon up`, `halfmoon join`, or a container's restart policy. A worker
    without which the cluster could not serve meanwhile is refused; with --force requests wait for it.
    """
    terminal = Console()

    async def work(api: ControlApi) -> None:
        for name in names or _in_turn(await api.workers()):
            worker_id = await restart_one(api, name, force=force)
            terminal.print(f"{worker_id} was started again", highlight=False)

    run_command(options, work)


async def restart_one(api: ControlApi, name: str, *, force: bool) -> str:
    """Drains a worker and waits for its successor; returns its id. Raises InvalidRequest or Unavailable."""
    before = {worker["worker_id"] for worker in await api.workers()}
    worker_id = str((await api.change(name, "drain", {"returns": True, "force": force}))["worker_id"])
    await until_left(api, worker_id)

    def has_returned(workers: list[Worker]) -> bool:
        new = [worker for worker in workers if worker["worker_id"] not in before]
        return any(worker["role"] == "prefill" or worker["listening"] for worker in new)

    await api.until(has_returned, _RETURN_S, f"nothing has joined in place of {worker_id}")
    return worker_id


def _in_turn(workers: Sequence[Worker]) -> list[str]:
    """The worker ids, by role: the last one of a role is refused before any other of it has gone."""
    return [worker["worker_id"] for worker in sorted(workers, key=lambda one: (one["role"], one["worker_id"]))]
