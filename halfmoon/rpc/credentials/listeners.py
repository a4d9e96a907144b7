"""Where a service may listen: beyond loopback only if it can tell its callers apart."""

from __future__ import annotations

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.addresses.loopback import is_loopback
from halfmoon.rpc.addresses.resolved import check_address
from halfmoon.rpc.credentials.credential import Credential


def check_listener(listen: str, credential: Credential | None) -> None:
    """Raises InvalidRequest if strangers could call a service that listens on `listen` (host:port or unix:PATH).

    Also if `listen` is neither of the two.
    """
    try:
        check_address(listen)
    except ValueError as error:
        raise InvalidRequest(f"cannot listen: {error}", param="listen") from None
    if credential is None and not listen.startswith("unix:") and not is_loopback(listen.rpartition(":")[0]):
        raise InvalidRequest(
            f"listening on {listen} would let strangers call this service: set HALFMOON_CLUSTER_SECRET or "
            "HALFMOON_CLUSTER_SECRET_FILE on every service of the cluster (`halfmoon secret new` makes a secret), "
            "or HALFMOON_TLS_CERT, _KEY and _CA (`halfmoon certs` makes certificates), or listen on 127.0.0.1",
            param="listen",
        )
