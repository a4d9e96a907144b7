"""Writes the credential of each role to a directory of its own, such as the volumes of containers."""

from __future__ import annotations

from pathlib import Path

from halfmoon.rpc.credentials.credential import credential_from
from halfmoon.rpc.credentials.roles import CLUSTER_ROLES
from halfmoon.rpc.credentials.sources import kept_secret, write_secret

CREDENTIAL_FILE = "credential"


def issue_all(directory: Path) -> None:
    """Makes `root/cluster_secret` if it is not there, and `ROLE/credential` for each role that has a directory.

    Raises InvalidRequest if a file cannot be written.
    """
    root = directory / "root"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = kept_secret(root / "cluster_secret")
    for role in CLUSTER_ROLES:
        if (directory / role).is_dir():
            file = directory / role / CREDENTIAL_FILE
            write_secret(file, credential_from(secret, role).text(), replaces=True)
