"""The files in the state directory that say what runs: for `halfmoon status`, and for Prometheus."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from halfmoon.up.state.state_files import replace_file
from halfmoon.up.state.state_lock import is_locked
from halfmoon.up.supervision.child import Child, ServiceSpec
from halfmoon.up.supervision.log_files import OnTrouble

SERVICES_FILE = "services.json"  # in the state directory


class ListedService(NamedTuple):
    """One running service."""

    name: str
    host: str
    pid: int
    since_s: float  # seconds since the epoch


class ServiceList(NamedTuple):
    """What runs, and the gateways' URL once they serve, or for workers alone the gateways that they join."""

    url: str
    services: tuple[ListedService, ...]
    joins: str = ""


class WrittenState:
    """Owns the list of services and the time at which each started."""

    def __init__(self, state_dir: Path, on_trouble: OnTrouble, joins: str = "") -> None:
        self._path = state_dir / SERVICES_FILE
        self._on_trouble = on_trouble
        self._joins = joins
        self._url = ""
        self._write_targets: Callable[[Sequence[ServiceSpec]], None] = lambda specs: None
        self._since_s: dict[Child, float] = {}

    def begin(self, url: str, write_targets: Callable[[Sequence[ServiceSpec]], None]) -> None:
        """The system is ready at `url`. `write_targets` writes Prometheus's file for these services from now on."""
        self._url, self._write_targets = url, write_targets

    def write(self, children: Sequence[Child]) -> None:
        """Writes what runs now."""
        now_s, own = time.time(), socket.gethostname()
        self._since_s = {child: self._since_s.get(child, now_s) for child in children}
        services = [
            ListedService(child.spec.name, child.process.host or own, child.process.pid, since_s)
            for child, since_s in self._since_s.items()
        ]
        listed = {"url": self._url, "joins": self._joins, "services": [service._asdict() for service in services]}
        text = json.dumps(listed, indent=2)
        replace_file(self._path, text + "\n", self._on_trouble)
        self._write_targets([child.spec for child in children])


def running_services(state_dir: Path) -> ServiceList | None:
    """Returns what the `halfmoon up` that runs with this state directory wrote; None if none runs."""
    return read_services(state_dir) if is_locked(state_dir) else None


def read_services(state_dir: Path) -> ServiceList | None:
    """Returns what the last `halfmoon up` with this state directory wrote, or None if it wrote nothing readable."""
    try:
        written = json.loads((state_dir / SERVICES_FILE).read_text())
        services = tuple(ListedService(**service) for service in written["services"])
        return ServiceList(written["url"], services, written.get("joins", ""))
    except (OSError, ValueError, KeyError, TypeError):
        return None
