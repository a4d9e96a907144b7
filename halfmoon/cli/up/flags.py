"""The flags of `halfmoon up`: each sets one field of the configuration. Panels are in the order people need them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from halfmoon.up.config.human_bytes import human_bytes
from halfmoon.up.config.system_config import SystemConfig


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, such as `--port`, that sets the field at `path`, such as gateway.port."""

    name: str
    path: str
    variable: str | None = None  # environment variable

    @property
    def parameter(self) -> str:
        """Returns the flag's name as a Python parameter."""
        return self.name.split("/")[0].lstrip("-").replace("-", "_")

    @property
    def field(self) -> FieldInfo:
        """Returns the configuration's field, which has type, default and description."""
        section: Any = SystemConfig
        *parents, last = self.path.split(".")
        for part in parents:
            section = section.model_fields[part].annotation
        field: FieldInfo = section.model_fields[last]
        return field


PANELS: Mapping[str, Sequence[Flag]] = {
    "Model": (
        Flag("--model", "model.path"),
        Flag("--model-name", "model.name"),
        Flag("--quantization", "model.quantization"),
        Flag("--lora", "model.lora"),
    ),
    "Workers": (
        Flag("--engine", "engine"),
        Flag("--engine-python", "workers.all.engine_python"),
        Flag("--engine-args", "workers.all.engine_args"),
        Flag("--device", "workers.all.device"),
        Flag("--dtype", "workers.all.dtype"),
        Flag("--kv-dtype", "workers.all.kv_dtype"),
        Flag("--tensor-parallel", "workers.all.tensor_parallel"),
        Flag("--pipeline-parallel", "workers.all.pipeline_parallel"),
        Flag("--sequence-parallel", "workers.all.sequence_parallel"),
        Flag("--kv-memory", "workers.all.kv_memory"),
        Flag("--speculation", "workers.all.speculation"),
        Flag("--max-running", "workers.all.max_running"),
        Flag("--block-tokens", "workers.all.block_tokens"),
        Flag("--offload-kv", "workers.all.offload_kv"),
        Flag("--offload-recompute", "workers.all.offload_recompute"),
        Flag("--offload-weights", "workers.all.offload_weights"),
        Flag("--kv-transports", "workers.all.kv_transports"),
        Flag("--handover-codec", "handover_codec"),
    ),
    "Hosts": (
        Flag("--on", "hosts.on"),
        Flag("--ray-address", "hosts.ray_address"),
        Flag("--host-address", "hosts.address"),
        Flag("--cluster-port", "hosts.port"),
    ),
    "Gateway": (
        Flag("--host", "gateway.host"),
        Flag("--port", "gateway.port"),
        Flag("--http-tls-cert", "gateway.http_tls_cert"),
        Flag("--http-tls-key", "gateway.http_tls_key"),
        Flag("--gateways", "gateway.replicas"),
        Flag("--slo", "gateway.slo"),
        Flag("--placement", "gateway.placement"),
        Flag("--balancing-threshold", "gateway.balancing_threshold"),
        Flag("--conditional-disaggregation", "gateway.conditional_disaggregation"),
        Flag("--max-prefill-degree", "gateway.max_prefill_degree"),
        Flag("--admission", "gateway.admission"),
        Flag("--drain-s", "gateway.drain_s"),
        Flag("--peer", "gateway.peer"),
        Flag("--peer-key", "gateway.peer_key", "HALFMOON_PEER_KEYS"),
    ),
    "KV store": (
        Flag("--stores", "stores.count"),
        Flag("--dram-bytes", "stores.dram_bytes"),
        Flag("--disk-dir", "stores.disk_dir"),
        Flag("--disk-bytes", "stores.disk_bytes"),
        Flag("--cold-url", "stores.cold_url"),
        Flag("--dram-codec", "stores.dram_codec"),
        Flag("--disk-codec", "stores.disk_codec"),
        Flag("--cold-codec", "stores.cold_codec"),
        Flag("--ttl-s", "stores.ttl_s"),
    ),
    "Console": (Flag("--console/--no-console", "console.enabled"), Flag("--console-port", "console.port")),
    "Security": (
        Flag("--api-key", "security.api_key", "HALFMOON_API_KEYS"),
        Flag("--api-keys-file", "security.api_keys_file", "HALFMOON_API_KEYS_FILE"),
        Flag("--operator-token", "security.operator_token", "HALFMOON_OPERATOR_TOKEN"),
        Flag("--operator-token-file", "security.operator_token_file", "HALFMOON_OPERATOR_TOKEN_FILE"),
        Flag("--tls-dir", "security.tls_dir"),
        Flag("--cluster-secret-file", "security.cluster_secret_file", "HALFMOON_CLUSTER_SECRET_FILE"),
    ),
    "Observability": (
        Flag("--metrics-port", "observability.metrics_port"),
        Flag("--otlp-endpoint", "observability.otlp_endpoint"),
        Flag("--log-level", "observability.log_level"),
        Flag("--log-bytes", "observability.log_bytes"),
        Flag("--log-files", "observability.log_files"),
    ),
    "State": (Flag("--state-dir", "state_dir"), Flag("--ledger-url", "ledger_url", "HALFMOON_LEDGER_URL")),
    "Simulated workers": (
        Flag("--sim-profile", "simulation.profile"),
        Flag("--sim-time-scale", "simulation.time_scale"),
        Flag("--sim-text", "simulation.text"),
        Flag("--sim-processes", "simulation.processes"),
    ),
}


def flag_parameter(flag: Flag, panel: str) -> inspect.Parameter:
    """Builds typer's option for a flag, with type, bounds, help and default of the field."""
    field = flag.field
    bounds = {name: getattr(bound, sign) for bound in field.metadata for name, sign in (("min", "ge"), ("max", "le"))
              if hasattr(bound, sign)}  # fmt: skip
    kind = _kind(field)
    option = typer.Option(
        flag.name,
        help=sentence(field.description or "") + _default(field),
        rich_help_panel=panel,
        envvar=flag.variable,
        show_default=False,
        **(bounds if kind in (int, float) else {}),
    )
    return parameter(flag.parameter, kind, option)


def parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """Builds a parameter of a typer command; it is None if it is not given."""
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def sentence(description: str) -> str:
    """Turns a description into a sentence. A name that begins it keeps its case: http://, kvcache-centric, 'demo'."""
    first = description.partition(" ")[0].rstrip(",;")
    begin = description[:1].upper() if first.isalpha() else description[:1]
    return begin + description[1:] + ("" if description.endswith(".") else ".")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value in (None, (), ""):
        return ""
    if isinstance(value, bool):
        return f" Default: {'yes' if value else 'no'}."
    return f" Default: {human_bytes(value) if isinstance(value, ByteSize) else value}."


def _kind(field: FieldInfo) -> Any:
    """Returns the type that typer parses. The configuration parses other types, and numbers that may be null."""
    annotation = field.annotation
    inner = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is Literal or annotation in (bool, int, float, Path):
        return annotation
    if get_origin(annotation) is tuple:
        return list[str]
    return Path if inner and inner[0] is Path else str
