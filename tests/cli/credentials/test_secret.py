"""`halfmoon secret`: where it cannot write, it says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon.cli.app import app


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("new", "--out", ""), "exists already"),
        (("new", "--out", "nowhere/secret"), "nowhere/secret"),
        (("issue-all", "file"), "file/root cannot be made: Not a directory"),
        (("issue-all", 300 * "n"), "cannot be made: File name too long"),
    ],
)
def test_what_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    refused = CliRunner().invoke(app, ["secret", *arguments])
    assert (refused.exit_code, says in refused.output) == (1, True), refused.output
