"""What docker-compose.yml and the Dockerfile say of the services, and the settings and role of each."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from services.decode.settings import DecodeSettings
from services.gateway.settings import GatewaySettings
from services.kvstore.settings import KVStoreSettings
from services.planner.settings import PlannerSettings
from services.prefill.settings import PrefillSettings

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "kvstore": KVStoreSettings,
    "planner": PlannerSettings,
}
ROLES = {
    "gateway": "gateway",
    "prefill": "worker",
    "decode": "worker",
    "kvstore": "store",
    "planner": "planner",
    "console": "operator",
}

Document = dict[str, Any]


def compose() -> dict[str, Document]:
    """Our own services in docker-compose.yml, without those of the profile `gpu`."""
    return {name: service for name, service in _services().items() if "build" in service and name not in compose_gpu()}


def compose_gpu() -> dict[str, Document]:
    """The services of the profile `gpu`."""
    return {name: service for name, service in _services().items() if service.get("profiles") == ["gpu"]}


def compose_others() -> dict[str, Document]:
    """The other services in docker-compose.yml: database and monitoring."""
    return {name: service for name, service in _services().items() if "build" not in service}


@cache
def _services() -> dict[str, Document]:
    services: dict[str, Document] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return services


def options(container: Document) -> dict[str, str]:
    """The options that a service of Compose or a container of Kubernetes starts with."""
    arguments = container.get("command") or container.get("args") or ()
    return dict(argument.removeprefix("--").split("=", 1) for argument in arguments)


def dockerfile(service: str | None = None) -> str:
    """The whole Dockerfile, or one service's target."""
    text = (ROOT / "Dockerfile").read_text()
    if service is None:
        return text
    (stage,) = re.findall(rf"^FROM (?:service|models) AS {service}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    return str(stage)
