"""Builds the arguments and environment of every process that `halfmoon up` starts. Starts nothing itself."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.credentials.credential import credential_from
from halfmoon.rpc.credentials.sources import environment_of
from halfmoon.rpc.telemetry.tracing import check_endpoint
from halfmoon.up.certificates import RoleCertificates
from halfmoon.up.child import ServiceSpec
from halfmoon.up.gpus import VISIBLE_GPUS, GPUShares, visible_gpus, whole_gpus
from halfmoon.up.log_files import LogLimits
from halfmoon.up.simulated import SimulatedWorkers, simulation_specs
from halfmoon.up.stores import StoreOptions, store_specs

Spec = TypeVar("Spec", bound=ServiceSpec)
ServiceSettings: TypeAlias = Mapping[str, Mapping[str, str]]

# What the names of variables that hold or find a secret end with; URLs may hold passwords.


class WorkerStart(NamedTuple):
    """One worker's own arguments, in addition to those of all workers."""

    arguments: tuple[str, ...] = ()
    num_gpus: int = 1
    on_cpu: bool = False  # even if other workers have GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(ServiceSpec):
    """The spec of one worker process."""

    role: Role
    start: WorkerStart

    @property
    def gpus(self) -> tuple[str, ...]:
        """Returns its GPUs. Empty if it computes on the CPU or its GPUs are not restricted."""
        return visible_gpus({VISIBLE_GPUS: self.environment.get(VISIBLE_GPUS, "")})


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `halfmoon up`. Counts are numbers of worker processes by role."""

    model: str = "demo"
    model_name: str | None = None  # None: the model's own
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
    admission: AdmissionMode | None = None  # None: the gateway's default
    placement: PlacementMode | None = None
    slo: Literal["default", "off"] = "default"
    settings: ServiceSettings = field(default_factory=dict)  # further settings by service, as texts
    worker_arguments: tuple[
        str, ...
    ] = ()  # of every worker, options and values alternating; a worker's own override them
    metrics_port: int | None = 0  # first port of stores, planner and workers; 0: free ports; None: no metrics
    simulation: SimulatedWorkers | None = None  # None: real engines
    store: StoreOptions = field(default_factory=StoreOptions)
    num_gateways: int = 1
    drain_s: float = 10.0  # of the gateways
    http_tls_cert: Path | None = None  # None: HTTP without TLS
    http_tls_key: Path | None = None
    operator_token: str | None = None  # None: that of the state directory, needed beyond loopback or with API keys
    console_token: str | None = None  # operator token that the console sends; None: operator_token
    cluster_secret: str | None = field(default=None, repr=False)
    tls_dir: Path | None = None  # of an authority; None: no mutual TLS
    cluster_secret_file: Path | None = None  # with neither, the state directory has the secret
    api_keys: tuple[str, ...] = ()  # of gateways
    api_keys_file: Path | None = None
    console_key: str | None = None  # with which the console tries requests
    worker_starts: Mapping[Role, Sequence[WorkerStart]] = field(default_factory=dict)  # of each real engine, by role
    ledger_url: str | None = None  # of gateways and planner; None: SQLite in state_dir
    is_planned: bool = False  # whether the workers are those of a plan
    log_limits: LogLimits = field(default_factory=LogLimits)
    otlp_endpoint: str | None = None  # receiver of traces; None: the one that OpenTelemetry's own variables name

    def __post_init__(self) -> None:
        if self.state_dir.exists() and not self.state_dir.is_dir():
            raise InvalidRequest(f"--state-dir {self.state_dir} is not a directory")
        if min(self.num_prefill, self.num_decode, self.num_both) < 0:
            raise InvalidRequest("numbers of workers cannot be negative")
        if (self.http_tls_cert is None) != (self.http_tls_key is None):
            raise InvalidRequest("TLS of HTTP needs both a certificate and its key: --http-tls-cert and --http-tls-key")
        if self.num_gateways < 1:
            raise InvalidRequest("at least one gateway is needed")
        check_endpoint(self.otlp_endpoint)
        if not self.num_both and not (self.num_prefill and self.num_decode):
            raise InvalidRequest(
                "nothing could be served: start at least one --prefill and one --decode, or one --both"
            )
        if self.simulation is not None:
            self.simulation.check_limits(arguments for _, arguments in simulated_workers(self))


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model directory that all services of a host can read."""

    path: str
    name: str  # as served


def gateway_spec(
    options: UpOptions,
    model: PreparedModel,
    number: int | None = None,
    stores: Sequence[str] = (),
    cluster_listen: str = "127.0.0.1:0",
    listeners: Sequence[tuple[int, ...]] = (),
) -> ServiceSpec:
    """Returns the spec of a gateway; with a `number`, of one of several on one HTTP port.

    Its ports are given, so that a restarted gateway has the same addresses: workers register again, and clients see a
    pause or another gateway. `listeners` has the listening sockets of each gateway, in order, which all inherit;
    without them the gateway listens itself.
    """
    listen: tuple[str, ...] = ("--host", options.host, "--port", str(options.port))
    if listeners:
        own = number or 0
        siblings = [descriptor for index, others in enumerate(listeners) if index != own for descriptor in others]
        listen = (*listen, "--http-descriptors", json.dumps(listeners[own]))
        listen = (*listen, "--sibling-descriptors", json.dumps(siblings))
    certificate = {"--http-tls-cert": options.http_tls_cert, "--http-tls-key": options.http_tls_key}
    tls = tuple(str(part) for name, path in certificate.items() if path is not None for part in (name, path))
    if number is not None:
        listen = (*listen, "--num-gateways", str(options.num_gateways))
    cluster = ("--cluster-listen", cluster_listen)
    served = ("--model", model.path, "--model-name", model.name, "--state-dir", str(options.state_dir))
    codec = ("--handover-codec", options.handover_codec, "--slo", options.slo)
    modes = {"--admission": options.admission, "--placement": options.placement}
    chosen = (part for name, mode in modes.items() if mode is not None for part in (name, mode))
    keys = {"HALFMOON_GATEWAY_API_KEY": json.dumps(options.api_keys)} if options.api_keys else {}
    if options.api_keys_file is not None:
        keys["HALFMOON_GATEWAY_API_KEYS_FILE"] = str(options.api_keys_file)
    if options.operator_token:
        keys["HALFMOON_GATEWAY_OPERATOR_TOKEN"] = options.operator_token
    keys |= _ledger(options, "GATEWAY") | variables("gateway", options.settings)
    kv_stores = tuple(part for store in stores for part in ("--kv-store", store))
    arguments = ("-m", "services.gateway", *listen, *tls, *cluster, *served, *codec, *kv_stores, *chosen)
    name = "gateway" if number is None else f"gateway-{number}"
    return ServiceSpec(
        name,
        arguments,
        keys,
        restarts=True,
        drain_s=options.drain_s,
        descriptors=tuple(itertools.chain(*listeners)),
        cluster_role="gateway",
    )


def other_specs(
    options: UpOptions, model: PreparedModel, cluster: str, stores: Sequence[str], planner: str, fleet: str = ""
) -> list[ServiceSpec]:
    """Returns the specs of all services but the gateways.

    The gateways are at `cluster` (host:port, separated by commas), and halfmoon.Fleet is at `fleet`.
    """
    served = ("--model", model.path, "--model-name", model.name)
    specs = [
        *store_specs(options.store, options.state_dir, stores, variables("kvstore", options.settings)),
        _planner_spec(options, planner, fleet),
    ]
    if options.console and find_spec("streamlit") is not None:
        specs.append(_console_spec(options, planner))
    if options.simulation is not None:
        settings = variables("simulation", options.settings)
        simulated = simulation_specs(options.simulation, simulated_workers(options), cluster, served)
        return [*specs, *(replace(spec, environment={**spec.environment, **settings}) for spec in simulated)]
    workers = wanted_workers(options)
    shares = _gpus([start for _, start in workers], options.device)
    num_of: Counter[Role] = Counter()
    for (role, start), (visible, share) in zip(workers, shares, strict=True):
        index = num_of[role]
        num_of[role] += 1
        specs.append(worker_spec(options, model, cluster, stores, role, index, start, visible, share))
    return specs


def wanted_workers(options: UpOptions) -> list[tuple[Role, WorkerStart]]:
    """Returns role and start of each worker with a real engine."""
    counts: dict[Role, int] = {"prefill": options.num_prefill, "decode": options.num_decode, "both": options.num_both}
    starts = options.worker_starts
    return [
        (role, starts[role][index] if starts.get(role) else WorkerStart())
        for role, count in counts.items()
        for index in range(count)
    ]


def simulated_workers(options: UpOptions) -> list[tuple[Role, Mapping[str, str]]]:
    """Returns role and options of each simulated worker, also those options that it cannot take."""
    everywhere = {"--device": options.device, "--dtype": options.dtype, **_pairs(options.worker_arguments)}
    return [(role, everywhere | _pairs(start.arguments)) for role, start in wanted_workers(options)]


def worker_spec(
    options: UpOptions,
    model: PreparedModel,
    cluster: str,
    stores: Sequence[str],
    role: Role,
    index: int,
    start: WorkerStart,
    visible: Mapping[str, str],
    share: Sequence[str] = (),
) -> WorkerSpec:
    """Returns the spec of the `index`th worker of a role.

    `visible` is the environment that names its GPUs, `share` the arguments that limit their memory.
    """
    module = "services.decode" if role == "decode" else "services.prefill"
    common = ("--gateway", cluster)
    chosen = {"--device": options.device, "--dtype": options.dtype, **_pairs(share)}
    chosen |= _pairs(options.worker_arguments) | _pairs(start.arguments)
    served = ("--model", model.path, "--model-name", model.name)
    state = ("--state-dir", str(options.state_dir), "--kv-store", stores[index % len(stores)])
    settings = variables(module.removeprefix("services."), options.settings)
    return WorkerSpec(
        f"{role}-{index}",
        ("-m", module, "--role", role, *common, *served, *state, *itertools.chain(*chosen.items())),
        {**settings, **_openmp_waiting(options), "TOKENIZERS_PARALLELISM": "false", **visible},
        restarts=True,
        num_gateways=options.num_gateways,
        cluster_role="worker",
        role=role,
        start=start,
    )


def traced(spec: Spec, options: UpOptions) -> Spec:
    """Returns the spec with the address that its traces go to."""
    if options.otlp_endpoint is None:
        return spec
    return replace(spec, environment={**spec.environment, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": options.otlp_endpoint})


def trusted(spec: Spec, secret: str, certificates: RoleCertificates) -> Spec:
    """Returns the spec with credential and certificate of its role."""
    if spec.cluster_role is None:
        return spec
    own = environment_of(credential_from(secret, spec.cluster_role)) | certificates.environment(spec.cluster_role)
    return replace(spec, environment={**spec.environment, **own})


def variables(service: str, settings: ServiceSettings) -> dict[str, str]:
    """Converts settings to environment variables: arguments are visible to other users, and some are secrets."""
    return {f"HALFMOON_{service.upper()}_{name.upper()}": text for name, text in settings.get(service, {}).items()}


def _pairs(arguments: Sequence[str]) -> dict[str, str]:
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def _gpus(starts: Sequence[WorkerStart], device: str) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """Returns environment and arguments of each worker. GPUs are assigned in turn, unless a worker needs several."""
    computing = iter(_gpu_shares([start.num_gpus for start in starts if not start.on_cpu], device))
    return [({}, ()) if start.on_cpu else next(computing) for start in starts]


def _gpu_shares(num_devices: list[int], device: str) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    gpus = visible_gpus() if device != "cpu" else ()
    if max(num_devices, default=1) > 1:
        return [(environment, ()) for environment in whole_gpus(gpus, num_devices)]
    shares = GPUShares(gpus, len(num_devices))
    return [(shares.environment(place), shares.arguments(place)) for place in range(len(num_devices))]


def _openmp_waiting(options: UpOptions) -> dict[str, str]:
    """Returns how OpenMP threads wait between two operations. Measurements are in docs/log/up.md.

    A worker alone on its cores is a fifth faster if its threads spin for a moment. Workers that share cores would take
    them from each other by spinning.
    """
    if options.num_prefill + options.num_decode + options.num_both == 1:
        return {"GOMP_SPINCOUNT": "1000"}
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def _planner_spec(options: UpOptions, address: str, fleet: str) -> ServiceSpec:
    """Returns the planner's spec. It keeps its address after a restart, and its plans in the gateway's ledger."""
    changes = ("--fleet", fleet) if fleet and options.simulation is None else ()
    arguments = ("-m", "services.planner", "--listen", address, "--state-dir", str(options.state_dir), *changes)
    token = {"HALFMOON_PLANNER_OPERATOR_TOKEN": options.operator_token} if options.operator_token else {}
    environment = token | _ledger(options, "PLANNER") | variables("planner", options.settings)
    return ServiceSpec("planner", arguments, environment, restarts=True, cluster_role="planner")


def _ledger(options: UpOptions, service: str) -> dict[str, str]:
    """Passes the URL by environment: it may hold a password, and arguments are visible to other users."""
    return {f"HALFMOON_{service}_LEDGER_URL": options.ledger_url} if options.ledger_url else {}


def _console_spec(options: UpOptions, planner: str) -> ServiceSpec:
    flags: Mapping[str, Any] = {
        "server.port": options.console_port,
        "server.address": options.host,
        "server.headless": "true",
        "browser.gatherUsageStats": "false",
    }
    arguments = ("-m", "console", *(f"--{key}={value}" for key, value in flags.items()))
    environment = {"HALFMOON_CONSOLE_GATEWAY_URL": http_url(options, options.port), "HALFMOON_CONSOLE_PLANNER": planner}
    if options.http_tls_cert is not None and options.http_tls_key is not None:
        own = {"server.sslCertFile": options.http_tls_cert, "server.sslKeyFile": options.http_tls_key}
        arguments += tuple(f"--{key}={value}" for key, value in own.items())
        environment["HALFMOON_CONSOLE_GATEWAY_CA"] = str(options.http_tls_cert)
    if options.console_key:
        environment["HALFMOON_CONSOLE_API_KEY"] = options.console_key
    token = options.console_token or options.operator_token
    if token:
        environment["HALFMOON_CONSOLE_OPERATOR_TOKEN"] = token
    return ServiceSpec("console", arguments, environment, restarts=True, announces=False, cluster_role="operator")


def reachable(host: str) -> str:
    """Returns an address of this host at which a service that listens on `host` answers."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


def http_url(options: UpOptions, port: int) -> str:
    """Returns the URL of gateway or console on this host."""
    return f"{'http' if options.http_tls_cert is None else 'https'}://{reachable(options.host)}:{port}"
