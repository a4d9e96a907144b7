"""`halfmoon join`: workers of this host for the gateways of another one, or ranks for one of its workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from halfmoon.cli.up.config import configured
from halfmoon.cli.up.up_flags import config_of
from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.policy.view.worker_view import ROLES, Role
from halfmoon.up.join import join, join_ranks
from halfmoon.up.terminal import unfailing_console
from halfmoon.up.until_stopped import exit_status
from halfmoon.up.up_options import UpOptions

_WORKERS, _TRUST = "Workers", "Security"


def join_command(
    address: Annotated[
        str,
        typer.Argument(
            help="HOST:PORT of a gateway's cluster service, several by commas; with --ranks, a worker's rank_listen."
        ),
    ],
    role: Annotated[Role | None, typer.Option(help="What the workers do.", rich_help_panel=_WORKERS)] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of workers.", rich_help_panel=_WORKERS)] = 1,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Join one worker of another host with this many ranks, instead.", rich_help_panel=_WORKERS
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model, the same as the gateway's.", rich_help_panel=_WORKERS)
    ] = None,
    kv_store: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a KV store; repeat it.", rich_help_panel=_WORKERS)
    ] = None,
    host_address: Annotated[
        str | None,
        typer.Option(help="Address at which others reach this host. Default: the one towards the gateway."),
    ] = None,
    secrets: Annotated[
        Path | None,
        typer.Option(
            help="Directory `worker` of `halfmoon secret issue-all`. Default: what HALFMOON_CLUSTER_SECRET_FILE and "
            "HALFMOON_TLS_CERT, _KEY and _CA name.",
            rich_help_panel=_TRUST,
        ),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Directory for logs and calibrations.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file; its workers of this role are read.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Sets any field of the configuration.")
    ] = None,
) -> None:
    """Starts workers on this host that join the gateways of another one, or ranks of such a worker; Ctrl-C stops."""
    given = {"config": config, "model": model, "set": set_, "state_dir": state_dir, "host_address": host_address}
    try:
        if (role is None) == (ranks is None):
            raise InvalidRequest("say what joins: workers by --role, or ranks of a worker by --ranks")
        options = joining_options(given, address, role or "both", count)
        terminal = unfailing_console(sys.stdout)
        if ranks is None:
            joining = join(options, tuple(kv_store or ()), secrets, terminal)
        else:
            joining = join_ranks(options, ranks, secrets, terminal)
    except HalfmoonError as error:
        raise typer.BadParameter(error.message) from error
    raise typer.Exit(exit_status(joining, terminal))


def joining_options(given: Mapping[str, Any], gateway: str, role: Role, count: int) -> UpOptions:
    """Returns the options of workers of one role alone. Raises InvalidRequest."""
    options = configured(config_of({**given, role: count}))
    if options.simulation is not None or options.on != "this-host":
        raise InvalidRequest("halfmoon join starts real workers on this host: leave engine sim and `on` out of it")
    counts: dict[str, Any] = {f"num_{other}": count if other == role else 0 for other in ROLES}
    starts = {role: options.worker_starts[role]}
    return replace(options, joins=gateway, worker_starts=starts, cluster_port=0, **counts)
