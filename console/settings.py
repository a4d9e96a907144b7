"""Addresses of the gateway and the planner, from arguments or environment, and the keys."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

DEFAULT_GATEWAY_URL = "http://127.0.0.1:8000"


def gateway_url(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """The gateway's base URL without a trailing slash. Raises ValueError for an unknown argument or scheme."""
    given = _given(arguments).gateway or environment.get("HALFMOON_CONSOLE_GATEWAY_URL") or DEFAULT_GATEWAY_URL
    url = str(given).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the gateway's URL must begin with http:// or https://, got {url!r}")
    return url


def gateway_ca(environment: Mapping[str, str] = os.environ) -> Path | None:
    """HALFMOON_CONSOLE_GATEWAY_CA: file of authorities to trust for a gateway at https://; None: the system's.

    Raises ValueError if there is no such file.
    """
    given = environment.get("HALFMOON_CONSOLE_GATEWAY_CA")
    if given and not Path(given).is_file():
        raise ValueError(f"HALFMOON_CONSOLE_GATEWAY_CA names {given!r}, which is not a file")
    return Path(given) if given else None


def planner_address(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> str | None:
    """host:port of the planner; None if there is none. Raises ValueError as `gateway_url` does."""
    given = _given(arguments).planner or environment.get("HALFMOON_CONSOLE_PLANNER") or None
    if given is not None and not given.rpartition(":")[2].isdigit():
        raise ValueError(f"the planner's address must be host:port, got {given!r}")
    return given


def _given(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="streamlit run console/app.py --", exit_on_error=False, add_help=False)
    parser.add_argument("--gateway")
    parser.add_argument("--planner")
    try:
        known, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as err:
        raise ValueError(str(err)) from err
    if unknown:
        raise ValueError(f"unknown arguments: {' '.join(unknown)}; known: --gateway URL, --planner HOST:PORT")
    return known


def api_key(environment: Mapping[str, str] = os.environ) -> str | None:
    """HALFMOON_CONSOLE_API_KEY: from the environment only, because everyone can see a command line."""
    return environment.get("HALFMOON_CONSOLE_API_KEY") or None


def operator_token(environment: Mapping[str, str] = os.environ) -> str | None:
    """HALFMOON_CONSOLE_OPERATOR_TOKEN: the gateway's. Beyond loopback the console also asks its visitors for it."""
    return environment.get("HALFMOON_CONSOLE_OPERATOR_TOKEN") or None
