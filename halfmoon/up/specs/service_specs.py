"""Builds the arguments and environment of every process that `halfmoon up` starts. Starts nothing itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, TypeVar

from halfmoon.rpc.addresses.towards import bracketed, reachable
from halfmoon.rpc.credentials.credential import credential_from
from halfmoon.rpc.credentials.sources import environment_of
from halfmoon.up.hosts import Hosts, ThisHost
from halfmoon.up.specs.simulated import simulation_specs
from halfmoon.up.specs.stores import list_item, store_specs
from halfmoon.up.specs.worker_specs import worker_specs
from halfmoon.up.state.certificates import RoleCertificates
from halfmoon.up.supervision.child import Room, ServiceSpec
from halfmoon.up.up_options import (
    PreparedModel,
    UpOptions,
    simulated_workers,
    variables,
)

Spec = TypeVar("Spec", bound=ServiceSpec)


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
    num_gateways = options.num_gateways + len(options.other_gateways)
    if num_gateways > 1:
        listen = (*listen, "--num-gateways", str(num_gateways))
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
    kv_stores = tuple(part for store in stores for part in ("--kv-store", list_item(store)))
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
    options: UpOptions,
    model: PreparedModel,
    cluster: str,
    stores: Sequence[str],
    planner: str,
    fleet: str = "",
    hosts: Hosts | None = None,
    rooms: Mapping[str, Room | None] = MappingProxyType({}),
) -> list[ServiceSpec]:
    """Returns the specs of all services but the gateways.

    The gateways are at `cluster` (host:port, separated by commas), and halfmoon.Fleet is at `fleet`. `rooms` has the
    stores' rooms on their hosts, by name; `hosts` says what workers reserve.
    """
    hosts = hosts or ThisHost(None)
    served = ("--model", model.path, "--model-name", model.name)
    specs = [
        *(replace(spec, room=rooms.get(spec.name)) for spec in _stores(options, stores)),
        _planner_spec(options, planner, fleet),
    ]
    if options.console and find_spec("streamlit") is not None:
        specs.append(_console_spec(options, planner))
    if options.simulation is not None:
        settings = variables("simulation", options.settings)
        simulated = simulation_specs(options.simulation, simulated_workers(options), cluster, served, stores)
        return [*specs, *(replace(spec, environment={**spec.environment, **settings}) for spec in simulated)]
    return [*specs, *worker_specs(options, model, cluster, stores, hosts)]


def _stores(options: UpOptions, addresses: Sequence[str]) -> list[ServiceSpec]:
    return store_specs(options.store, options.state_dir, addresses, variables("kvstore", options.settings))


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


def _planner_spec(options: UpOptions, address: str, fleet: str) -> ServiceSpec:
    """Returns the planner's spec. It keeps its address after a restart, and its plans in the gateway's ledger."""
    changes = ("--fleet", fleet) if fleet and options.simulation is None else ()
    gateway: tuple[str, ...] = ("--gateway", http_url(options, options.port))
    if options.http_tls_cert is not None:
        gateway += ("--gateway-ca", str(options.http_tls_cert))
    state = ("--state-dir", str(options.state_dir))
    arguments = ("-m", "services.planner", "--listen", address, *state, *gateway, *changes)
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


def http_url(options: UpOptions, port: int) -> str:
    """Returns the URL of gateway or console on this host."""
    return f"{'http' if options.http_tls_cert is None else 'https'}://{bracketed(reachable(options.host))}:{port}"
