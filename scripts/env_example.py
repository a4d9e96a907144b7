"""Writes deploy/env.example: every variable of docker-compose.yml, with its default and what it does.

    python -m scripts.env_example

A variable that becomes a service's setting is described by that setting's class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from services.decode.settings import DecodeSettings
from services.gateway.settings import GatewaySettings
from services.kvstore.settings import KVStoreSettings
from services.planner.settings import PlannerSettings
from services.prefill.settings import PrefillSettings

ROOT = Path(__file__).parents[1]
SETTINGS: dict[str, Any] = {
    "GATEWAY": GatewaySettings,
    "PREFILL": PrefillSettings,
    "DECODE": DecodeSettings,
    "KVSTORE": KVStoreSettings,
    "PLANNER": PlannerSettings,
}
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")
_WIDTH = 110
_OWN = {  # variables that are no service's setting
    "HALFMOON_CONFIG": "configuration file of all services; see docs/reference/settings.md",
    "HALFMOON_HTTP_PORT": "port of the API on this host's loopback",
    "HALFMOON_CONSOLE_PORT": "port of the console, with `--profile console`",
    "HALFMOON_GRAFANA_PORT": "port of Grafana, with `--profile monitoring`",
    "HALFMOON_GRAFANA_PASSWORD": "password of Grafana's user `admin`",
    "HALFMOON_LEDGER_PASSWORD": "password of the ledger's database, to which no port of this host leads; it counts "
    "when the database is made",
    "HALFMOON_POSTGRES_IMAGE": "image of the ledger's database",
    "HALFMOON_PROMETHEUS_IMAGE": "image of Prometheus",
    "HALFMOON_GRAFANA_IMAGE": "image of Grafana",
    "HALFMOON_CPU_WORKERS": "workers of each role without a GPU; 0 beside `--profile gpu`",
    "HALFMOON_CUDA_BACKEND": "build of PyTorch in the images of `--profile gpu`: cu128, or another release of CUDA",
    "TORCH_BACKEND": "build of PyTorch in the images: cpu, cu128, auto; empty for the package index's default",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "receiver of traces; see docs/reference/tracing.md",
    "OTEL_TRACES_SAMPLER": "which requests are traced",
    "OTEL_TRACES_SAMPLER_ARG": "its argument",
}


def env_example() -> str:
    """Returns the file's text."""
    text = (ROOT / "docker-compose.yml").read_text()
    settings = dict(_settings(yaml.safe_load(text)))
    lines = [
        "# Variables of docker-compose.yml: copy this file to .env beside it, and change what you need.",
        "# A variable that is commented out has the value shown. Written by scripts/env_example.py.",
    ]
    defaults = dict(_VARIABLE.findall(text))
    for name, default in sorted(defaults.items()):
        lines += ["", *_wrapped(settings.get(name) or _OWN[name]), f"# {name}={default}"]
    return "\n".join(lines) + "\n"


def _settings(document: Any) -> Iterator[tuple[str, str]]:
    """Yields variables that become settings, and what these are for."""
    for service in document["services"].values():
        for setting, value in service.get("environment", {}).items():
            found = _VARIABLE.fullmatch(str(value))
            name = re.fullmatch(r"HALFMOON_([A-Z]+)_(\w+)", setting)
            if found and name and name[1] in SETTINGS:
                yield found[1], SETTINGS[name[1]].model_fields[name[2].lower()].description


def _wrapped(description: str) -> Iterator[str]:
    line = "#"
    for word in description.split():
        if len(line) + 1 + len(word) > _WIDTH:
            yield line
            line = "#"
        line += f" {word}"
    yield line


if __name__ == "__main__":
    (ROOT / "deploy" / "env.example").write_text(env_example())
