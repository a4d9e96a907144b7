"""The `halfmoon` command before and after its modules are there."""

from __future__ import annotations

import builtins
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import halfmoon
from halfmoon.cli.entry import main


def test_the_installed_command_begins_here() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"halfmoon": f"{main.__module__}:{main.__name__}"}


def test_ctrl_c_while_modules_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def interrupted(name: str, *rest: Any) -> Any:
        if name == "halfmoon.cli.app":
            raise KeyboardInterrupt
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_else_it_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["halfmoon", "version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{halfmoon.__version__}\n")


@pytest.mark.parametrize("rest", [["keys", "add", "t", "--label", "caf\udce9"], ["drain", "\udcff"]])
def test_what_is_no_text_is_refused(
    rest: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["halfmoon", *rest])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "not UTF-8" in capsys.readouterr().err
