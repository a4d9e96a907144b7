"""Where Prometheus finds the services of `halfmoon up`: their ports, and the file that says so.

deploy/prometheus/prometheus-up.yml reads the file (file_sd_configs), so that any number of workers, and those that the
planner starts later, are scraped without an edit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from halfmoon.up.reserved_ports import ReservedPorts
from halfmoon.up.supervisor import ServiceSpec

TARGETS_FILE = "prometheus-targets.json"  # in the state directory

_HOST = "127.0.0.1"
_JOBS = {
    "services.prefill": "halfmoon-workers",
    "services.decode": "halfmoon-workers",
    "services.kvstore": "halfmoon-kvstore",
    "services.planner": "halfmoon-planner",
}

Spec = TypeVar("Spec", bound=ServiceSpec)


class MetricsTargets:
    """Owns which service serves metrics at which port. `first` is None for nowhere, 0 for free ports."""

    def __init__(self, state_dir: Path, first: int | None, ports: ReservedPorts) -> None:
        self._path = state_dir / TARGETS_FILE
        self._first = first
        self._ports = ports
        self._num_given = 0

    def opened(self, spec: Spec) -> Spec:
        """With a port for its metrics, if it has any."""
        if self._first is None or spec.arguments[1] not in _JOBS:
            return spec
        port = self._first + self._num_given if self._first else self._ports.port()
        self._num_given += 1
        return replace(spec, arguments=(*spec.arguments, "--metrics-port", str(port)), metrics_port=port)

    def write(self, gateway: str, specs: Iterable[ServiceSpec]) -> None:
        """The file, for the HTTP address of the gateways and the services that run now."""
        groups = [_group(gateway, "halfmoon-gateway", "gateway")]
        groups += [
            _group(f"{_HOST}:{spec.metrics_port}", _JOBS[spec.arguments[1]], spec.name)
            for spec in specs
            if spec.metrics_port is not None
        ]
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(groups, indent=2) + "\n")
        fresh.replace(self._path)


def _group(address: str, job: str, service: str) -> dict[str, object]:
    return {"targets": [address], "labels": {"job": job, "service": service}}
