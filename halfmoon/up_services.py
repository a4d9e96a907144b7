"""What `halfmoon up` starts: each process of the system with its arguments and environment. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from halfmoon.errors import InvalidRequest
from halfmoon.gpus import GPUShares, visible_gpus, whole_gpus
from halfmoon.policy.admission import AdmissionMode
from halfmoon.policy.placement import PlacementMode
from halfmoon.rpc.tracing import check_endpoint
from halfmoon.simulated_up import SimulatedWorkers, simulation_specs
from halfmoon.store_up import StoreOptions, store_specs
from halfmoon.supervisor import ServiceSpec


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


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model directory that all services of a host can read."""

    path: str
    name: str  # as served


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


def other_specs(
    options: UpOptions, model: PreparedModel, cluster: str, stores: Sequence[str], planner: str
) -> list[ServiceSpec]:
    """All but the gateways, which are at `cluster` (host:port, by commas)."""
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


def traced(spec: ServiceSpec, options: UpOptions) -> ServiceSpec:
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


def reachable(host: str) -> str:
    """An address at which a service that listens on `host` answers on this host."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


def _url(options: UpOptions) -> str:
    return f"http://{reachable(options.host)}:{options.port}"
