"""`halfmoon certs`: what is written, printed and refused."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halfmoon.cli.app import app
from halfmoon.rpc.tls.certificates import utc_now


def certs(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["certs", *map(str, arguments)])


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    made = certs("init", "--dir", tmp_path / "ca")
    assert made.exit_code == 0, made.output
    return tmp_path / "ca"


@pytest.fixture
def worker(authority: Path, tmp_path: Path) -> Path:
    made = certs(
        "issue", "--role", "worker", "--dir", authority, "--out", tmp_path / "w", "--name", "p0", "--host", "prefill"
    )
    assert made.exit_code == 0, made.output
    return tmp_path / "w"


def test_an_authority_comes_with_a_cluster_secret(authority: Path) -> None:
    secret = (authority / "cluster_secret").read_text()
    assert len(secret) > 40
    assert all((authority / name).stat().st_mode & 0o077 == 0 for name in ("ca.key", "cluster_secret"))
    again = certs("init", "--dir", authority)
    assert again.exit_code == 1
    assert "already has an authority" in again.output
    assert (authority / "cluster_secret").read_text() == secret


def test_a_certificate_is_shown(worker: Path) -> None:
    shown = certs("show", worker)
    assert shown.exit_code == 0, shown.output
    for part in ("worker p0", "prefill", "in 364 days", f"issued by {worker / 'ca.crt'}"):
        assert part in shown.output
    assert "warning" not in shown.output
    assert (worker / "tls.key").read_text() not in shown.output


def test_the_end_is_announced(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for days, said, status in ((360, "expires soon", 0), (370, "has expired", 1)):
        later = utc_now() + timedelta(days=days)
        with monkeypatch.context() as clock:
            clock.setattr("halfmoon.rpc.tls.certificates.utc_now", lambda later=later: later)
            shown = certs("show", worker)
        assert said in shown.output
        assert shown.exit_code == status


def test_what_is_wrong_with_a_certificate(worker: Path, authority: Path, tmp_path: Path) -> None:
    certs("init", "--dir", tmp_path / "other")
    foreign = certs("show", worker, "--ca", tmp_path / "other/ca.crt")
    assert foreign.exit_code == 1
    assert "was not issued by" in foreign.output
    certs("issue", "--role", "worker", "--dir", authority, "--out", tmp_path / "x")
    (worker / "tls.key").write_bytes((tmp_path / "x/tls.key").read_bytes())
    mixed = certs("show", worker)
    assert mixed.exit_code == 1
    assert "is not the key of" in mixed.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("issue", "--role", "worker", "--dir", "nowhere", "--out", "w"), "halfmoon certs init --dir nowhere"),
        (("issue", "--role", "king", "--out", "w"), "king"),
        (("show", "nowhere"), "nowhere cannot be read"),
        (("show", "n" * 300), "File name too long"),
        (("init", "--dir", "n" * 300), "File name too long"),
        (("init", "--days", "9" * 12), "36500"),
        (("issue", "--role", "worker", "--out", "w", "--days", "3000000"), "36500"),
    ],
)
def test_what_cannot_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = certs(*arguments)
    assert refused.exit_code != 0
    assert message in refused.output
