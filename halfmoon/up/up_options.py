"""The options of `halfmoon up`, and the workers that they ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from halfmoon.config.hosts import HostsName
from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.telemetry.tracing import check_endpoint
from halfmoon.up.specs.simulated import SimulatedWorkers
from halfmoon.up.specs.stores import StoreOptions
from halfmoon.up.supervision.log_files import LogLimits

ServiceSettings: TypeAlias = Mapping[str, Mapping[str, str]]


class WorkerStart(NamedTuple):
    """One worker's own arguments, in addition to those of all workers."""

    arguments: tuple[str, ...] = ()
    num_gpus: int = 1
    on_cpu: bool = False  # even if other workers have GPUs
    unit: str = ""  # of workers that a plan puts on one host of several
    gpu: str = ""  # the kind that a plan names


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
    on: HostsName = "this-host"
    ray_address: str = "auto"
    host_address: str | None = None  # of this host, for services of others; None: loopback, or Ray's
    cluster_port: int = 0  # of the first gateway, with a host_address; 0: free ports
    other_gateways: tuple[str, ...] = ()  # HOST:PORT of those on other hosts, which the workers join, too
    joins: str | None = None  # gateways of another host that the workers join (HOST:PORT, separated by commas)
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
        if os.path.exists(self.state_dir) and not os.path.isdir(self.state_dir):
            raise InvalidRequest(f"--state-dir {self.state_dir} is not a directory")
        if min(self.num_prefill, self.num_decode, self.num_both) < 0:
            raise InvalidRequest("numbers of workers cannot be negative")
        if (self.http_tls_cert is None) != (self.http_tls_key is None):
            raise InvalidRequest("TLS of HTTP needs both a certificate and its key: --http-tls-cert and --http-tls-key")
        if self.num_gateways < 1:
            raise InvalidRequest("at least one gateway is needed")
        check_endpoint(self.otlp_endpoint)
        if self.other_gateways and (self.host_address is None or self.ledger_url is None):
            raise InvalidRequest(
                "gateways on several hosts reach each other's workers and share a ledger: give --host-address and "
                "--ledger-url postgresql://USER:PASSWORD@HOST/DATABASE",
                param="gateways",
            )
        is_whole = self.num_both or (self.num_prefill and self.num_decode)
        if not is_whole and self.joins is None and self.host_address is None:  # nobody can bring what is missing
            raise InvalidRequest(
                "nothing could be served: start at least one --prefill and one --decode, or one --both, or give "
                "--host-address for workers of other hosts"
            )
        if self.simulation is not None:
            self.simulation.check_limits(arguments for _, arguments in simulated_workers(self))


def wanted_workers(options: UpOptions) -> list[tuple[Role, WorkerStart]]:
    """Returns role and start of each worker with a real engine."""
    counts: dict[Role, int] = {"prefill": options.num_prefill, "decode": options.num_decode, "both": options.num_both}
    starts = options.worker_starts
    return [
        (role, starts[role][index] if starts.get(role) else WorkerStart())
        for role, count in counts.items()
        for index in range(count)
    ]


def engines(options: UpOptions) -> set[str]:
    """Returns what computes in the workers: halfmoon, vllm or sim."""
    if options.simulation is not None:
        return {"sim"}
    everywhere = {"--engine": "halfmoon"} | option_values(options.worker_arguments)
    return {(everywhere | option_values(start.arguments))["--engine"] for _, start in wanted_workers(options)}


def simulated_workers(options: UpOptions) -> list[tuple[Role, Mapping[str, str]]]:
    """Returns role and options of each simulated worker, also those options that it cannot take."""
    everywhere = {"--device": options.device, "--dtype": options.dtype, **option_values(options.worker_arguments)}
    return [(role, everywhere | option_values(start.arguments)) for role, start in wanted_workers(options)]


def option_values(arguments: Sequence[str]) -> dict[str, str]:
    """Returns the value of each option, from names and values in turns."""
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model directory that all services of a host can read."""

    path: str
    name: str  # as served


def variables(service: str, settings: ServiceSettings) -> dict[str, str]:
    """Converts settings to environment variables: arguments are visible to other users, and some are secrets."""
    return {f"HALFMOON_{service.upper()}_{name.upper()}": text for name, text in settings.get(service, {}).items()}
