"""Files that commands write at their end."""

from __future__ import annotations

import os
from pathlib import Path

from halfmoon.errors import InvalidRequest


def check_can_write(path: Path, what: str) -> None:
    """Raises InvalidRequest if the file cannot be written, before work that may take an hour."""
    problem = None if os.path.isdir(path.parent) else f"{path.parent} is not a directory"
    if problem is None:
        is_new = not os.path.lexists(path)
        try:
            with path.open("ab"):
                pass
        except OSError as error:
            problem = f"{path}: {error.strerror}"
        else:
            if is_new:
                path.unlink()
    if problem is not None:
        raise InvalidRequest(
            f"{what} cannot be written: {problem}; name a file in an existing, writable directory", param="output"
        )
