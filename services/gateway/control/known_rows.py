"""What a gateway read from the ledger last, in a file, for a start while the ledger is unavailable."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from halfmoon.rpc.private_files import write_private

log = logging.getLogger(__name__)


class KnownRows:
    """Owns a file with rows of one ledger. Gateways on one host that share a ledger write the same content."""

    def __init__(self, directory: Path, kind: str, ledger_url: str) -> None:
        self._path = directory / f"{kind}-{blake2b(ledger_url.encode(), digest_size=8).hexdigest()}.json"

    def read(self) -> list[list[Any]] | None:
        """The rows; None if no gateway of this host has seen any, or the file is damaged."""
        try:
            return [list(row) for row in json.loads(self._path.read_text())]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            log.error("ledger.file_unread", extra={"file": str(self._path), "reason": str(error)[:300]})
            return None

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        """Replaces the file atomically. A failure is logged: the file matters only while the ledger is unavailable."""
        content = json.dumps([list(row) for row in rows]).encode()
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._path, content, survives_crash=False)  # the event loop does not wait for a device
        except OSError as error:
            log.error("ledger.file_unkept", extra={"file": str(self._path), "reason": str(error)[:300]})
