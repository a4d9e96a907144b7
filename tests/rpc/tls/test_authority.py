"""The development authority, and what its certificates say."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import AlreadyHere, HalfmoonError, InvalidRequest, NotFound
from halfmoon.rpc.tls.authority import Authority
from halfmoon.rpc.tls.certificates import certificates_in, chains_to, summary_of, utc_now
from halfmoon.rpc.tls.names import role_and_name, server_name, spiffe_id


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    authority.issue("worker", "prefill-0").write(tmp_path / "worker")
    assert [mode(tmp_path / name) for name in ("ca", "worker")] == [0o700, 0o700]
    assert [mode(tmp_path / name) for name in ("ca/ca.key", "worker/tls.key")] == [0o600, 0o600]
    assert not list(tmp_path.rglob(".*"))


def test_a_certificate_says_role_name_and_hosts(tmp_path: Path) -> None:
    issued = Authority.create(tmp_path).issue("store", "kvstore", ("kvstore", "10.0.0.7", "kvstore"), days=3)
    (certificate,) = certificates_in(issued.cert, "it")
    summary = summary_of(certificate)
    assert (summary.role, summary.name, summary.is_authority) == ("store", "kvstore", False)
    assert summary.hosts == ("store.halfmoon.internal", "halfmoon.internal", "kvstore", "10.0.0.7")
    assert timedelta(days=2.9) < summary.expires_at - utc_now() <= timedelta(days=3)
    assert summary.expires_soon(utc_now())
    assert not summary.expires_soon(utc_now() - timedelta(days=30))
    assert summary.is_expired(summary.expires_at)


def test_only_the_own_authority_counts(tmp_path: Path) -> None:
    authority, other = Authority.create(tmp_path / "a"), Authority.create(tmp_path / "b")
    chain = certificates_in(authority.issue("worker", "w").cert, "it")
    assert chains_to(chain, certificates_in(authority.pem, "ca"))
    assert chains_to(chain, certificates_in(other.pem + authority.pem, "ca"))  # while authorities change
    assert not chains_to(chain, certificates_in(other.pem, "ca"))
    assert not chains_to(chain, chain)  # no certificate vouches for itself


def test_a_certificate_ends_with_its_authority(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, days=10)
    summary = summary_of(certificates_in(authority.issue("worker", "w", days=100).cert, "it")[0])
    assert summary.expires_at == summary_of(certificates_in(authority.pem, "ca")[0]).expires_at


def test_an_authority_is_made_once_and_found_again(tmp_path: Path) -> None:
    pem = Authority.create(tmp_path).pem
    with pytest.raises(AlreadyHere, match="already has an authority"):
        Authority.create(tmp_path)
    assert Authority.open(tmp_path).pem == pem


def _foreign_key(directory: Path) -> None:
    Authority.create(directory / "other")
    (directory / "ca.key").write_bytes((directory / "other/ca.key").read_bytes())


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda directory: (directory / "ca.key").unlink(), NotFound, "halfmoon certs init"),
        (lambda directory: (directory / "ca.crt").write_text("nonsense"), InvalidRequest, "not a certificate"),
        (lambda directory: (directory / "ca.key").write_text("nonsense"), InvalidRequest, "not a private key"),
        (_foreign_key, InvalidRequest, "is not the key of"),
    ],
)
def test_an_authority_that_cannot_be_used(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[HalfmoonError], message: str
) -> None:
    Authority.create(tmp_path)
    spoil(tmp_path)
    with pytest.raises(error, match=message):
        Authority.open(tmp_path)


def test_an_expired_authority_issues_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Authority.create(tmp_path, days=1)
    later = utc_now() + timedelta(days=2)
    monkeypatch.setattr("halfmoon.rpc.tls.authority.utc_now", lambda: later)
    with pytest.raises(InvalidRequest, match="expired"):
        Authority.open(tmp_path)


@pytest.mark.parametrize(("name", "host", "days"), [("a/b", "h", 1), ("", "h", 1), ("a", "bücher", 1), ("a", "h", 0)])
def test_what_cannot_be_in_a_certificate(tmp_path: Path, name: str, host: str, days: int) -> None:
    with pytest.raises(InvalidRequest):
        Authority.create(tmp_path).issue("worker", name, (host,), days)


@given(st.sampled_from(("worker", "store")), st.text(min_size=1))
def test_names_are_read_as_written(role: str, name: str) -> None:
    assert role_and_name(["https://elsewhere", spiffe_id(role, name)]) == (role, name)


def test_names_of_others_are_no_roles() -> None:
    assert role_and_name([]) == ("", "")
    assert role_and_name(["spiffe://elsewhere.org/worker/w"]) == ("", "")
    assert role_and_name([spiffe_id("worker", "w"), spiffe_id("operator", "o")]) == ("", "")  # which of them?
    assert server_name("store") == "store.halfmoon.internal"
    assert server_name(None) == "halfmoon.internal"
