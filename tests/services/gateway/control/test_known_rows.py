"""The file with rows of the ledger that were read last."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.errors import InvalidRequest
from services.gateway.control.known_rows import KnownRows


def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    KnownRows(tmp_path / "state", "classes", "sqlite://").write([("a", 1)])
    (file,) = (tmp_path / "state").iterdir()
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_ledger_that_was_never_seen_is_not_an_empty_one(tmp_path: Path) -> None:
    known = KnownRows(tmp_path, "tenants", "sqlite://")
    assert known.read(list) is None
    known.write([])
    assert known.read(list) == []


@pytest.mark.parametrize(
    ("content", "place"),
    [("5", "not a list"), ("[[1, 2], 5]", "row 2"), ('[["a"', "line 1 column"), ("", "line 1 column"), ("{}", "list")],
)
def test_a_damaged_file_is_told_with_its_place_and_what_to_do(tmp_path: Path, content: str, place: str) -> None:
    known = KnownRows(tmp_path, "tenants", "sqlite://")
    known.write([])
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    with pytest.raises(InvalidRequest, match="remove the file") as refusal:
        known.read(list)
    assert str(file) in refusal.value.message
    assert place in refusal.value.message
