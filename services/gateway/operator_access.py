"""Who may use the control API, `/halfmoon/...`: an operator's token, or anybody on this machine."""

from __future__ import annotations

import hmac
from hashlib import sha256

from aiohttp import web

from halfmoon.rpc.loopback import is_loopback
from services.gateway.api_keys import WrongKey

_PREFIX = "/halfmoon/"


class OperatorAccess:
    """Owns the token's digest. Without a token the control API is for gateways bound to loopback."""

    def __init__(self, token: str | None, host: str) -> None:
        self._digest = _digest(token) if token else None
        self._is_local = is_loopback(host)

    def governs(self, request: web.Request) -> bool:
        """Whether this decides about the request, and no API key does."""
        return request.path.startswith(_PREFIX) and not (self._digest is None and self._is_local)

    def check(self, request: web.Request) -> None:
        """Raises WrongKey."""
        if self._digest is None:
            raise WrongKey(
                "the control API is closed: this gateway listens beyond loopback and has no operator token; "
                "start it with --operator-token, or HALFMOON_GATEWAY_OPERATOR_TOKEN"
            )
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(given.strip()), self._digest):
            raise WrongKey("the operator token is needed: send the header 'Authorization: Bearer <token>'")


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogateescape")).digest()
