"""The file with the classes that were last in force."""

from __future__ import annotations

from pathlib import Path

from services.gateway.control.active_classes import KnownClasses


def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    KnownClasses(tmp_path / "state", "sqlite://").write([])
    (file,) = (tmp_path / "state").iterdir()
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
