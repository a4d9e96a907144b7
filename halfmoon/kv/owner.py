"""Whose KV it is, for quotas: the tenant and the most bytes that it may keep in one store."""

from __future__ import annotations

import re
from dataclasses import dataclass

from halfmoon.errors import InvalidRequest

MAX_TENANT_CHARS = 64
_TENANT = re.compile(rf"[A-Za-z0-9_.-]{{0,{MAX_TENANT_CHARS}}}")


@dataclass(frozen=True, slots=True)
class KVOwner:
    """A tenant and its quota. It decides nothing about who may read: that is the salt. Raises InvalidRequest."""

    tenant: str = ""  # opaque short id; empty: shared
    quota_bytes: int = 0  # 0: no limit

    def __post_init__(self) -> None:
        if not _TENANT.fullmatch(self.tenant):
            raise InvalidRequest(
                f'a tenant id is at most {MAX_TENANT_CHARS} letters, digits, "_", "-" and ".", not {self.tenant!r}',
                param="tenant",
            )
        if self.quota_bytes < 0:
            raise InvalidRequest("a tenant's quota cannot be negative", param="tenant_quota_bytes")


SHARED = KVOwner()
