"""Where the console finds its gateway: `--gateway`, HALFMOON_CONSOLE_GATEWAY_URL, or this machine; and its keys."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

DEFAULT_GATEWAY_URL = "http://127.0.0.1:8000"


def gateway_url(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """The gateway's base URL without a trailing slash. Raises ValueError for an argument or scheme it does not know."""
    parser = argparse.ArgumentParser(prog="streamlit run console/app.py --", exit_on_error=False, add_help=False)
    parser.add_argument("--gateway", default=environment.get("HALFMOON_CONSOLE_GATEWAY_URL") or DEFAULT_GATEWAY_URL)
    try:
        known, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as err:
        raise ValueError(str(err)) from err
    if unknown:
        raise ValueError(f"unknown arguments: {' '.join(unknown)}; known: --gateway URL")
    url = str(known.gateway).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the gateway's URL must begin with http:// or https://, got {url!r}")
    return url


def api_key(environment: Mapping[str, str] = os.environ) -> str | None:
    """HALFMOON_CONSOLE_API_KEY: from the environment alone, a command line is seen by all."""
    return environment.get("HALFMOON_CONSOLE_API_KEY") or None


def operator_token(environment: Mapping[str, str] = os.environ) -> str | None:
    """HALFMOON_CONSOLE_OPERATOR_TOKEN: the gateway's; beyond loopback the console asks its visitors for it, too."""
    return environment.get("HALFMOON_CONSOLE_OPERATOR_TOKEN") or None
