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
from rich.progress import Progress

from halfmoon.background import running
from halfmoon.errors import HalfmoonError, InvalidRequest, UnknownModel, leaf_errors
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
from halfmoon.rpc.processes.descriptors import raise_descriptor_limit
from halfmoon.rpc.processes.private_files import PRIVATE_UMASK, make_private
from halfmoon.up.certificates import RoleCertificates
from halfmoon.up.fleet.fleet import WorkerFleet
from halfmoon.up.fleet.fleet_diff import WorkerChange
from halfmoon.up.fleet.fleet_servicer import fleet_address, fleet_server
from halfmoon.up.fleet.from_plan import applied_options
from halfmoon.up.gpus import visible_gpus
from halfmoon.up.metrics_targets import MetricsTargets
from halfmoon.up.reserved_ports import ReservedPorts
from halfmoon.up.service_specs import PreparedModel, WorkerSpec, gateway_spec, other_specs, traced, trusted, worker_spec
from halfmoon.up.simulated import simulated_model
from halfmoon.up.state_lock import locked_state_dir
from halfmoon.up.stores import idle_directories, remember_stores
from halfmoon.up.supervision.announcements import (
    WeightsProgress,
    print_change,
    print_ignored,
    print_ready,
    print_restart,
    print_stopping,
    print_trouble,
    progress_bars,
)
from halfmoon.up.supervision.child import ServiceSpec, children_ready
from halfmoon.up.supervision.supervisor import Supervisor
from halfmoon.up.up_options import UpOptions, WorkerStart, engines

_HEALTH_POLL_S = 0.1


async def up(options: UpOptions, terminal: Console) -> bool:
    """Runs until Ctrl-C or SIGTERM, then lets running answers finish; a second signal ends everything at once.

    Returns whether there was a second one.

    Raises ServiceFailed if a service ends for good on its own, and InvalidRequest for a state directory that cannot be
    used or that another `halfmoon up` uses.
    """
    raise_descriptor_limit()
    _open_state_dir(options.state_dir, terminal)
    with locked_state_dir(options.state_dir):
        return await _until_stopped(options, terminal)


async def _until_stopped(options: UpOptions, terminal: Console) -> bool:
    stopping, killing = asyncio.Event(), asyncio.Event()
    with progress_bars(terminal) as bars:
        supervisor = Supervisor(
            options.state_dir / "logs",
            WeightsProgress(bars).on_event,
            partial(print_restart, terminal),
            partial(print_trouble, terminal),
            options.log_limits,
        )

        def on_signal() -> None:
            if stopping.is_set():
                terminal.print("halfmoon ends at once")
                killing.set()
                supervisor.kill()
            stopping.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        try:
            async with running(stopping.wait()) as stop, running(_run(options, supervisor, terminal, bars)) as run:
                await asyncio.wait({stop, run}, return_when=asyncio.FIRST_COMPLETED)
                if run.done():
                    await run
                print_stopping(options, terminal)
        finally:
            await supervisor.stop()
    return killing.is_set()


def _open_state_dir(directory: Path, terminal: Console) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"--state-dir {directory} cannot be made: {error.strerror}") from error
    num_changed = make_private(directory)
    if num_changed:
        print_trouble(terminal, f"other users could read {num_changed} files in {directory}; they are private now")


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
    url: str  # of the gateways


async def _run(options: UpOptions, supervisor: Supervisor, terminal: Console, bars: Progress) -> None:
    with ReservedPorts() as ports, fleet_address() as fleet:
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(_start(options, supervisor, terminal, bars, ports, fleet))
            group.create_task(supervisor.until_one_ends())
            started = await starting
            group.create_task(started.certificates.renew(partial(print_trouble, terminal)))
            if options.simulation is None:
                group.create_task(_change_workers(started, fleet, supervisor, terminal))


async def _start(
    options: UpOptions, supervisor: Supervisor, terminal: Console, bars: Progress, ports: ReservedPorts, fleet: str
) -> _Started:
    model = await prepared_model(options.model, terminal, for_any_engine="vllm" in engines(options))
    model = replace(model, name=options.model_name or model.name)
    if options.simulation is not None:
        print_ignored(options, terminal)
        model = PreparedModel(str(simulated_model(Path(model.path), options.simulation, options.state_dir)), model.name)
    stores, planner = [ports.address() for _ in range(options.store.num_stores)], ports.address()
    is_generated = options.operator_token is None
    options = with_operator_token(options)
    secret, certificates = cluster_secret(options), RoleCertificates(options.tls_dir, options.state_dir)
    certificates.issue()
    options = replace(options, port=options.port or ports.port(options.host))
    numbers = [None] if options.num_gateways == 1 else range(options.num_gateways)
    listeners = ports.listening(options.host, options.port, options.num_gateways)
    specs = [gateway_spec(options, model, number, stores, ports.address(), listeners) for number in numbers]
    specs = [trusted(traced(spec, options), secret, certificates) for spec in specs]
    ready = await children_ready([await supervisor.start(spec) for spec in specs])
    cluster = ",".join(event["address"] for event in ready)
    on_trouble = partial(print_trouble, terminal)
    metrics = MetricsTargets(options.state_dir, options.metrics_port, ports, on_trouble)
    wanted = other_specs(options, model, cluster, stores, planner, fleet)
    specs = [metrics.opened(trusted(traced(spec, options), secret, certificates)) for spec in wanted]
    others = [await supervisor.start(spec) for spec in specs]
    await children_ready([child for child in others if child.spec.announces])
    remember_stores(options.state_dir, stores, on_trouble)
    for idle in idle_directories(options.store, options.state_dir):
        terminal.print(
            f"[yellow]{idle} belongs to a store that is not started: raise --stores to use it, or remove it[/]"
        )
    url = ready[0]["http"]
    is_closed = await _until_healthy(url)
    metrics.write(url, specs)
    bars.stop()
    print_ready(options, terminal, url, model.name, others, is_told=is_generated and is_closed)
    return _Started(options, model, secret, certificates, cluster, stores, specs, metrics, url)


async def _change_workers(started: _Started, address: str, supervisor: Supervisor, terminal: Console) -> None:
    """Serves the planner's requests to change workers."""
    options, model, secret, certificates, cluster, stores, specs, metrics, url = started

    def made(planned: UpOptions, role: Role, index: int, start: WorkerStart, visible: Mapping[str, str]) -> WorkerSpec:
        spec = worker_spec(planned, model, cluster, stores, role, index, start, visible)
        return metrics.opened(trusted(traced(spec, options), secret, certificates))

    def changed(change: asyncio.Task[WorkerChange]) -> None:
        metrics.write(url, (*others, *fleet.workers))
        print_change(terminal, change)

    others = [spec for spec in specs if not isinstance(spec, WorkerSpec)]
    workers = [spec for spec in specs if isinstance(spec, WorkerSpec)]
    gpus = await asyncio.to_thread(visible_gpus) if options.device != "cpu" else ()
    fleet = WorkerFleet(supervisor, workers, made, gpus)
    planned = partial(applied_options, options, model)
    access = CallAccess(credential_from(secret, "operator"))
    async with fleet_server(address, fleet, planned, changed, access):
        await asyncio.Event().wait()


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
                terminal.print(message["step"], markup=False, highlight=False, soft_wrap=True)
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
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.umask(PRIVATE_UMASK)
    try:
        if asyncio.run(up(options, terminal)):
            terminal.file.flush()
            os._exit(0)  # the interpreter would clean up for seconds where the cores are busy
    except (HalfmoonError, ExceptionGroup) as err:
        for error in leaf_errors(err):
            if not isinstance(error, HalfmoonError):
                raise
            terminal.print(f"halfmoon: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0
