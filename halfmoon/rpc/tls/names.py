"""Names by which a certificate tells its service's role. Knows nothing of cryptography."""

from __future__ import annotations

from collections.abc import Iterable

DOMAIN = "halfmoon.internal"

_SPIFFE_PREFIX = f"spiffe://{DOMAIN}/"


def server_name(role: str | None) -> str:
    """DNS name that a client expects of a server: the role's, or that of every service for None."""
    return DOMAIN if role is None else f"{role}.{DOMAIN}"


def spiffe_id(role: str, name: str) -> str:
    """URI that tells a service's role and name."""
    return f"{_SPIFFE_PREFIX}{role}/{name}"


def role_and_name(uris: Iterable[str]) -> tuple[str, str]:
    """Role and name in the one SPIFFE id of our domain; empty texts if there is none or more than one."""
    ids = [uri.removeprefix(_SPIFFE_PREFIX) for uri in uris if uri.startswith(_SPIFFE_PREFIX)]
    role, _, name = ids[0].partition("/") if len(ids) == 1 else ("", "", "")
    return role, name
