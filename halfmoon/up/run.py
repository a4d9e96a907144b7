"""Runs `halfmoon up`: starts the whole system on this host and keeps it running until it is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
from rich.console import Console

from halfmoon.errors import InvalidRequest, UnknownModel
from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.addresses.loopback import is_loopback
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.child_environment import child_environment
from halfmoon.rpc.credentials.credential import checked_secret, credential_from
from halfmoon.rpc.credentials.operator_token import made_token
from halfmoon.rpc.credentials.sources import (
    environment_secret,
    secret_text,
    state_secret,
)
from halfmoon.sim.latency_sources.model_catalogue import is_short_name
from halfmoon.up.fleet.fleet import WorkerFleet
from halfmoon.up.fleet.fleet_servicer import fleet_address, fleet_server
from halfmoon.up.fleet.from_plan import applied_options
from halfmoon.up.hosts import Hosts
from halfmoon.up.specs.service_specs import gateway_spec, other_specs, traced, trusted
from halfmoon.up.specs.simulated import simulated_model
from halfmoon.up.specs.stores import idle_directories, remember_stores, store_names
from halfmoon.up.specs.worker_specs import WorkerSpec, worker_spec
from halfmoon.up.state.certificates import RoleCertificates
from halfmoon.up.state.metrics_targets import MetricsTargets
from halfmoon.up.supervision.announcements import (
    print_change,
    print_event,
    print_ignored,
    print_ready,
    print_trouble,
)
from halfmoon.up.supervision.child import ServiceSpec, children_ready
from halfmoon.up.this_host.gpus import visible_gpus
from halfmoon.up.this_host.reserved_ports import ReservedPorts, check_free
from halfmoon.up.until_stopped import UpContext, exit_status, until_stopped
from halfmoon.up.up_options import PreparedModel, UpOptions, WorkerStart, engines

_HEALTH_POLL_S = 0.1


async def up(options: UpOptions, terminal: Console) -> bool:
    """Runs until Ctrl-C or SIGTERM, then lets running answers finish; a second signal ends everything at once.

    Returns whether there was a second one.

    Raises ServiceFailed if a service ends for good on its own, and InvalidRequest for a state directory that cannot be
    used or that another `halfmoon up` uses.
    """
    return await until_stopped(options, terminal, _run, partial(print_event, terminal))


class _Started(NamedTuple):
    """The started system, with everything that starting more workers needs."""

    options: UpOptions
    model: PreparedModel
    secret: str
    certificates: RoleCertificates
    cluster: str  # host:port of the gateways, separated by commas
    stores: Sequence[str]
    specs: Sequence[ServiceSpec]  # all but the gateways
    metrics: MetricsTargets


async def _run(context: UpContext) -> None:
    with ReservedPorts() as ports, fleet_address() as fleet:
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(_start(context, ports, fleet))
            group.create_task(context.supervisor.until_one_ends())
            started = await starting
            on_trouble = partial(print_trouble, context.terminal)
            group.create_task(started.certificates.renew(on_trouble, context.hosts.write_certificates))
            if context.options.simulation is None:
                group.create_task(_change_workers(started, fleet, context))


async def _start(context: UpContext, ports: ReservedPorts, fleet: str) -> _Started:
    options, supervisor, hosts, written, terminal, bars = context
    if options.console:
        check_free(options.host, options.console_port, "console_port")
    if is_short_name(options.model):
        raise InvalidRequest(
            f"{options.model!r} is a name that only the planner knows: give --model a directory, a .gguf file or a "
            "Hugging Face id, or simulate a plan's workers with --engine sim",
            param="model",
        )
    model = await prepared_model(options.model, terminal, for_any_engine="vllm" in engines(options))
    model = replace(model, name=options.model_name or model.name)
    if options.simulation is not None:
        print_ignored(options, terminal)
        model = PreparedModel(str(simulated_model(Path(model.path), options.simulation, options.state_dir)), model.name)
    options = replace(options, store=replace(options.store, num_stores=await _num_stores(options, hosts)))
    reserved = await hosts.stores(store_names(options.store.num_stores or 1), ports)
    stores, planner = [address for address, _ in reserved.values()], ports.address()
    is_generated = options.operator_token is None
    options = with_operator_token(options)
    secret, certificates = cluster_secret(options), RoleCertificates(options.tls_dir, options.state_dir)
    certificates.issue()
    options = replace(options, port=options.port or ports.port(options.host))
    numbers = [None] if options.num_gateways == 1 else range(options.num_gateways)
    listeners = ports.listening(options.host, options.port, options.num_gateways)
    specs = [
        gateway_spec(options, model, number, stores, _cluster_listen(options, hosts, ports, number or 0), listeners)
        for number in numbers
    ]
    specs = [trusted(traced(spec, options), secret, certificates) for spec in specs]
    ready = await children_ready([await supervisor.start(spec) for spec in specs])
    cluster = ",".join([*(event["address"] for event in ready), *options.other_gateways])
    on_trouble = partial(print_trouble, terminal)
    metrics = MetricsTargets(options.state_dir, options.metrics_port, ports, on_trouble)
    rooms = {name: room for name, (_, room) in reserved.items()}
    wanted = other_specs(options, model, cluster, stores, planner, fleet, hosts, rooms)
    specs = [metrics.opened(trusted(traced(spec, options), secret, certificates)) for spec in wanted]
    others = await asyncio.gather(*map(supervisor.start, specs))
    await children_ready([child for child in others if child.spec.announces])
    remember_stores(options.state_dir, stores, on_trouble)
    for idle in idle_directories(options.store, options.state_dir):
        text = f"{idle} belongs to a store that is not started: raise --stores to use it, or remove it"
        terminal.out(text, style="yellow", highlight=False)
    url = ready[0]["http"]
    is_closed = await _until_healthy(url)
    written.begin(url, partial(metrics.write, url, hosts.metrics_address))
    written.write(supervisor.children)
    bars.stop()
    print_ready(options, terminal, url, model.name, others, shows_token_file=is_generated and is_closed)
    return _Started(options, model, secret, certificates, cluster, stores, specs, metrics)


async def _change_workers(started: _Started, address: str, context: UpContext) -> None:
    """Serves the planner's requests to change workers."""
    options, model, secret, certificates, cluster, stores, specs, metrics = started
    _, supervisor, hosts, _, terminal, _ = context

    def made(planned: UpOptions, role: Role, index: int, start: WorkerStart, visible: Mapping[str, str]) -> WorkerSpec:
        spec = worker_spec(planned, model, cluster, stores, role, index, start, visible, address=hosts.address)
        spec = replace(spec, room=hosts.worker_room(start, planned.device))
        return metrics.opened(trusted(traced(spec, options), secret, certificates))

    workers = [spec for spec in specs if isinstance(spec, WorkerSpec)]
    is_alone = options.on == "this-host" and options.device != "cpu"
    gpus = await asyncio.to_thread(visible_gpus) if is_alone else {}
    fleet = WorkerFleet(supervisor, workers, made, gpus, hosts.share)
    planned = partial(applied_options, options, model)
    access = CallAccess(credential_from(secret, "operator"))
    async with fleet_server(address, fleet, options, planned, partial(print_change, terminal), access):
        await asyncio.Event().wait()


def _cluster_listen(options: UpOptions, hosts: Hosts, ports: ReservedPorts, number: int) -> str:
    if options.cluster_port:
        return f"{hosts.address}:{options.cluster_port + number}"
    return ports.address(hosts.address)


async def _num_stores(options: UpOptions, hosts: Hosts) -> int:
    return await hosts.default_stores() if options.store.num_stores is None else options.store.num_stores


async def prepared_model(model: str, terminal: Console, *, for_any_engine: bool = False) -> PreparedModel:
    """Downloads or converts the model in a process that ends with this call. Raises UnknownModel.

    Without `for_any_engine` that is also raised for a model that our own engine does not compute.
    """
    module = "halfmoon.engine.checkpoint.prepare"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, model, *(("any",) if for_any_engine else ())),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=child_environment(os.environ, module),
    )
    message: dict[str, str] = {}
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            message = json.loads(line)
            if "step" in message:
                terminal.out(message["step"], highlight=False)
        await process.wait()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if "path" not in message:
        raise UnknownModel(message.get("error", f"preparing the model ended with exit status {process.returncode}"))
    return PreparedModel(message["path"], "demo" if model == "demo" else message["name"])


def cluster_secret(options: UpOptions, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the configured secret, or the one that the state directory keeps. Raises InvalidRequest."""
    configured = secret_text(options.cluster_secret, options.cluster_secret_file)
    text = configured or environment_secret(environment)
    return state_secret(options.state_dir) if text is None else checked_secret(text)


def with_operator_token(options: UpOptions) -> UpOptions:
    """Returns the options with the operator token that the state directory keeps, if none is given.

    Gateways on loopback read it there, and need it where there are API keys, which may also come later.
    """
    if options.operator_token is not None:
        return options
    token = made_token(options.state_dir)
    return replace(options, operator_token=None if is_loopback(options.host) else token, console_token=token)


async def _until_healthy(url: str) -> bool:
    """Waits for the gateway just started, and returns whether its control API is closed to those without a token.

    It may have a certificate for other names than this address.
    """
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                statuses = []
                for path in ("/health", "/halfmoon/v1/admission"):
                    async with session.get(url + path, timeout=aiohttp.ClientTimeout(total=2)) as response:
                        statuses.append(response.status)
                if statuses[0] == 200:
                    return statuses[1] == 401
            await asyncio.sleep(_HEALTH_POLL_S)


def run_up(options: UpOptions, terminal: Console) -> int:
    """Runs `halfmoon up` and returns its exit status."""
    return exit_status(up(options, terminal), terminal)
