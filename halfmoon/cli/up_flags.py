"""The flags of `halfmoon up`: each is one field of the configuration, grouped in the order that people need them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
import yaml
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from halfmoon.config.worker import RoleName
from halfmoon.errors import InvalidRequest
from halfmoon.up.config.human_bytes import human_bytes
from halfmoon.up.config.read import Override, read_config
from halfmoon.up.config.tree import SystemConfig

ROLES: tuple[RoleName, ...] = ("prefill", "decode", "both")


@dataclass(frozen=True, slots=True)
class Flag:
    """`name` on the command line says `path` of the configuration."""

    name: str
    path: str
    variable: str | None = None  # of the environment

    @property
    def parameter(self) -> str:
        """Its name in Python."""
        return self.name.split("/")[0].lstrip("-").replace("-", "_")

    @property
    def field(self) -> FieldInfo:
        """Of the configuration, which has type, default and description."""
        section: Any = SystemConfig
        *parents, last = self.path.split(".")
        for part in parents:
            section = section.model_fields[part].annotation
        found: FieldInfo = section.model_fields[last]
        return found


PANELS: Mapping[str, Sequence[Flag]] = {
    "Model": (Flag("--model", "model.path"), Flag("--model-name", "model.name")),
    "Workers": (
        Flag("--device", "workers.all.device"),
        Flag("--dtype", "workers.all.dtype"),
        Flag("--tensor-parallel", "workers.all.tensor_parallel"),
        Flag("--pipeline-parallel", "workers.all.pipeline_parallel"),
        Flag("--kv-memory", "workers.all.kv_memory"),
        Flag("--max-running", "workers.all.max_running"),
        Flag("--block-tokens", "workers.all.block_tokens"),
        Flag("--offload-kv", "workers.all.offload_kv"),
        Flag("--kv-transports", "workers.all.kv_transports"),
        Flag("--handover-codec", "handover_codec"),
    ),
    "Gateway": (
        Flag("--host", "gateway.host"),
        Flag("--port", "gateway.port"),
        Flag("--gateways", "gateway.replicas"),
        Flag("--slo", "gateway.slo"),
        Flag("--placement", "gateway.placement"),
        Flag("--balancing-threshold", "gateway.balancing_threshold"),
        Flag("--admission", "gateway.admission"),
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
        Flag("--api-key", "security.api_key"),
        Flag("--operator-token", "security.operator_token", "HALFMOON_OPERATOR_TOKEN"),
    ),
    "Observability": (
        Flag("--metrics-port", "observability.metrics_port"),
        Flag("--otlp-endpoint", "observability.otlp_endpoint"),
        Flag("--log-level", "observability.log_level"),
    ),
    "State": (Flag("--state-dir", "state_dir"), Flag("--ledger-url", "ledger_url", "HALFMOON_LEDGER_URL")),
    "Simulated workers": (
        Flag("--engine", "engine"),
        Flag("--sim-profile", "simulation.profile"),
        Flag("--sim-time-scale", "simulation.time_scale"),
        Flag("--sim-text", "simulation.text"),
        Flag("--sim-processes", "simulation.processes"),
    ),
}

_FILE_PANEL, _WORKERS_PANEL, _OTHER_PANEL = "Configuration file", "Workers", "Everything else"
_COUNT_HELP = {
    "prefill": "Workers that compute prompts; default: 1, or 0 where --both is given.",
    "decode": "Workers that generate answers; default: 1, or 0 where --both is given.",
    "both": "Workers that do both on one engine; default: 0.",
}


def with_up_flags(command: Callable[[SystemConfig], None]) -> Callable[..., None]:
    """A command of typer that takes all flags of `halfmoon up`, and gets the configuration that follows from them."""

    def run(**given: Any) -> None:
        try:
            config = config_of(given)
        except InvalidRequest as error:
            raise typer.BadParameter(error.message) from error
        command(config)

    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    run.__name__, run.__doc__ = command.__name__, "\n\n".join(one.replace("\n", " ") for one in paragraphs)
    run.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
    return run


def config_of(given: Mapping[str, Any]) -> SystemConfig:
    """`given` are the flags by parameter; None and nothing were not given. Raises InvalidRequest."""
    files = [path for path in (given.get("config"), given.get("plan")) if path is not None]
    if len(files) > 1:
        raise InvalidRequest("--plan is another name of --config: give one of them", param="config")
    config = read_config(files[0] if files else None, list(_overrides(given)))
    counts: dict[str, int] = {role: given[role] for role in ROLES if given.get(role) is not None}
    return _counted(config, counts, files[0] if files else None, list(_overrides(given))) if counts else config


def _overrides(given: Mapping[str, Any]) -> Iterator[Override]:
    for text in given.get("set") or ():
        path, sign, value = text.partition("=")
        if not (path and sign):
            raise InvalidRequest(f"--set {text}: write PATH=VALUE, such as gateway.request_deadline_s=60", param="set")
        yield Override(path, yaml.safe_load(value), f"--set {path}")
    for flag in (flag for flags in PANELS.values() for flag in flags):
        value = given.get(flag.parameter)
        if value is not None and value != []:
            yield Override(flag.path, value, flag.name)


def _counted(
    config: SystemConfig, counts: Mapping[str, int], path: Path | None, overrides: list[Override]
) -> SystemConfig:
    """With so many workers: of the group that the file has of a role, or of a new one."""
    for role, count in counts.items():
        groups = getattr(config.workers, role)
        if len(groups) > 1:
            raise InvalidRequest(
                f"--{role}: {path} has {len(groups)} groups of {role} workers: change their counts there", param=role
            )
        written = groups[0].model_dump(exclude_unset=True) if groups else {}
        overrides.append(Override(f"workers.{role}", [{**written, "count": count}], f"--{role}"))
    return read_config(path, overrides)


def _parameters() -> Iterator[inspect.Parameter]:
    yield _parameter("config", Path, None, typer.Option("--config", help=_CONFIG_HELP, rich_help_panel=_FILE_PANEL))
    yield _parameter(
        "plan",
        Path,
        None,
        typer.Option("--plan", help="The same, for a file that `halfmoon plan` wrote.", rich_help_panel=_FILE_PANEL),
    )
    for panel, flags in PANELS.items():
        if panel == _WORKERS_PANEL:
            for role in ROLES:
                option = typer.Option(f"--{role}", min=0, help=_COUNT_HELP[role], rich_help_panel=panel)
                yield _parameter(role, int, None, option)
        for flag in flags:
            yield _flag_parameter(flag, panel)
    option = typer.Option("--set", help=_SET_HELP, rich_help_panel=_OTHER_PANEL, metavar="PATH=VALUE")
    yield _parameter("set", list[str], None, option)


_CONFIG_HELP = "A file that says everything, such as halfmoon.yaml; flags win over it. `halfmoon config` shows more."
_SET_HELP = "Sets any field of the configuration, such as gateway.request_deadline_s=60; repeat it for more."


def _flag_parameter(flag: Flag, panel: str) -> inspect.Parameter:
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
    return _parameter(flag.parameter, kind, None, option)


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def sentence(description: str) -> str:
    """A description as a sentence. Names keep their case: http://, kvcache-centric, 'demo'."""
    first = description.partition(" ")[0].rstrip(",;")
    begin = description[:1].upper() if first.isalpha() else description[:1]
    return begin + description[1:] + ("" if description.endswith(".") else ".")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value in (None, ()):
        return ""
    if isinstance(value, bool):
        return f" Default: {'yes' if value else 'no'}."
    return f" Default: {human_bytes(value) if isinstance(value, ByteSize) else value}."


def _kind(field: FieldInfo) -> Any:
    """What typer reads it as; all else is a text that the configuration reads."""
    annotation = field.annotation
    inner = [one for one in get_args(annotation) if one is not type(None)]
    if get_origin(annotation) is Literal or annotation in (bool, int, float, Path):
        return annotation
    if get_origin(annotation) is tuple:
        return list[str]
    return inner[0] if inner and inner[0] in (int, float, Path) else str
