"""`python -m halfmoon.up.service SERVICE [options]`: one service with its part of the file that HALFMOON_CONFIG names.

Containers start this way. The service's own options and variables go before the file.
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
    """What is run instead of this."""

    arguments: tuple[str, ...]  # of Python
    environment: dict[str, str]


def service_start(arguments: Sequence[str], environment: Mapping[str, str]) -> Start:
    """For this program's arguments. Raises InvalidRequest."""
    service, *own = arguments or ("",)
    if service not in SERVICES:
        raise InvalidRequest(f"there is no service {service!r}: there are {', '.join(SERVICES)}")
    module = service if service == "console" else f"services.{service}"
    file = environment.get(CONFIG_VARIABLE)
    told = service_environment(read_config(Path(file)), service, own, environment) if file else {}
    return Start(("-m", module, *own), {**environment, **told})


if __name__ == "__main__":
    try:
        start = service_start(sys.argv[1:], os.environ)
    except HalfmoonError as error:
        sys.exit(f"halfmoon: {error.message}")
    os.execve(sys.executable, (sys.executable, *start.arguments), start.environment)
