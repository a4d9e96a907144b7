"""Certificate files that are read, refused, and changed while a process runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.processes.private_files import write_private
from halfmoon.rpc.tls.authority import Authority
from halfmoon.rpc.tls.certificates import utc_now
from halfmoon.rpc.tls.identity_files import TlsPaths, identity_files, read_identity


def paths_in(directory: Path) -> TlsPaths:
    return TlsPaths(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority")


@pytest.fixture
def paths(authority: Authority, tmp_path: Path) -> TlsPaths:
    authority.issue("worker", "w").write(tmp_path)
    return paths_in(tmp_path)


def test_an_identity_is_read(paths: TlsPaths) -> None:
    identity = read_identity(paths, "worker")
    assert identity.role == "worker"
    assert identity.key.decode() not in repr(identity)


def _other_key(paths: TlsPaths, authority: Authority) -> None:
    paths.key.write_bytes(authority.issue("worker", "w").key)


def _other_authority(paths: TlsPaths, authority: Authority) -> None:
    paths.ca.write_bytes(Authority.create(paths.ca.parent / "other").pem)


def _no_role(paths: TlsPaths, authority: Authority) -> None:
    paths.cert.write_bytes(authority.pem)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda paths, _: paths.cert.unlink(), "tls.crt cannot be read: No such file"),
        (lambda paths, _: paths.key.unlink(), "tls.key cannot be read: No such file"),
        (lambda paths, _: paths.ca.write_text(""), "ca.crt is not a certificate"),
        (lambda paths, _: paths.cert.write_bytes(paths.cert.read_bytes()[:100]), "tls.crt is not a certificate"),
        (lambda paths, _: paths.key.write_bytes(paths.key.read_bytes()[:100]), "tls.key is not a private key"),
        (_other_key, "is not the key of"),
        (_other_authority, "was not issued by an authority in"),
        (_no_role, "names no role"),
    ],
)
def test_files_that_cannot_be_used(
    paths: TlsPaths, authority: Authority, spoil: Callable[[TlsPaths, Authority], None], message: str
) -> None:
    spoil(paths, authority)
    with pytest.raises(InvalidRequest, match=message):
        read_identity(paths, "worker")


def test_an_expired_certificate_is_refused(paths: TlsPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    later = utc_now() + timedelta(days=400)
    monkeypatch.setattr("halfmoon.rpc.tls.certificates.utc_now", lambda: later)
    with pytest.raises(InvalidRequest, match=r"expired on .* `halfmoon certs issue`"):
        read_identity(paths, "worker")


def test_new_files_are_taken_over(paths: TlsPaths, authority: Authority, tmp_path: Path) -> None:
    now_s = 0.0
    files = identity_files(paths, "worker", lambda: now_s, check_s=1.0)
    first = files.current
    authority.issue("worker", "w").write(tmp_path)
    assert files.current is first  # looked at once a second
    now_s = 1.0
    assert files.current is not first
    assert files.current is files.current


def test_half_written_and_broken_files_keep_the_old_certificate(
    paths: TlsPaths, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = identity_files(paths, "worker", check_s=0)
    first, issued = files.current, authority.issue("worker", "w")
    with caplog.at_level(logging.ERROR):
        write_private(paths.cert, issued.cert[:200])
        assert [files.current, files.current] == [first, first]
        write_private(paths.cert, issued.cert)  # its key is not there yet
        assert files.current is first
    assert [record.message for record in caplog.records] == ["tls.kept_old_certificate"] * 2  # once a change
    write_private(paths.key, issued.key)
    assert files.current.cert == issued.cert


def test_a_certificate_of_another_role_is_not_taken_over(
    paths: TlsPaths, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = identity_files(paths, "worker", check_s=0)
    authority.issue("operator", "w").write(tmp_path)
    assert files.current.role == "worker"
    assert caplog.records[-1].__dict__["reason"].startswith(f"{paths.cert} is for the role operator")


def test_files_that_are_away_keep_the_old_certificate(paths: TlsPaths) -> None:
    files = identity_files(paths, "worker", check_s=0)
    first = files.current
    paths.ca.unlink()
    assert files.current is first
