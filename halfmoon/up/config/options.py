"""Converts a configuration to the options of `halfmoon up`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfmoon.config.section import Section
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_policy import WHOLE
from halfmoon.policy.view.worker_view import ROLES, Role
from halfmoon.rpc.addresses.towards import bracketed
from halfmoon.sim.latency_sources.model_catalogue import known_shape
from halfmoon.up.config.system_config import SystemConfig, WorkerGroup
from halfmoon.up.fleet.from_plan import with_planned_workers
from halfmoon.up.specs.simulated import SimulatedWorkers
from halfmoon.up.specs.stores import StoreOptions
from halfmoon.up.supervision.log_files import LogLimits
from halfmoon.up.up_options import UpOptions, WorkerStart, engines

# fields of UpOptions
_OWN_OF_GATEWAY = frozenset(
    {"host", "port", "replicas", "slo", "admission", "placement", "http_tls_cert", "http_tls_key"}
)
_TIERS = ("dram_bytes", "disk_bytes", "cold_url", "dram_codec", "disk_codec", "cold_codec")
_OWN_OF_OBSERVABILITY = frozenset({"metrics_port", "otlp_endpoint", "log_bytes", "log_files"})
_OWN_OF_STORES = frozenset({"count", "disk_dir", *_TIERS})


def up_options(config: SystemConfig, profile: str | None = None) -> UpOptions:
    """Converts a configuration; `profile` is a file that replaces the configured one. Raises InvalidRequest."""
    everywhere = texts(config.workers.all)
    device, dtype = everywhere.pop("device", "auto"), everywhere.pop("dtype", "auto")
    if config.engine == "vllm":
        everywhere.setdefault("engine", "vllm")
    starts = {role: _starts(config, role) for role in ROLES}
    options = UpOptions(
        model=_model(config),
        model_name=config.model.name,
        num_prefill=len(starts["prefill"]),
        num_decode=len(starts["decode"]),
        num_both=len(starts["both"]),
        worker_starts=starts,
        worker_arguments=_arguments(everywhere),
        device=device,
        dtype=dtype,
        handover_codec=config.handover_codec,
        on=config.hosts.on,
        ray_address=config.hosts.ray_address,
        host_address=config.hosts.address and bracketed(config.hosts.address),
        other_gateways=config.hosts.gateways,
        cluster_port=config.hosts.port if config.hosts.address else 0,
        host=config.gateway.host.strip("[]"),
        port=config.gateway.port,
        num_gateways=config.gateway.replicas,
        drain_s=config.gateway.drain_s,
        http_tls_cert=_absolute(config.gateway.http_tls_cert),
        http_tls_key=_absolute(config.gateway.http_tls_key),
        admission=_if_set(config.gateway, "admission"),
        placement=_if_set(config.gateway, "placement"),
        slo=config.gateway.slo,
        state_dir=config.state_dir.absolute(),
        ledger_url=config.ledger_url,
        store=_stores(config),
        console=config.console.enabled,
        console_port=config.console.port,
        operator_token=config.security.operator_secret(),
        cluster_secret=config.security.cluster_secret,
        cluster_secret_file=config.security.cluster_secret_file,
        tls_dir=_tls_dir(config),
        api_keys=config.security.api_key,
        api_keys_file=config.security.api_keys_file and config.security.api_keys_file.absolute(),
        console_key=config.security.console_key(),
        otlp_endpoint=config.observability.otlp_endpoint,
        metrics_port=config.observability.metrics_port,
        log_limits=LogLimits(config.observability.log_bytes, config.observability.log_files),
        settings=service_settings(config),
        simulation=_simulation(config, profile) if config.engine == "sim" else None,
    )
    if config.cluster is not None:
        options = with_planned_workers(options, config.cluster)
    policies = [written.kv_policy for written in config.classes.values() if written.kv_policy not in (None, WHOLE)]
    if policies and engines(options) == {"vllm"}:
        raise InvalidRequest(
            f"kv_policy {policies[0]}: vLLM keeps all KV, and its workers would refuse the requests of that class: "
            "leave it out of the class, or plan without --kv-policy",
            param="kv_policy",
        )
    if config.model.lora and (others := engines(options) - {"vllm"}):
        raise InvalidRequest(
            f"--lora: only vLLM computes adapters, and {', '.join(sorted(others))} computes in some worker: start all "
            "with --engine vllm",
            param="lora",
        )
    if config.model.quantization in ("int8", "int4") and (others := engines(options) - {"halfmoon"}):
        raise InvalidRequest(
            f"--quantization {config.model.quantization}: only our own engine rounds weights, and "
            f"{', '.join(sorted(others))} computes in some worker: leave it out, or give vLLM its own by --engine-args",
            param="quantization",
        )
    return options


def texts(section: Section, leave_out: frozenset[str] = frozenset()) -> dict[str, str]:
    """Returns the set fields of a section as texts for environment variables and command lines."""
    written = section.model_dump(mode="json", exclude_unset=True, exclude=set(leave_out))
    return {name: _text(value) for name, value in written.items() if value is not None}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def _arguments(settings: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(part for name, text in settings.items() for part in (f"--{name.replace('_', '-')}", text))


def _starts(config: SystemConfig, role: Role) -> list[WorkerStart]:
    """Returns the start of each worker of a role."""
    if config.cluster is not None:
        return [WorkerStart()]  # replaced by the plan's
    return [_start(config, group) for group in config.workers.groups(role) for _ in range(group.count)]


def _start(config: SystemConfig, group: WorkerGroup) -> WorkerStart:
    chosen = config.workers.all.model_dump(exclude_unset=True) | group.model_dump(exclude_unset=True)
    num_ranks = math.prod(chosen.get(f"{kind}_parallel", 1) for kind in ("tensor", "pipeline", "sequence"))
    num_gpus = max(num_ranks - chosen.get("remote_ranks", 0), 1)
    return WorkerStart(_arguments(texts(group, frozenset({"count"}))), num_gpus, chosen.get("device") == "cpu")


def _model(config: SystemConfig) -> str:
    """Returns the model to prepare: the demo model for a simulated plan of a catalogue name, which has no tokenizer."""
    path = config.model.path
    is_name_of_plan = config.engine == "sim" and config.cluster is not None and known_shape(path) is not None
    return "demo" if is_name_of_plan else path


def _stores(config: SystemConfig) -> StoreOptions:
    stores = config.stores
    return StoreOptions(
        str(stores.dram_bytes),
        _absolute(stores.disk_dir),
        str(stores.disk_bytes),
        stores.cold_url,
        stores.dram_codec,
        stores.disk_codec,
        stores.cold_codec,
        stores.count if "count" in stores.model_fields_set else None,
    )


def service_settings(config: SystemConfig) -> dict[str, dict[str, str]]:
    """Returns the settings that UpOptions has no field for, by service and setting."""
    everywhere = texts(config.observability, _OWN_OF_OBSERVABILITY)
    classes = {name: written.model_dump(mode="json", exclude_unset=True) for name, written in config.classes.items()}
    tenants = {name: written.model_dump(mode="json", exclude_unset=True) for name, written in config.tenants.items()}
    aliases = {"model_alias": json.dumps(config.model.alias)} if config.model.alias else {}
    model = {"lora": json.dumps(config.model.lora)} if config.model.lora else {}
    if "quantization" in config.model.model_fields_set:
        model["quantization"] = config.model.quantization
    return {
        "gateway": everywhere
        | aliases
        | model
        | texts(config.gateway, _OWN_OF_GATEWAY)
        | ({"classes": json.dumps(classes)} if classes else {})
        | ({"tenants": json.dumps(tenants)} if tenants else {}),
        "kvstore": everywhere | texts(config.stores, _OWN_OF_STORES),
        "planner": everywhere | texts(config.planner),
        "prefill": everywhere | model,
        "decode": everywhere | model,
        "simulation": everywhere,
    }


def _simulation(config: SystemConfig, profile: str | None) -> SimulatedWorkers:
    simulated = config.simulation
    return SimulatedWorkers(
        profile or simulated.profile,
        simulated.time_scale,
        simulated.text,
        simulated.length,
        simulated.median_tokens,
        simulated.processes,
    )


def _tls_dir(config: SystemConfig) -> Path | None:
    security = config.security
    if security.tls_cert or security.tls_key or security.tls_ca:
        raise InvalidRequest(
            "tls_cert, tls_key and tls_ca are for services that are started one by one: `halfmoon up` issues "
            "certificates itself: give it tls_dir, a directory of `halfmoon certs init`",
            param="tls_cert",
        )
    return _absolute(security.tls_dir)


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _if_set(section: Section, name: str) -> Any:
    return getattr(section, name) if name in section.model_fields_set else None
