"""Small files in the state directory, and a terminal that may be gone."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.up.specs.simulated import SimulatedWorkers, simulated_model
from halfmoon.up.specs.stores import known_stores, remember_stores
from halfmoon.up.state.state_files import replace_file
from halfmoon.up.terminal import unfailing_console


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "stores").write_text("old")
    replace_file(tmp_path / "stores", "new", pytest.fail)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"stores": "new"}


def test_a_file_that_cannot_be_written_is_told_and_ends_nothing(tmp_path: Path) -> None:
    sentences: list[str] = []
    remember_stores(tmp_path / "gone", ["here:1"], sentences.append)
    assert "could not be written" in sentences[0]
    assert known_stores(tmp_path / "gone") == ()


def test_a_simulated_model_without_room_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8}))
    (tmp_path / "state").touch()
    with pytest.raises(InvalidRequest, match="--state-dir"):
        simulated_model(tmp_path, SimulatedWorkers("instant"), tmp_path / "state")


class _Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_terminal_that_is_gone_is_no_error() -> None:
    unfailing_console(_Gone()).print("halfmoon is ready")
    shown = io.StringIO()
    unfailing_console(shown).print("halfmoon is ready")
    assert shown.getvalue() == "halfmoon is ready\n"
