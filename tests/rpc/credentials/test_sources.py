"""Where processes find their credentials, and the file that keeps the secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.credentials.credential import credential_from, new_secret
from halfmoon.rpc.credentials.issue import issue_all
from halfmoon.rpc.credentials.sources import (
    client_credential,
    environment_of,
    kept_secret,
    own_credential,
    state_secret,
    write_secret,
)
from halfmoon.rpc.tls.identity_files import paths_in, read_identity

SECRET = new_secret()


def test_the_environment_names_the_credential_or_its_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    expected = credential_from(SECRET, "store")
    assert own_credential("store", {}) is None
    assert own_credential("store", {"HALFMOON_CLUSTER_SECRET": "", "HALFMOON_CLUSTER_SECRET_FILE": ""}) is None
    assert own_credential("store", {"HALFMOON_CLUSTER_SECRET": SECRET}) == expected
    assert own_credential("store", {"HALFMOON_CLUSTER_SECRET_FILE": str(file)}) == expected
    assert own_credential("store", environment_of(expected)) == expected


def test_both_or_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    file = str(tmp_path / "none")
    with pytest.raises(InvalidRequest, match="not both"):
        own_credential("store", {"HALFMOON_CLUSTER_SECRET": SECRET, "HALFMOON_CLUSTER_SECRET_FILE": file})
    with pytest.raises(InvalidRequest, match="cannot be read"):
        own_credential("store", {"HALFMOON_CLUSTER_SECRET_FILE": file})


def test_up_makes_its_secret_once_and_for_its_user_alone(tmp_path: Path) -> None:
    secret = state_secret(tmp_path)
    assert state_secret(tmp_path) == secret
    (file,) = tmp_path.iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == ("cluster_secret", 0o600)


def test_a_kept_secret_that_is_none_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("oops")
    with pytest.raises(InvalidRequest, match="at least 32 bytes"):
        kept_secret(tmp_path / "secret")
    with pytest.raises(FileExistsError):
        write_secret(tmp_path / "secret", SECRET)
    with pytest.raises(InvalidRequest, match="cannot be written"):
        write_secret(tmp_path / "nowhere" / "secret", SECRET)


def test_the_secret_of_a_state_directory_is_for_loopback_alone(tmp_path: Path) -> None:
    """Its services listen there, and nobody else is to be sent a token."""
    secret = state_secret(tmp_path)
    expected = credential_from(secret, "operator")
    assert client_credential("operator", "127.0.0.1:7", tmp_path, {}) == expected
    assert client_credential("operator", "[::1]:7", tmp_path, {}) == expected
    assert client_credential("operator", "evil.example:7", tmp_path, {}) is None
    assert client_credential("operator", "127.0.0.1:7", tmp_path / "other", {}) is None
    own = {"HALFMOON_CLUSTER_SECRET": SECRET}
    assert client_credential("operator", "10.0.0.1:7", tmp_path, own) == credential_from(SECRET, "operator")


def test_each_role_with_a_directory_gets_its_credential(tmp_path: Path) -> None:
    for name in ("worker", "store"):
        (tmp_path / name).mkdir()
    issue_all(tmp_path)
    issue_all(tmp_path)  # at the next start of the containers
    secret = (tmp_path / "root" / "cluster_secret").read_text()
    files = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    certificate = ("ca.crt", "credential", "tls.crt", "tls.key")
    of_roles = [f"{role}/{name}" for role in ("store", "worker") for name in certificate]
    assert files == ["root/ca.crt", "root/ca.key", "root/cluster_secret", *of_roles]
    file = tmp_path / "worker" / "credential"
    assert file.stat().st_mode & 0o777 == 0o600
    assert own_credential("worker", {"HALFMOON_CLUSTER_SECRET_FILE": str(file)}) == credential_from(secret, "worker")
    with pytest.raises(InvalidRequest, match="that of a worker, and this is a store"):
        own_credential("store", {"HALFMOON_CLUSTER_SECRET_FILE": str(file)})
    assert read_identity(paths_in(tmp_path / "store"), "store").ca == (tmp_path / "root/ca.crt").read_bytes()
