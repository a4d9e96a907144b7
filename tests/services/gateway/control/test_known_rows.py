"""The file with rows of the ledger that were read last."""

from __future__ import annotations

from pathlib import Path

from services.gateway.control.known_rows import KnownRows


def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    KnownRows(tmp_path / "state", "classes", "sqlite://").write([("a", 1)])
    (file,) = (tmp_path / "state").iterdir()
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_ledger_that_was_never_seen_is_not_an_empty_one(tmp_path: Path) -> None:
    known = KnownRows(tmp_path, "tenants", "sqlite://")
    assert known.read() is None
    known.write([])
    assert known.read() == []
    (file,) = tmp_path.iterdir()
    file.write_text("5")
    assert known.read() is None
