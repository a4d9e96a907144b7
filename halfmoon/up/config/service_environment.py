"""The part of a configuration that one service takes, as its environment: a container is one service."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from halfmoon.config.worker import RoleName
from halfmoon.errors import InvalidRequest
from halfmoon.up.config.options import service_settings, texts
from halfmoon.up.config.system_config import SystemConfig
from halfmoon.up.service_specs import variables

_PLACES = frozenset({"host", "port", "replicas"})  # of the container, not of the file
_CONSOLE = "HALFMOON_CONSOLE_"


def service_environment(
    config: SystemConfig, service: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """What to add to `environment`, whose variables go before the file, and are not set where they are empty.

    Raises InvalidRequest for workers that a container by itself cannot be.
    """
    prefix = f"HALFMOON_{service.upper()}_"
    told = (
        _console(config)
        if service == "console"
        else variables(service, {service: _settings(config, service, arguments)})
    )
    if service == "gateway" and not environment.get(f"{prefix}MODEL_ALIAS"):
        model = environment.get(f"{prefix}MODEL") or config.model.path
        told[f"{prefix}MODEL_ALIAS"] = json.dumps([model, *config.model.alias])
    return {name: text for name, text in told.items() if not environment.get(name)}


def _settings(config: SystemConfig, service: str, arguments: Sequence[str]) -> dict[str, str]:
    model = {"model": config.model.path} | texts(config.model, frozenset({"path", "alias"}))
    token = texts(config.security, frozenset({"api_key"}))
    ledger = {} if config.ledger_url is None else {"ledger_url": config.ledger_url}
    told = service_settings(config)[service] | texts(config.observability, frozenset({"metrics_port"}))
    if service == "gateway":
        keys = texts(config.security)
        return told | texts(config.gateway, _PLACES) | model | keys | ledger | {"handover_codec": config.handover_codec}
    if service == "kvstore":
        return told | texts(config.stores, frozenset({"count", "disk_dir"}))
    if service == "planner":
        return told | token | ledger
    return told | model | texts(config.workers.all) | _group(config, _role(service, arguments))


def _role(service: str, arguments: Sequence[str]) -> RoleName:
    """A container's arguments may make a worker of another role of it."""
    roles: tuple[RoleName, ...] = ("prefill", "decode", "both")
    own: RoleName = "decode" if service == "decode" else "prefill"
    return next((role for role in roles if f"--role={role}" in arguments), own)


def _group(config: SystemConfig, role: RoleName) -> dict[str, str]:
    if config.cluster is not None:
        return {}  # the arguments have it
    groups = config.workers.groups(role)
    if len(groups) != 1:
        found = f"has {len(groups)} groups of {role} workers" if groups else f"names no {role} workers"
        raise InvalidRequest(
            f"the configuration {found}, and this container is one of one group: give the role one group, or make "
            "containers of a plan with `halfmoon plan --compose`"
        )
    return texts(groups[0], frozenset({"count"}))


def _console(config: SystemConfig) -> dict[str, str]:
    security = config.security
    told = {f"{_CONSOLE}OPERATOR_TOKEN": security.operator_token or ""}
    return told | {f"{_CONSOLE}API_KEY": key for key in security.api_key[:1]}
