"""API keys: how they are made, written down, hashed and named.

Only digests are kept. SHA-256 without salt and stretching is right for keys of 256 random bits, which nobody can guess;
a key that a user chose instead must be as hard to guess, because whoever reads its digest can try guesses offline.
"""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from halfmoon.errors import InvalidRequest

_PREFIX = "hm-"
_KEY_BYTES = 32
_ID_CHARS = 16
_HASH = "sha256:"
_HASHED = re.compile(rf"{_HASH}[0-9a-f]{{64}}")
_RULE = re.compile(rf"{_HASH}[0-9a-f]{{{_ID_CHARS}}}")


class DeclaredKey(NamedTuple):
    """A key of the settings, or of a file that they name."""

    written: str  # the key, or its digest
    digest: str
    tenant: str


def new_api_key() -> str:
    """Makes a key of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def key_digest(key: str) -> str:
    """Returns the digest by which a key is kept: 64 hex digits."""
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


def key_id(digest: str) -> str:
    """Returns the public name of a key: the first 16 digits of its digest."""
    return digest[:_ID_CHARS]


def bearer(authorization: str) -> str:
    """Returns what an `Authorization: Bearer …` header carries; empty for anything else."""
    scheme, _, given = authorization.partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def rule_value(key: str) -> str:
    """Returns a key as rules of classes name it: `sha256:` and its id. A value of that form is returned as it is."""
    if _RULE.fullmatch(key):
        return key
    return _HASH + key_id(_digest_of(key))


def sent_value(key: str) -> str:
    """Returns what rules of classes are compared with for a client that sent `key`."""
    return _HASH + key_id(key_digest(key))


def declared_key(written: str, tenant: str | None = None) -> DeclaredKey:
    """Reads a key, or `sha256:` and its whole digest. Without a tenant the key is one of its own, named by its id."""
    digest = _digest_of(written)
    return DeclaredKey(written, digest, tenant or f"key-{key_id(digest)}")


def keys_of_file(path: Path) -> list[DeclaredKey]:
    """Reads a file with a key a line, `TENANT KEY` or `KEY`; # begins a comment. Raises InvalidRequest."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the API keys in {path} cannot be read: {error}", param="api_keys_file") from error
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if len(words) > 2:
            message = f"{path}:{number} must hold a tenant's name and a key, or a key alone"
            raise InvalidRequest(message, param="api_keys_file")
        if words:
            keys.append(declared_key(words[-1], words[0] if len(words) == 2 else None))
    return keys


def secret_of_file(path: Path, param: str) -> str:
    """Reads the one secret in a file. Raises InvalidRequest."""
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param=param) from error
    if not secret:
        raise InvalidRequest(f"{path} is empty: write the secret into it", param=param)
    return secret


def _digest_of(written: str) -> str:
    return written.removeprefix(_HASH) if _HASHED.fullmatch(written) else key_digest(written)
