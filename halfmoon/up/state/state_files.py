"""The small files that `halfmoon up` keeps in the state directory. The system runs without them, too."""

from __future__ import annotations

from pathlib import Path

from halfmoon.rpc.processes.private_files import write_private
from halfmoon.up.supervision.log_files import OnTrouble


def replace_file(path: Path, text: str, on_trouble: OnTrouble) -> None:
    """Replaces a file atomically. Where that fails, the old file stays and `on_trouble` gets a sentence."""
    try:
        write_private(path, text.encode())
    except OSError as error:
        on_trouble(f"{path} could not be written: {error.strerror or error}")
