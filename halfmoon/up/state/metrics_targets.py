"""Chooses the metrics ports of the services of `halfmoon up`, and lists them in a file for Prometheus.

deploy/prometheus/prometheus-up.yml reads the file (file_sd_configs), so any number of workers is scraped without
an edit, also workers that the planner starts later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from halfmoon.up.state.state_files import replace_file
from halfmoon.up.supervision.child import ServiceSpec
from halfmoon.up.supervision.log_files import OnTrouble
from halfmoon.up.this_host.reserved_ports import ReservedPorts

TARGETS_FILE = "prometheus-targets.json"  # in the state directory

_JOBS = {
    "services.prefill": "halfmoon-workers",
    "services.decode": "halfmoon-workers",
    "services.kvstore": "halfmoon-kvstore",
    "services.planner": "halfmoon-planner",
}

Spec = TypeVar("Spec", bound=ServiceSpec)


class MetricsTargets:
    """Owns the metrics ports of the services. `first` is the first port, 0 for free ports, or None for no metrics."""

    def __init__(self, state_dir: Path, first: int | None, ports: ReservedPorts, on_trouble: OnTrouble) -> None:
        self._path = state_dir / TARGETS_FILE
        self._first = first
        self._ports = ports
        self._on_trouble = on_trouble
        self._num_opened = 0

    def opened(self, spec: Spec) -> Spec:
        """Returns the spec with a port for its metrics, if the service has metrics."""
        if self._first is None or spec.arguments[1] not in _JOBS:
            return spec
        port = self._first + self._num_opened if self._first else self._ports.port()
        self._num_opened += 1
        return replace(spec, arguments=(*spec.arguments, "--metrics-port", str(port)), metrics_port=port)

    def write(self, url: str, address: Callable[[ServiceSpec], str | None], specs: Iterable[ServiceSpec]) -> None:
        """Writes the file: the gateways and the services that run now. `url` is that of the gateways.

        `address` returns host:port of a service's metrics, or None.
        """
        groups = [_gateway_group(url)]
        groups += [
            _group(found, _JOBS[spec.arguments[1]], spec.name) for spec in specs if (found := address(spec)) is not None
        ]
        replace_file(self._path, json.dumps(groups, indent=2) + "\n", self._on_trouble)


def _gateway_group(url: str) -> dict[str, object]:
    scheme, _, address = url.partition("://")
    labels = {"__scheme__": scheme} if scheme == "https" else {}
    return _group(address, "halfmoon-gateway", "gateway", labels)


def _group(address: str, job: str, service: str, labels: Mapping[str, str] = MappingProxyType({})) -> dict[str, object]:
    return {"targets": [address], "labels": {"job": job, "service": service, **labels}}
