"""The operator token: how services check it, and the one that the state directory keeps."""

from __future__ import annotations

import hmac
import os
import secrets
from hashlib import sha256
from pathlib import Path

from halfmoon.rpc.addresses.loopback import is_loopback_url
from halfmoon.rpc.credentials.api_keys import secret_of_file
from halfmoon.rpc.credentials.sources import kept_text

AUTHORIZATION_KEY = "authorization"  # gRPC metadata
TOKEN_HELP = "Operator token. Default on this machine: the one in the state directory."
_FILE = "operator_token"  # in the state directory
_TOKEN_BYTES = 24


class OperatorToken:
    """Owns the token's digest."""

    def __init__(self, token: str | None) -> None:
        self._digest = _digest(token) if token else None

    @property
    def is_known(self) -> bool:
        """Whether a token is configured."""
        return self._digest is not None

    def is_in(self, authorization: str) -> bool:
        """Whether `Bearer <token>` carries the token. The check's duration reveals nothing about it."""
        scheme, _, given = authorization.partition(" ")
        is_right = self._digest is not None and hmac.compare_digest(_digest(given.strip()), self._digest)
        return is_right and scheme.lower() == "bearer"


def token_file(state_dir: Path) -> Path:
    """The file with the token that `halfmoon up` makes."""
    return state_dir / _FILE


def made_token(state_dir: Path) -> str:
    """The token of a state directory, made at the first call, readable by its owner alone. Raises InvalidRequest."""
    file = token_file(state_dir)
    kept_text(file, lambda: secrets.token_urlsafe(_TOKEN_BYTES))
    return secret_of_file(file, "operator_token")


def kept_token(state_dir: Path) -> str | None:
    """The token of a state directory, if there is one. Raises InvalidRequest for a file that cannot be read."""
    file = token_file(state_dir)
    return secret_of_file(file, "operator_token") if os.path.exists(file) else None


def client_token(given: str | None, gateway: str, state_dir: Path) -> str | None:
    """The token that a command sends to the gateway at this URL: the given one, else that of the state directory.

    The latter is that of services on this machine, and nobody else is sent it. Raises InvalidRequest.
    """
    return given or (kept_token(state_dir) if is_loopback_url(gateway) else None)


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogateescape")).digest()
