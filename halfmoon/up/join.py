"""Runs `halfmoon join`: workers of this host for the gateways of another one, or ranks for one of its workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.addresses.loopback import is_loopback
from halfmoon.rpc.addresses.towards import address_towards
from halfmoon.rpc.credentials.issue import CREDENTIAL_FILE
from halfmoon.rpc.credentials.sources import FILE_VARIABLE, SECRET_VARIABLE
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES, paths_in
from halfmoon.up.ranks import rank_spec
from halfmoon.up.run import prepared_model
from halfmoon.up.specs.service_specs import Spec, traced
from halfmoon.up.specs.worker_specs import worker_specs
from halfmoon.up.supervision.announcements import UnreachedGateways, print_event
from halfmoon.up.supervision.child import ServiceSpec
from halfmoon.up.until_stopped import UpContext, until_stopped
from halfmoon.up.up_options import UpOptions, engines

_VARIABLES = (SECRET_VARIABLE, FILE_VARIABLE, *TLS_VARIABLES)
_NO_SECRET = (
    "joining {} needs the cluster's secret: copy the directory `worker` that `halfmoon secret issue-all` made on the "
    "gateway's host, and name it by --secrets, or set HALFMOON_CLUSTER_SECRET_FILE"
)


async def join(options: UpOptions, stores: Sequence[str], secrets: Path | None, terminal: Console) -> bool:
    """Starts the workers and keeps them running, as `halfmoon up` does its own. Returns and raises as `up` does.

    `secrets`: a directory with a worker's credential and maybe its certificate; None: what the environment names.
    """
    assert options.joins is not None
    environment = _identity(secrets, os.environ)
    options = replace(options, host_address=options.host_address or _address_towards(options.joins))
    if not environment and not is_loopback(options.host_address):
        raise InvalidRequest(_NO_SECRET.format(options.joins), param="secrets")
    run = partial(_run, stores=stores, environment=environment)
    unreached = UnreachedGateways(terminal)

    def on_event(service: str, event: dict[str, Any]) -> None:
        unreached.on_event(service, event)
        print_event(terminal, service, event)

    return await until_stopped(options, terminal, run, on_event)


async def join_ranks(options: UpOptions, num_ranks: int, secrets: Path | None, terminal: Console) -> bool:
    """Starts ranks for the worker that awaits them at `options.joins`, as `join` does workers."""
    assert options.joins is not None
    _address_towards(options.joins)  # it is one
    environment = _identity(secrets, os.environ)
    if not environment.keys() & {SECRET_VARIABLE, FILE_VARIABLE}:  # no certificate will do, as ranks speak plain text
        raise InvalidRequest(_NO_SECRET.format(options.joins), param="secrets")
    run = partial(_run_ranks, num_ranks=num_ranks, environment=environment)
    return await until_stopped(options, terminal, run, UnreachedGateways(terminal).on_event)


async def _run(context: UpContext, *, stores: Sequence[str], environment: Mapping[str, str]) -> None:
    options, hosts, terminal = context.options, context.hosts, context.terminal
    assert options.joins is not None
    model = await prepared_model(options.model, terminal, for_any_engine="vllm" in engines(options))
    model = replace(model, name=options.model_name or model.name)
    specs = worker_specs(options, model, options.joins, stores, hosts)
    await _serve(context, [_trusted(traced(spec, options), environment) for spec in specs], "worker")


async def _run_ranks(context: UpContext, *, num_ranks: int, environment: Mapping[str, str]) -> None:
    options = context.options
    assert options.joins is not None
    model = await prepared_model(options.model, context.terminal, for_any_engine=False)
    here = uuid4().hex
    specs = [rank_spec(f"rank-{index}", options.joins, model.path, here, index) for index in range(num_ranks)]
    await _serve(context, [_trusted(spec, environment) for spec in specs], "rank")


async def _serve(context: UpContext, specs: Sequence[ServiceSpec], what: str) -> None:
    options, supervisor, _, written, terminal, bars = context
    async with asyncio.TaskGroup() as group:
        children = [await supervisor.start(spec) for spec in specs]
        group.create_task(supervisor.until_one_ends())
        for child in children:
            await child.joined
        bars.stop()
        written.write(supervisor.children)
        terminal.out(f"logs: {options.state_dir / 'logs'}   stop: Ctrl-C", highlight=False)
        joined = f"1 {what} has" if len(children) == 1 else f"{len(children)} {what}s have"
        terminal.out(f"{joined} joined {options.joins}", style="bold", highlight=False)


def _trusted(spec: Spec, environment: Mapping[str, str]) -> Spec:
    return replace(spec, environment={**spec.environment, **environment})


def _identity(secrets: Path | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that name a worker's credential and certificate. Raises InvalidRequest."""
    if secrets is None:
        return {name: environment[name] for name in _VARIABLES if name in environment}
    secrets = secrets.absolute()
    credential, paths = secrets / CREDENTIAL_FILE, paths_in(secrets)
    if not os.path.isfile(credential):
        raise InvalidRequest(
            f"--secrets {secrets}: there is no file `{CREDENTIAL_FILE}`: copy the directory `worker` that `halfmoon "
            "secret issue-all` made on the gateway's host",
            param="secrets",
        )
    tls = dict(zip(TLS_VARIABLES, map(str, paths), strict=True)) if paths.cert.is_file() else {}
    return {FILE_VARIABLE: str(credential), **tls}


def _address_towards(gateways: str) -> str:
    """Returns the address of this host from which it reaches the first gateway. Raises InvalidRequest."""
    try:
        return address_towards(gateways.split(",")[0].strip())
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{gateways}: give the gateway's HOST:PORT that its `halfmoon up --host-address` printed: {error}",
            param="gateway",
        ) from error
