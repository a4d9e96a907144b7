"""What a gateway read from the ledger last, in a file, for a start while the ledger is unavailable."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.processes.private_files import write_private

log = logging.getLogger(__name__)


Row = TypeVar("Row")


class KnownRows:
    """Owns a file with rows of one ledger. Gateways on one host that share a ledger write the same content."""

    def __init__(self, directory: Path, kind: str, ledger_url: str) -> None:
        self._path = directory / f"{kind}-{blake2b(ledger_url.encode(), digest_size=8).hexdigest()}.json"

    def read(self, row_of: Callable[[list[Any]], Row]) -> list[Row] | None:
        """The rows, each as `row_of` reads it; None if no gateway of this host has seen any.

        Raises InvalidRequest, with the file and the place, if it is damaged.
        """
        place = ""
        try:
            written = json.loads(self._path.read_text())
            if not isinstance(written, list):
                raise ValueError("it is not a list of rows")
            rows = []
            for number, fields in enumerate(written, 1):
                place = f", row {number}"
                rows.append(row_of(fields))
            return rows
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"the ledger does not answer, and {self._path}, where this host keeps what it last read there, is "
                f"damaged{place}: {str(error)[:300]}; start again once the ledger answers, or remove the file: then "
                "only the settings count until the ledger answers"
            ) from error

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        """Replaces the file atomically. A failure is logged: the file matters only while the ledger is unavailable."""
        content = json.dumps([list(row) for row in rows]).encode()
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._path, content, survives_crash=False)  # the event loop does not wait for a device
        except OSError as error:
            log.error("ledger.file_unkept", extra={"file": str(self._path), "reason": str(error)[:300]})
