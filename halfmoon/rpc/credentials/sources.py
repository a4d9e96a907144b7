"""Where a process finds its credential: the environment, a file, or the state directory of `halfmoon up`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.addresses.loopback import is_loopback
from halfmoon.rpc.credentials.credential import (
    Credential,
    checked_secret,
    credential_from,
    credential_of_certificate,
    new_secret,
)
from halfmoon.rpc.credentials.roles import ClusterRole
from halfmoon.rpc.processes.private_files import kept_private, write_private
from halfmoon.rpc.tls.identity_files import (
    IdentityFiles,
    environment_paths,
    identity_files,
    state_paths,
)

SECRET_VARIABLE = "HALFMOON_CLUSTER_SECRET"
FILE_VARIABLE = "HALFMOON_CLUSTER_SECRET_FILE"

_FILE = "cluster_secret"  # in the state directory


def own_credential(role: ClusterRole, environment: Mapping[str, str] = os.environ) -> Credential | None:
    """The credential of a process of this role; None if the environment names neither secret nor certificate.

    Raises InvalidRequest.
    """
    text, paths = environment_secret(environment), environment_paths(environment)
    return _credential(role, text, None if paths is None else identity_files(paths, role))


def environment_secret(environment: Mapping[str, str] = os.environ) -> str | None:
    """The secret or credential that the environment names; None for none. Raises InvalidRequest."""
    return secret_text(environment.get(SECRET_VARIABLE), environment.get(FILE_VARIABLE))


def secret_text(secret: str | None, file: str | Path | None) -> str | None:
    """The secret given directly or by a file; None for neither. Raises InvalidRequest for both."""
    if secret and file:
        raise InvalidRequest(f"give the cluster secret once: {SECRET_VARIABLE} or {FILE_VARIABLE}, not both")
    return _read(Path(file)) if file else secret or None


def client_credential(
    role: ClusterRole, address: str, state_dir: Path, environment: Mapping[str, str] = os.environ
) -> Credential | None:
    """The credential of a command that calls `address`: the environment's, else that of the state directory.

    The secret in a state directory is that of services on loopback, and nobody else is sent a token made of it.
    """
    own = own_credential(role, environment)
    file, paths = state_dir / _FILE, state_paths(state_dir, role)
    if own is not None or not is_loopback(address.rpartition(":")[0]):
        return own
    text = _read(file) if os.path.exists(file) else None
    return _credential(role, text, identity_files(paths, role) if os.path.exists(paths.cert) else None)


def environment_of(credential: Credential) -> dict[str, str]:
    """The variables that give a child this credential, but no certificate."""
    return {SECRET_VARIABLE: credential.text()}


def _credential(role: ClusterRole, text: str | None, tls: IdentityFiles | None) -> Credential | None:
    if text is None:
        return None if tls is None else credential_of_certificate(tls)
    return replace(credential_from(text, role), tls=tls)


def kept_text(file: Path, make: Callable[[], str]) -> str:
    """The secret in the file, which is made at the first call, readable by its owner alone.

    Of several processes at once, all get the secret of one. Raises InvalidRequest if the file cannot be used.
    """
    try:
        return kept_private(file, lambda: f"{make()}\n".encode()).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"a secret cannot be kept in {file}: {error}") from error


def kept_secret(file: Path) -> str:
    """The cluster secret in the file; see `kept_text`."""
    return checked_secret(kept_text(file, new_secret))


def state_secret(state_dir: Path) -> str:
    """The cluster secret of `halfmoon up` with this state directory; see `kept_secret`."""
    return kept_secret(state_dir / _FILE)


def write_secret(file: Path, text: str, *, replaces: bool = False) -> None:
    """Writes a secret or a credential. Raises FileExistsError, unless it `replaces`, and InvalidRequest."""
    try:
        write_private(file, f"{text}\n".encode(), replaces=replaces)
    except FileExistsError:
        raise
    except OSError as error:
        raise InvalidRequest(f"the secret cannot be written to {file}: {error.strerror}") from error


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the cluster secret cannot be read from {file}: {error}") from error
