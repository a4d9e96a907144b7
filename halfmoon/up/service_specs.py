"""What `halfmoon up` starts: each process of the system with its arguments and environment. Starts nothing."""

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
from halfmoon.rpc.tracing import check_endpoint
from halfmoon.up.gpus import VISIBLE_GPUS, GPUShares, visible_gpus, whole_gpus
from halfmoon.up.simulated import SimulatedWorkers, simulation_specs
from halfmoon.up.stores import StoreOptions, store_specs
from halfmoon.up.supervisor import ServiceSpec

Spec = TypeVar("Spec", bound=ServiceSpec)
ServiceSettings: TypeAlias = Mapping[str, Mapping[str, str]]


class WorkerStart(NamedTuple):
    """What one worker is started with, beside what all are."""

    arguments: tuple[str, ...] = ()
    num_gpus: int = 1
    on_cpu: bool = False  # though others may have GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(ServiceSpec):
    """A worker as a child."""

    role: Role
    start: WorkerStart

    @property
    def gpus(self) -> tuple[str, ...]:
        """That it computes on; none: on the CPU, or on whatever there is."""
        return visible_gpus({VISIBLE_GPUS: self.environment.get(VISIBLE_GPUS, "")})


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What to start. Counts are numbers of worker processes by role."""

    model: str = "demo"
    model_name: str | None = None  # None: its own
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
    slo: Literal["default", "off"] = "default"
    settings: ServiceSettings = field(default_factory=dict)  # other settings by service, as texts
    worker_arguments: tuple[str, ...] = ()  # of every worker, as options and values in turns; its own go before
    metrics_port: int | None = 0  # first of those of stores, planner and workers; 0: free ones; None: none
    simulation: SimulatedWorkers | None = None  # None: real engines
    store: StoreOptions = field(default_factory=StoreOptions)
    num_gateways: int = 1
    operator_token: str | None = None  # None: made where the host is not loopback
    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    worker_starts: Mapping[str, Sequence[WorkerStart]] = field(default_factory=dict)  # by role, of each real engine
    ledger_url: str | None = None  # of gateways and planner; None: SQLite in state_dir
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
    codec = ("--handover-codec", options.handover_codec, "--slo", options.slo)
    modes = {"--admission": options.admission, "--placement": options.placement}
    chosen = (part for name, mode in modes.items() if mode is not None for part in (name, mode))
    keys = {"HALFMOON_GATEWAY_API_KEY": json.dumps(options.api_keys)} if options.api_keys else {}
    if options.operator_token:
        keys["HALFMOON_GATEWAY_OPERATOR_TOKEN"] = options.operator_token
    keys |= _ledger(options, "GATEWAY") | variables("gateway", options.settings)
    stored = () if store is None else ("--kv-store", store)
    arguments = ("-m", "services.gateway", *listen, *cluster, *which, *codec, *stored, *chosen)
    return ServiceSpec(f"gateway-{number}" if is_shared else "gateway", arguments, keys, restarts=True)


def other_specs(
    options: UpOptions, model: PreparedModel, cluster: str, stores: Sequence[str], planner: str, fleet: str = ""
) -> list[ServiceSpec]:
    """All but the gateways, which are at `cluster` (host:port, by commas). `fleet`: where the workers are changed."""
    which = ("--model", model.path, "--model-name", model.name)
    specs = [
        *store_specs(options.store, options.state_dir, stores, variables("kvstore", options.settings)),
        _planner_spec(options, planner, fleet),
    ]
    counts = {"prefill": options.num_prefill, "decode": options.num_decode, "both": options.num_both}
    if options.console and find_spec("streamlit") is not None:
        specs.append(_console_spec(options, planner))
    if options.simulation is not None:
        told = variables("simulation", options.settings)
        simulated = simulation_specs(options.simulation, counts, cluster, which)
        return [*specs, *(replace(spec, environment={**spec.environment, **told}) for spec in simulated)]
    workers = wanted_workers(options)
    shares = _gpus([start for _, start in workers], options.device)
    num_of: Counter[Role] = Counter()
    for (role, start), (visible, share) in zip(workers, shares, strict=True):
        index = num_of[role]
        num_of[role] += 1
        specs.append(worker_spec(options, model, cluster, stores, role, index, start, visible, share))
    return specs


def wanted_workers(options: UpOptions) -> list[tuple[Role, WorkerStart]]:
    """Each real engine."""
    counts: dict[Role, int] = {"prefill": options.num_prefill, "decode": options.num_decode, "both": options.num_both}
    starts = options.worker_starts
    return [
        (role, starts[role][index] if starts.get(role) else WorkerStart())
        for role, count in counts.items()
        for index in range(count)
    ]


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
    """The `index`th of its role; `visible` lets it see its GPUs, `share` says what it has of them."""
    module = "services.decode" if role == "decode" else "services.prefill"
    common = ("--gateway", cluster)
    chosen = {"--device": options.device, "--dtype": options.dtype, **_pairs(share)}
    chosen |= _pairs(options.worker_arguments) | _pairs(start.arguments)
    which = ("--model", model.path, "--model-name", model.name)
    state = ("--state-dir", str(options.state_dir), "--kv-store", stores[index % len(stores)])
    told = variables(module.removeprefix("services."), options.settings)
    return WorkerSpec(
        f"{role}-{index}",
        ("-m", module, "--role", role, *common, *which, *state, *itertools.chain(*chosen.items())),
        {**told, **_openmp_waiting(options), "TOKENIZERS_PARALLELISM": "false", **visible},
        restarts=True,
        num_gateways=options.num_gateways,
        role=role,
        start=start,
    )


def traced(spec: Spec, options: UpOptions) -> Spec:
    """With what tells it where traces go."""
    if options.otlp_endpoint is None:
        return spec
    return replace(spec, environment={**spec.environment, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": options.otlp_endpoint})


def variables(service: str, settings: ServiceSettings) -> dict[str, str]:
    """The settings of a service as its environment says them: others may read arguments, and some are secrets."""
    return {f"HALFMOON_{service.upper()}_{name.upper()}": text for name, text in settings.get(service, {}).items()}


def _pairs(arguments: Sequence[str]) -> dict[str, str]:
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def _gpus(starts: Sequence[WorkerStart], device: str) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """Environment and arguments of each worker. GPUs are shared in turns, unless a worker needs several."""
    computing = iter(_gpu_shares([one.num_gpus for one in starts if not one.on_cpu], device))
    return [({}, ()) if one.on_cpu else next(computing) for one in starts]


def _gpu_shares(num_devices: list[int], device: str) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    gpus = visible_gpus() if device != "cpu" else ()
    if max(num_devices, default=1) > 1:
        return [(one, ()) for one in whole_gpus(gpus, num_devices)]
    shares = GPUShares(gpus, len(num_devices))
    return [(shares.environment(place), shares.arguments(place)) for place in range(len(num_devices))]


def _openmp_waiting(options: UpOptions) -> dict[str, str]:
    """How OpenMP threads wait between two operations: docs/log/up.md has the measurements.

    Alone on its cores a worker is a fifth faster when they spin for a moment; where several share cores, spinning
    takes them from each other.
    """
    if options.num_prefill + options.num_decode + options.num_both == 1:
        return {"GOMP_SPINCOUNT": "1000"}
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def _planner_spec(options: UpOptions, address: str, fleet: str) -> ServiceSpec:
    """At the same address whenever it is started again; its plans are in the gateway's ledger."""
    changes = ("--fleet", fleet) if fleet and options.simulation is None else ()
    arguments = ("-m", "services.planner", "--listen", address, "--state-dir", str(options.state_dir), *changes)
    token = {"HALFMOON_PLANNER_OPERATOR_TOKEN": options.operator_token} if options.operator_token else {}
    environment = token | _ledger(options, "PLANNER") | variables("planner", options.settings)
    return ServiceSpec("planner", arguments, environment, restarts=True)


def _ledger(options: UpOptions, service: str) -> dict[str, str]:
    """No argument: others may read those, and the URL may have a password."""
    return {f"HALFMOON_{service}_LEDGER_URL": options.ledger_url} if options.ledger_url else {}


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
