"""Converts the part of a configuration that one service needs to environment variables, for containers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from halfmoon.errors import InvalidRequest
from halfmoon.policy.view.worker_view import ROLES, Role
from halfmoon.up.config.options import service_settings, texts
from halfmoon.up.config.system_config import SystemConfig
from halfmoon.up.up_options import variables

_PLACES = frozenset({"host", "port", "replicas"})  # the container sets them, not the file
_CONSOLE = "HALFMOON_CONSOLE_"
# Variables without a service's name: all services have them. The container's own replace all of a group.
_SECRET = ("cluster_secret", "cluster_secret_file")
_TLS = ("tls_cert", "tls_key", "tls_ca")
_OF_UP = ("tls_dir",)


def service_environment(
    config: SystemConfig, service: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables to add to `environment`. Its own non-empty variables win over the file.

    Raises InvalidRequest for groups of workers that one container cannot run.
    """
    prefix = f"HALFMOON_{service.upper()}_"
    added = (
        _console(config)
        if service == "console"
        else variables(service, {service: _settings(config, service, arguments)})
    )
    if service == "gateway" and not environment.get(f"{prefix}MODEL_ALIAS"):
        model = environment.get(f"{prefix}MODEL") or config.model.path
        added[f"{prefix}MODEL_ALIAS"] = json.dumps([model, *config.model.alias])
    return {name: text for name, text in added.items() if not environment.get(name)} | _common(config, environment)


def _settings(config: SystemConfig, service: str, arguments: Sequence[str]) -> dict[str, str]:
    model = {"model": config.model.path} | texts(config.model, frozenset({"path", "alias"}))
    token = {"operator_token": config.security.operator_secret() or ""}
    ledger = {} if config.ledger_url is None else {"ledger_url": config.ledger_url}
    common = service_settings(config)[service] | texts(
        config.observability, frozenset({"metrics_port", "log_bytes", "log_files"})
    )
    if service == "gateway":
        keys = texts(config.security, frozenset({*_SECRET, *_TLS, *_OF_UP}))
        return (
            common | texts(config.gateway, _PLACES) | model | keys | ledger | {"handover_codec": config.handover_codec}
        )
    if service == "kvstore":
        return common | texts(config.stores, frozenset({"count", "disk_dir"}))
    if service == "planner":
        return common | token | ledger
    return common | model | texts(config.workers.all) | _group(config, _role(service, arguments))


def _role(service: str, arguments: Sequence[str]) -> Role:
    """Returns the worker's role, which the container's arguments may override."""
    own: Role = "decode" if service == "decode" else "prefill"
    return next((role for role in ROLES if f"--role={role}" in arguments), own)


def _group(config: SystemConfig, role: Role) -> dict[str, str]:
    if config.cluster is not None:
        return {}  # the container's arguments have it
    groups = config.workers.groups(role)
    if len(groups) != 1:
        found = f"has {len(groups)} groups of {role} workers" if groups else f"names no {role} workers"
        raise InvalidRequest(
            f"the configuration {found}, and a container runs one group: give the role one group, or make "
            "containers of a plan with `halfmoon plan --compose`"
        )
    return texts(groups[0], frozenset({"count"}))


def _console(config: SystemConfig) -> dict[str, str]:
    security = config.security
    secrets = {"OPERATOR_TOKEN": security.operator_secret() or "", "API_KEY": security.console_key() or ""}
    return {_CONSOLE + name: secret for name, secret in secrets.items()}


def _common(config: SystemConfig, environment: Mapping[str, str]) -> dict[str, str]:
    written = texts(config.security)
    added: dict[str, str] = {}
    for group in (_SECRET, _TLS):
        variables = {f"HALFMOON_{name.upper()}": name for name in group}
        if not any(environment.get(variable) for variable in variables):
            added |= {variable: written[name] for variable, name in variables.items() if name in written}
    return added
