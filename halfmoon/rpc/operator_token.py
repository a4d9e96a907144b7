"""The operator token as services check it: operators have it, or are on this machine."""

from __future__ import annotations

import hmac
from hashlib import sha256

from halfmoon.rpc.loopback import is_loopback

AUTHORIZATION_KEY = "authorization"  # gRPC metadata


class OperatorToken:
    """Owns the token's digest. Without a token, loopback listeners are open and everything else is closed."""

    def __init__(self, token: str | None, host: str) -> None:
        self._digest = _digest(token) if token else None
        self.is_open = self._digest is None and is_loopback(host)

    @property
    def is_known(self) -> bool:
        """Whether a token is configured."""
        return self._digest is not None

    def is_in(self, authorization: str) -> bool:
        """Whether `Bearer <token>` carries the token. The check's duration reveals nothing about it."""
        scheme, _, given = authorization.partition(" ")
        is_right = self._digest is not None and hmac.compare_digest(_digest(given.strip()), self._digest)
        return is_right and scheme.lower() == "bearer"


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogateescape")).digest()
