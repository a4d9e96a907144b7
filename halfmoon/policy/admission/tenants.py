"""Tenants: whose requests they are, what they may use, and with whom they share cached KV."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

_OUTSIDE_TEXT = b"\xff"  # begins no text in UTF-8, so that no client can write the salt of a pool as its own


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. None sets no limit. Rates are of the whole system."""

    name: str
    classes: tuple[str, ...] | None = None  # that its requests may belong to
    default_class: str | None = None  # of requests that match no rule of these
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # prompt and output
    kv_bytes: int | None = None  # of KV in each store
    weight: float = 1.0  # its share of a class, relative to other tenants
    cache_pool: str | None = None  # tenants of one pool share cached KV; None: it has its own

    def may_use(self, class_name: str) -> bool:
        """Whether its requests may belong to this class."""
        return self.classes is None or class_name in self.classes

    def usual_class(self, name: str) -> str:
        """The class of requests that match no rule: its own default, or `name`, or the first that it may use."""
        if self.default_class is not None:
            return self.default_class
        return name if self.classes is None or name in self.classes else self.classes[0]


ANYONE = Tenant("")
"""Whose requests are where no API key is needed."""


def kv_salt(tenant: Tenant, cache_salt: str | None, *, is_shared: bool = False) -> bytes:
    """The salt of a request's KV, prefixes and tokenized pieces: only requests with the same salt share them.

    It depends on the tenant's pool, or else the tenant, and on what the client sent as `cache_salt`. With `is_shared`
    tenants without a pool share theirs, as clients do where there are no tenants: then it is the client's alone.
    """
    own = (cache_salt or "").encode()
    if not tenant.name or (is_shared and tenant.cache_pool is None):
        return own
    kind, name = ("tenant", tenant.name) if tenant.cache_pool is None else ("pool", tenant.cache_pool)
    hasher = blake2b(digest_size=31, person=b"halfmoon-tenant")
    for part in (kind.encode(), name.encode(), own):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return _OUTSIDE_TEXT + hasher.digest()
