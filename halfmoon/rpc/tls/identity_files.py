"""The certificate, key and authorities by which one process is known and knows others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.rpc.tls.watched_files import CHECK_S, WatchedFiles

TLS_VARIABLES = ("HALFMOON_TLS_CERT", "HALFMOON_TLS_KEY", "HALFMOON_TLS_CA")


class TlsPaths(NamedTuple):
    """Where the three PEM files are. `ca` holds the authorities whose certificates are trusted."""

    cert: Path
    key: Path
    ca: Path


def paths_in(directory: Path) -> TlsPaths:
    """The files of a directory that `halfmoon certs issue` wrote."""
    return TlsPaths(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")


def state_paths(state_dir: Path, role: str) -> TlsPaths:
    """The files that `halfmoon up` issues to all its processes of a role."""
    return paths_in(state_dir / "tls" / role)


def environment_paths(environment: Mapping[str, str]) -> TlsPaths | None:
    """The files that the environment names; None for none. Raises InvalidRequest for some of them."""
    given = [environment.get(name) for name in TLS_VARIABLES]
    if not any(given):
        return None
    if not all(given):
        raise InvalidRequest(f"mutual TLS needs three files: set {', '.join(TLS_VARIABLES)}")
    return TlsPaths(*(Path(text) for text in given if text))


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """One consistent reading of the files, in PEM."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    role: str
    expires_s: float  # Unix time


IdentityFiles = WatchedFiles[TlsIdentity]


def identity_files(
    paths: TlsPaths, role: str | None, now_s: Callable[[], float] = time.monotonic, check_s: float = CHECK_S
) -> IdentityFiles:
    """The files of a process of this role (None: any), read again when they change. Raises as `read_identity`."""
    return WatchedFiles(paths, lambda: read_identity(paths, role), now_s, check_s)


def read_identity(paths: TlsPaths, role: str | None) -> TlsIdentity:
    """Reads and checks the files of a process of this role; None: any.

    Raises InvalidRequest if one is unreadable, expired, for another role, or does not belong to the others, and
    Incompatible if the package that reads certificates is missing.
    """
    try:
        from halfmoon.rpc.tls import certificates
    except ImportError as error:
        raise Incompatible("TLS between services needs another package: pip install 'halfmoon[tls]'") from error
    cert, key, ca = (_content(path) for path in paths)
    chain = certificates.certificates_in(cert, str(paths.cert))
    authorities = certificates.certificates_in(ca, str(paths.ca))
    summary = certificates.summary_of(chain[0])
    if not summary.role:
        raise InvalidRequest(f"{paths.cert} names no role: issue it with `halfmoon certs issue --role`")
    if role is not None and summary.role != role:
        raise InvalidRequest(
            f"{paths.cert} is for the role {summary.role}, and this is a {role}: issue another, `halfmoon certs issue`"
        )
    if summary.is_expired(certificates.utc_now()):
        raise InvalidRequest(
            f"{paths.cert} expired on {summary.expires_at:%Y-%m-%d %H:%M} UTC: issue another, `halfmoon certs issue`"
        )
    if not certificates.belongs_to(key, chain[0], str(paths.key)):
        raise InvalidRequest(f"{paths.key} is not the key of {paths.cert}")
    if not certificates.chains_to(chain, authorities):
        raise InvalidRequest(f"{paths.cert} was not issued by an authority in {paths.ca}")
    return TlsIdentity(cert, key, ca, summary.role, summary.expires_at.timestamp())


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
