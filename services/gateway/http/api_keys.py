"""API keys: clients send one in `Authorization: Bearer …` if the gateway has any."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

from aiohttp import web

from halfmoon.errors import InvalidRequest

_OPEN_PATHS = frozenset(
    ("/health", "/metrics", "/openapi.json")
)  # for probes and scrapers: they show nothing of clients


class WrongKey(InvalidRequest):
    """The request has no key, or an unknown one."""


class ApiKeys:
    """Owns the digests of the accepted keys. The time that a check takes reveals neither the keys nor their number."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, request: web.Request) -> None:
        """Raises WrongKey if a key is needed and not there."""
        if not self._digests or request.path in _OPEN_PATHS:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise WrongKey("an API key is needed: send the header 'Authorization: Bearer <key>'")
        digest = _digest(given.strip())
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):  # unlike any(), compares all
            raise WrongKey("the API key is not known here; check the header 'Authorization: Bearer <key>'")


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()
