"""The cluster secret, and what one process gets of it: tokens to call the others with, and digests to know them by.

    secret ── HMAC-SHA256(secret, "worker>gateway") ──> token of a worker at a gateway ── SHA-256 ──> digest
           └─ HMAC-SHA256(secret, "blocks") ──> block key

A role's credential holds neither the secret nor another role's tokens, so a process cannot act in another role. Who is
called sees the caller's token; it is good for services of that one role alone.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.credentials.roles import CLUSTER_ROLES, ClusterRole
from halfmoon.rpc.tls.identity_files import IdentityFiles

CREDENTIAL_KEY = "halfmoon-credential"  # gRPC metadata

MIN_SECRET_BYTES = 32
_PREFIX = "halfmoon-credential:"
_BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Credential:
    """What one process knows of the cluster secret, and its certificate on mutual TLS; at least one of the two.

    Without a secret, `tokens`, `digests` and `block_key` are empty; `block_key` also is for all but stores.
    """

    role: ClusterRole
    tokens: Mapping[ClusterRole, str] = field(repr=False)  # by the role that is called
    digests: Mapping[ClusterRole, bytes] = field(repr=False)  # by the role that calls: SHA-256 of its token for us
    block_key: bytes = field(repr=False)
    tls: IdentityFiles | None = field(default=None, repr=False, compare=False)

    def metadata(self, server_role: ClusterRole) -> tuple[tuple[str, str], ...]:
        """What a call of a service of that role carries."""
        return ((CREDENTIAL_KEY, self.tokens[server_role]),) if self.tokens else ()

    def role_of(self, token: str) -> ClusterRole | None:
        """The role of the caller with this token; None for a stranger's. Its duration reveals nothing of the tokens."""
        given, role = _digest(token), None
        for name, digest in self.digests.items():
            if hmac.compare_digest(given, digest):
                role = name
        return role

    def text(self) -> str:
        """The credential as the setting takes it. `credential_from` reads it."""
        body = {
            "role": self.role,
            "tokens": dict(self.tokens),
            "digests": {role: digest.hex() for role, digest in self.digests.items()},
            "blocks": self.block_key.hex(),
        }
        return _PREFIX + base64.urlsafe_b64encode(json.dumps(body, separators=(",", ":")).encode()).decode()


def credential_of_certificate(tls: IdentityFiles) -> Credential:
    """The credential of a process that is known by its certificate alone, in the certificate's role."""
    role: Any = tls.current.role
    return Credential(role, {}, {}, b"", tls)


def rank_key(credential: Credential | None) -> bytes:
    """What the ranks of one worker on several hosts know each other by.

    Raises InvalidRequest without a secret: ranks run what they send each other.
    """
    own = "" if credential is None else credential.tokens.get("worker", "")
    if not own:
        raise InvalidRequest(
            "ranks of other hosts need the cluster secret: set HALFMOON_CLUSTER_SECRET or HALFMOON_CLUSTER_SECRET_FILE "
            "on each (`halfmoon secret new` makes one), or give `halfmoon join` the directory by --secrets"
        )
    return _hmac(own, "ranks")


def new_secret() -> str:
    """Makes a cluster secret, 43 characters."""
    return secrets.token_urlsafe(MIN_SECRET_BYTES)


def credential_from(text: str, role: ClusterRole) -> Credential:
    """The credential of a process of this role, from the cluster secret or from the role's own credential.

    Raises InvalidRequest for anything else. The error never repeats the text.
    """
    text = text.strip()
    if not text.startswith(_PREFIX):
        return _derived(checked_secret(text), role)
    credential = _parsed(text)
    if credential.role != role:
        raise InvalidRequest(
            f"the cluster credential given here is that of a {credential.role}, and this is a {role}: "
            f"make its own with `halfmoon secret issue {role}`"
        )
    return credential


def checked_secret(text: str) -> str:
    """The cluster secret without surrounding blanks. Raises InvalidRequest if it cannot be one."""
    secret = text.strip()
    if secret.startswith(_PREFIX):
        raise InvalidRequest("the cluster secret itself is needed here, and this is the credential of one role")
    if len(secret.encode()) < MIN_SECRET_BYTES or not secret.isprintable() or " " in secret:
        raise InvalidRequest(
            f"a cluster secret is one word of at least {MIN_SECRET_BYTES} bytes, or the credential of a role: "
            "make a secret with `halfmoon secret new`"
        )
    return secret


def _derived(secret: str, role: ClusterRole) -> Credential:
    tokens = {other: _token(secret, role, other) for other in CLUSTER_ROLES}
    digests = {other: _digest(_token(secret, other, role)) for other in CLUSTER_ROLES}
    return Credential(role, tokens, digests, _hmac(secret, _BLOCKS) if role == "store" else b"")


def _parsed(text: str) -> Credential:
    try:
        body = json.loads(base64.urlsafe_b64decode(text.removeprefix(_PREFIX)))
        tokens = {name: bytes.fromhex(body["tokens"][name]).hex() for name in CLUSTER_ROLES}
        digests = {name: bytes.fromhex(body["digests"][name]) for name in CLUSTER_ROLES}
        credential = Credential(body["role"], tokens, digests, bytes.fromhex(body["blocks"]))
        is_whole = credential.role_of(tokens[credential.role]) == credential.role  # it is a caller of its own kind, too
    except (ValueError, KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise InvalidRequest("the cluster credential is damaged: copy it whole, or make it anew")
    return credential


def _token(secret: str, caller: ClusterRole, called: ClusterRole) -> str:
    return _hmac(secret, f"{caller}>{called}").hex()


def _hmac(secret: str, name: str) -> bytes:
    return hmac.digest(secret.encode(), name.encode(), "sha256")


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogateescape")).digest()
