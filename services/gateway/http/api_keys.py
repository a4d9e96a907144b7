"""API keys: clients send one in `Authorization: Bearer …` where there are any, and it says whose request it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from aiohttp import web

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.policy.admission.tenants import ANYONE, Tenant
from halfmoon.rpc.credentials.api_keys import bearer, key_digest

_OPEN_PATHS = frozenset(
    ("/health", "/ping", "/metrics", "/openapi.json", "/docs")
)  # for probes and scrapers: they show nothing of clients
_TENANT = web.RequestKey("tenant", Tenant)
_RETRY_MS = 1_000
ANTHROPIC_HEADER = "X-Api-Key"  # where Anthropic's clients send their key


class WrongKey(InvalidRequest):
    """The request has no key, or an unknown one."""


class AcceptedKey(NamedTuple):
    """A key that was not revoked."""

    tenant: str
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class KeyTable:
    """The accepted keys by digest, and the limits of tenants that have any."""

    keys: Mapping[str, AcceptedKey] = field(default_factory=dict)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    is_needed: bool = False  # also where all keys were revoked
    is_known: bool = True  # False: the ledger, which may hold keys, was not read yet

    @property
    def num_tenants(self) -> int:
        """How many tenants have a key."""
        return len({key.tenant for key in self.keys.values()})

    def tenant(self, name: str) -> Tenant:
        """The tenant of this name."""
        return self.tenants.get(name) or Tenant(name)


class ApiKeys:
    """Owns which keys are accepted. A digest is looked up: the time that it takes tells nothing of the keys."""

    def __init__(self) -> None:
        self.table = KeyTable()

    def check(self, request: web.Request) -> None:
        """Assigns the request to its tenant. Raises WrongKey if a key is needed and not there, or Unavailable."""
        if request.path not in _OPEN_PATHS:
            request[_TENANT] = self._tenant(request)

    def _tenant(self, request: web.Request) -> Tenant:
        table = self.table
        if not table.is_known:
            message = "the API keys are not known until the ledger answers; try again"
            raise Unavailable(message, retry_after_ms=_RETRY_MS)
        if not table.is_needed:
            return ANYONE
        given = bearer(request.headers.get("Authorization", "")) or request.headers.get(ANTHROPIC_HEADER, "")
        if not given:
            raise WrongKey("an API key is needed: send the header 'Authorization: Bearer <key>'")
        key = table.keys.get(key_digest(given))
        if key is None:
            raise WrongKey("the API key is not known here; check the header 'Authorization: Bearer <key>'")
        if key.expires_at is not None and key.expires_at <= datetime.now(UTC):
            raise WrongKey("the API key has expired: ask for a new one")
        return table.tenant(key.tenant)


def tenant_of(request: web.Request) -> Tenant:
    """The tenant that `ApiKeys.check` found."""
    tenant: Tenant = request.get(_TENANT, ANYONE)
    return tenant
