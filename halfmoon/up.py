"""`halfmoon up`: the whole system on this host, as one command."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from halfmoon.beside import beside
from halfmoon.errors import HalfmoonError, InvalidRequest, UnknownModel, leaf_errors
from halfmoon.gpus import GPUShares, visible_gpus, whole_gpus
from halfmoon.policy.admission import AdmissionMode
from halfmoon.policy.placement import PlacementMode
from halfmoon.reserved_ports import ReservedPorts
from halfmoon.rpc.loopback import is_loopback
from halfmoon.rpc.tracing import check_endpoint
from halfmoon.simulated_up import SimulatedWorkers, simulated_model, simulation_specs
from halfmoon.store_up import StoreOptions, idle_directories, remember_stores, store_specs
from halfmoon.supervisor import Child, ServiceSpec, Supervisor, children_ready

_HEALTH_POLL_S = 0.1


class WorkerStart(NamedTuple):
    """What one worker is started with, beside what all are."""

    arguments: tuple[str, ...] = ()
    num_gpus: int = 1


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What to start. Counts are numbers of worker processes by role."""

    model: str = "demo"
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    device: str = "auto"
    dtype: str = "auto"
    handover_codec: str = "raw"
    host: str = "127.0.0.1"
    port: int = 8000
    state_dir: Path = Path(".halfmoon")
    console: bool = True
    console_port: int = 8501
    admission: AdmissionMode | None = None  # None: the gateway's own
    placement: PlacementMode | None = None
    simulation: SimulatedWorkers | None = None  # None: real engines
    store: StoreOptions = field(default_factory=StoreOptions)
    num_gateways: int = 1
    operator_token: str | None = None  # None: made where the host is not loopback
    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    worker_starts: Mapping[str, Sequence[WorkerStart]] = field(default_factory=dict)  # by role, of each real engine
    otlp_endpoint: str | None = None  # who gets traces; None: whom OpenTelemetry's own variables name

    def __post_init__(self) -> None:
        if self.state_dir.exists() and not self.state_dir.is_dir():
            raise InvalidRequest(f"--state-dir {self.state_dir} is not a directory")
        if min(self.num_prefill, self.num_decode, self.num_both) < 0:
            raise InvalidRequest("numbers of workers cannot be negative")
        if self.num_gateways < 1:
            raise InvalidRequest("there has to be at least one gateway")
        check_endpoint(self.otlp_endpoint)
        if not self.num_both and not (self.num_prefill and self.num_decode):
            raise InvalidRequest(
                "nothing could be served: start at least one --prefill and one --decode, or one --both"
            )


async def up(options: UpOptions, terminal: Console) -> None:
    """Runs until Ctrl-C or SIGTERM. Raises ServiceFailed when a service ends on its own."""
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    with _bars(terminal) as bars:
        supervisor = Supervisor(options.state_dir / "logs", _Display(bars).on_event, partial(_print_restart, terminal))
        try:
            async with beside(stopping.wait()) as stop, beside(_run(options, supervisor, terminal, bars)) as run:
                await asyncio.wait({stop, run}, return_when=asyncio.FIRST_COMPLETED)
                if run.done():
                    await run
                terminal.print("halfmoon is stopping")
        finally:
            await supervisor.stop()


async def _run(options: UpOptions, supervisor: Supervisor, terminal: Console, bars: Progress) -> None:
    with ReservedPorts() as ports:
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(_start(options, supervisor, terminal, bars, ports))
            group.create_task(supervisor.until_one_ends())
            await starting


async def _start(
    options: UpOptions, supervisor: Supervisor, terminal: Console, bars: Progress, ports: ReservedPorts
) -> None:
    model = await prepared_model(options.model, terminal)
    if options.simulation is not None:
        model = PreparedModel(str(simulated_model(Path(model.path), options.simulation, options.state_dir)), model.name)
    stores, planner = [ports.address() for _ in range(options.store.num_stores)], ports.address()
    options = replace(options, operator_token=_operator_token(options))
    options = replace(options, port=options.port or ports.port(options.host))
    numbers = [None] if options.num_gateways == 1 else range(options.num_gateways)
    specs = [gateway_spec(options, model, number, stores[0], ports.address()) for number in numbers]
    announced = await children_ready([await supervisor.start(_traced(spec, options)) for spec in specs])
    cluster = ",".join(one["address"] for one in announced)
    specs = _other_specs(options, model, cluster, stores, planner)
    others = [await supervisor.start(_traced(spec, options)) for spec in specs]
    await children_ready([child for child in others if child.spec.announces])
    remember_stores(options.state_dir, stores)
    for idle in idle_directories(options.store, options.state_dir):
        terminal.print(
            f"[yellow]{idle} is of a store that is not started now: --stores brings it back, or remove it[/]"
        )
    url = announced[0]["http"]
    await _until_healthy(url)
    bars.stop()
    _print_ready(options, terminal, url, model.name, others)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model directory that all services of a host can read."""

    path: str
    name: str  # as served


async def prepared_model(model: str, terminal: Console) -> PreparedModel:
    """Downloads or converts the model in a process of its own, which ends with this call. Raises UnknownModel."""
    command = (sys.executable, "-m", "halfmoon.engine.prepare", model)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    said: dict[str, str] = {}
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line)
            if "step" in said:
                terminal.print(said["step"], markup=False, highlight=False, soft_wrap=True)
        await process.wait()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if "path" not in said:
        raise UnknownModel(said.get("error", f"preparing the model ended with exit status {process.returncode}"))
    return PreparedModel(said["path"], "demo" if model == "demo" else said["name"])


def gateway_spec(
    options: UpOptions,
    model: PreparedModel,
    number: int | None = None,
    store: str | None = None,
    cluster_listen: str = "127.0.0.1:0",
) -> ServiceSpec:
    """The gateway as a child; with a `number`, one of several on one HTTP port.

    With ports that are given it comes back where it was when it dies: workers register again, clients see a pause or
    another gateway.
    """
    is_shared = number is not None
    listen = ("--host", options.host, "--port", str(options.port), "--reuse-port", str(is_shared).lower())
    cluster = ("--cluster-listen", cluster_listen)
    which = ("--model", model.path, "--model-name", model.name, "--state-dir", str(options.state_dir))
    codec = ("--handover-codec", options.handover_codec)
    modes = {"--admission": options.admission, "--placement": options.placement}
    chosen = (part for name, mode in modes.items() if mode is not None for part in (name, mode))
    keys = {"HALFMOON_GATEWAY_API_KEY": json.dumps(options.api_keys)} if options.api_keys else {}
    if options.operator_token:
        keys["HALFMOON_GATEWAY_OPERATOR_TOKEN"] = options.operator_token
    stored = () if store is None else ("--kv-store", store)
    arguments = ("-m", "services.gateway", *listen, *cluster, *which, *codec, *stored, *chosen)
    return ServiceSpec(f"gateway-{number}" if is_shared else "gateway", arguments, keys, restarts=True)


def _other_specs(
    options: UpOptions, model: PreparedModel, cluster: str, stores: Sequence[str], planner: str
) -> list[ServiceSpec]:
    which = ("--model", model.path, "--model-name", model.name)
    common = ("--gateway", cluster, "--device", options.device, "--dtype", options.dtype, *which)
    environment = {**_openmp_waiting(options), "TOKENIZERS_PARALLELISM": "false"}
    specs = [*store_specs(options.store, options.state_dir, stores), _planner_spec(options, planner)]
    counts = {"prefill": options.num_prefill, "decode": options.num_decode, "both": options.num_both}
    if options.console and find_spec("streamlit") is not None:
        specs.append(_console_spec(options, planner))
    if options.simulation is not None:
        return specs + simulation_specs(options.simulation, counts, cluster, which)
    workers = [(role, index) for role, count in counts.items() for index in range(count)]
    starts = [_start_of(options, role, index) for role, index in workers]
    shares = _gpus([one.num_gpus for one in starts], options.device)
    for (role, index), start, (visible, share) in zip(workers, starts, shares, strict=True):
        module = "services.decode" if role == "decode" else "services.prefill"
        state = ("--state-dir", str(options.state_dir), "--kv-store", stores[index % len(stores)])
        arguments = ("-m", module, "--role", role, *common, *state, *share, *start.arguments)
        specs.append(ServiceSpec(f"{role}-{index}", arguments, {**environment, **visible}, restarts=True))
    return specs


def _start_of(options: UpOptions, role: str, index: int) -> WorkerStart:
    of_role = options.worker_starts.get(role)
    return of_role[index] if of_role else WorkerStart()


def _traced(spec: ServiceSpec, options: UpOptions) -> ServiceSpec:
    """With what tells it where traces go."""
    if options.otlp_endpoint is None:
        return spec
    return replace(spec, environment={**spec.environment, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": options.otlp_endpoint})


def _gpus(num_devices: list[int], device: str) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """Environment and arguments of each worker. GPUs are shared in turns, unless a worker needs several."""
    gpus = visible_gpus() if device != "cpu" else ()
    if max(num_devices, default=1) > 1:
        return [(one, ()) for one in whole_gpus(gpus, num_devices)]
    shares = GPUShares(gpus, len(num_devices))
    return [(shares.environment(place), shares.arguments(place)) for place in range(len(num_devices))]


def _operator_token(options: UpOptions) -> str | None:
    """Beyond loopback there is always one."""
    return options.operator_token or (None if is_loopback(options.host) else secrets.token_urlsafe(18))


def _openmp_waiting(options: UpOptions) -> dict[str, str]:
    """How OpenMP threads wait between two operations: docs/log.md has the measurements.

    Alone on its cores a worker is a fifth faster when they spin for a moment; where several share cores, spinning
    takes them from each other.
    """
    if options.num_prefill + options.num_decode + options.num_both == 1:
        return {"GOMP_SPINCOUNT": "1000"}
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def _planner_spec(options: UpOptions, address: str) -> ServiceSpec:
    """At the same address whenever it is started again; its plans are in the gateway's ledger."""
    arguments = ("-m", "services.planner", "--listen", address, "--state-dir", str(options.state_dir))
    token = {"HALFMOON_PLANNER_OPERATOR_TOKEN": options.operator_token} if options.operator_token else {}
    return ServiceSpec("planner", arguments, token, restarts=True)


def _console_spec(options: UpOptions, planner: str) -> ServiceSpec:
    flags: Mapping[str, Any] = {
        "server.port": options.console_port,
        "server.address": options.host,
        "server.headless": "true",
        "browser.gatherUsageStats": "false",
    }
    arguments = ("-m", "console", *(f"--{key}={value}" for key, value in flags.items()))
    environment = {"HALFMOON_CONSOLE_GATEWAY_URL": _url(options), "HALFMOON_CONSOLE_PLANNER": planner}
    if options.api_keys:
        environment["HALFMOON_CONSOLE_API_KEY"] = options.api_keys[0]
    if options.operator_token:
        environment["HALFMOON_CONSOLE_OPERATOR_TOKEN"] = options.operator_token
    return ServiceSpec("console", arguments, environment, restarts=True, announces=False)


async def _until_healthy(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=2)) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_HEALTH_POLL_S)


def _print_ready(options: UpOptions, terminal: Console, url: str, name: str, others: list[Child]) -> None:
    if any(child.spec.name == "console" for child in others):
        terminal.print(f"console: http://{_reachable(options.host)}:{options.console_port}", highlight=False)
    if options.operator_token:
        terminal.print(f"operator token: {options.operator_token}", highlight=False, markup=False, soft_wrap=True)
    terminal.print(f"logs: {options.state_dir / 'logs'}   stop: Ctrl-C", highlight=False, soft_wrap=True)
    terminal.print(f"halfmoon is ready: {url}", highlight=False, style="bold", soft_wrap=True)
    body = f'{{"model": "{name}", "stream": true, "messages": [{{"role": "user", "content": "What is a half moon?"}}]}}'
    key = " -H 'Authorization: Bearer KEY'" if options.api_keys else ""
    command = f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    terminal.print(command, highlight=False, markup=False, soft_wrap=True)


def _print_restart(terminal: Console, why: str, wait_s: float) -> None:
    when = f" in {wait_s:g} s" if wait_s else ""
    terminal.print(
        f"halfmoon: {why}\nStarting it again{when}.", style="yellow", markup=False, highlight=False, soft_wrap=True
    )


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


def _url(options: UpOptions) -> str:
    return f"http://{_reachable(options.host)}:{options.port}"


def _bars(terminal: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    return Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)


class _Display:
    """Owns the progress bars: one for each thing that loads."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def on_event(self, service: str, event: dict[str, Any]) -> None:
        """A child's log event."""
        if event.get("event") == "weights.progress":
            self._advance(f"{service}: weights", int(event["done_bytes"]), int(event["total_bytes"]))

    def _advance(self, title: str, done: int, total: int) -> None:
        if title not in self._tasks:
            self._tasks[title] = self._bars.add_task(title)
        self._bars.update(self._tasks[title], completed=done, total=total)


def run_up(options: UpOptions, terminal: Console) -> int:
    """The exit status of `halfmoon up`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        asyncio.run(up(options, terminal))
    except (HalfmoonError, ExceptionGroup) as err:
        for error in leaf_errors(err):
            if not isinstance(error, HalfmoonError):
                raise
            terminal.print(f"halfmoon: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0
