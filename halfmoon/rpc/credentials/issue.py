"""Writes credential and certificate of each role to a directory of its own, such as the volumes of containers."""

from __future__ import annotations

from pathlib import Path

from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.rpc.credentials.credential import credential_from
from halfmoon.rpc.credentials.roles import CLUSTER_ROLES
from halfmoon.rpc.credentials.sources import kept_secret, write_secret

CREDENTIAL_FILE = "credential"


def issue_all(directory: Path) -> None:
    """Makes secret and authority in `root` if they are not there, and files for each role that has a directory.

    These are `ROLE/credential`, and a new certificate each time. Raises InvalidRequest if a file cannot be written, and
    Incompatible if the package that makes certificates is missing.
    """
    try:
        from halfmoon.rpc.tls.authority import Authority
    except ImportError as error:
        raise Incompatible("certificates need another package: pip install 'halfmoon[tls]'") from error
    root = directory / "root"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{root} cannot be made: {error.strerror}", param="directory") from error
    secret = kept_secret(root / "cluster_secret")
    authority = Authority.kept(root)
    for role in CLUSTER_ROLES:
        if (directory / role).is_dir():
            file = directory / role / CREDENTIAL_FILE
            write_secret(file, credential_from(secret, role).text(), replaces=True)
            authority.issue(role, role).write(directory / role)
