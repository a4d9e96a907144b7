"""Where a service may listen: beyond loopback only if it can tell its callers apart."""

from __future__ import annotations

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.addresses.loopback import is_loopback
from halfmoon.rpc.credentials.credential import Credential

_DIGITS = 5  # of a port
_HIGHEST_PORT = 65_535


def check_listener(listen: str, credential: Credential | None) -> None:
    """Raises InvalidRequest if strangers could call a service that listens on `listen` (host:port or unix:PATH).

    Also if `listen` is neither of the two.
    """
    if listen.startswith("unix:"):
        return
    host, _, port = listen.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= _DIGITS and int(port) <= _HIGHEST_PORT
    if not is_port or ":" not in listen or (":" in host and not host.startswith("[")):
        example = "such as 127.0.0.1:7001, or [::1]:7001 with IPv6"
        raise InvalidRequest(f"{listen!r} is not an address to listen on: give HOST:PORT, {example}", param="listen")
    if credential is None and not is_loopback(host):
        raise InvalidRequest(
            f"listening on {listen} would let strangers call this service: set HALFMOON_CLUSTER_SECRET or "
            "HALFMOON_CLUSTER_SECRET_FILE on every service of the cluster (`halfmoon secret new` makes a secret), "
            "or HALFMOON_TLS_CERT, _KEY and _CA (`halfmoon certs` makes certificates), or listen on 127.0.0.1",
            param="listen",
        )
