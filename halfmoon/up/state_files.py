"""The small files that `halfmoon up` keeps in the state directory. The system runs without them, too."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from halfmoon.up.log_files import OnTrouble


def replace_file(path: Path, text: str, on_trouble: OnTrouble) -> None:
    """Replaces a file atomically. Where that fails, the old file stays and `on_trouble` gets a sentence."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_text(text)
        fresh.replace(path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        on_trouble(f"{path} could not be written: {error.strerror or error}")
