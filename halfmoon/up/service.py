"""`python -m halfmoon.up.service SERVICE [options]` runs one service with its part of the file in HALFMOON_CONFIG.

Containers start this way. The service's own options and variables override the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.up.config.read import read_config
from halfmoon.up.config.service_environment import service_environment

CONFIG_VARIABLE = "HALFMOON_CONFIG"
SERVICES = ("gateway", "prefill", "decode", "kvstore", "planner", "console")


class Start(NamedTuple):
    """The program that replaces this one."""

    arguments: tuple[str, ...]  # to Python
    environment: dict[str, str]


def service_start(arguments: Sequence[str], environment: Mapping[str, str]) -> Start:
    """Returns the program to run for these arguments. Raises InvalidRequest."""
    service, *own = arguments or ("",)
    if service not in SERVICES:
        raise InvalidRequest(f"unknown service {service!r}: choose from {', '.join(SERVICES)}")
    module = service if service == "console" else f"services.{service}"
    file = environment.get(CONFIG_VARIABLE)
    settings = service_environment(read_config(Path(file)), service, own, environment) if file else {}
    return Start(("-m", module, *own), {**environment, **settings})


if __name__ == "__main__":
    try:
        start = service_start(sys.argv[1:], os.environ)
    except HalfmoonError as error:
        sys.exit(f"halfmoon: {error.message}")
    os.execve(sys.executable, (sys.executable, *start.arguments), start.environment)
