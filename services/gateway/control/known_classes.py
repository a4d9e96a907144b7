"""The classes that were in force last, in a file of this host: for a gateway that starts while its ledger is away."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from halfmoon.ledger.classes import StoredClass

log = logging.getLogger(__name__)


class KnownClasses:
    """Owns the file, of one ledger. Gateways of one host that share the ledger share the file, and write the same."""

    def __init__(self, directory: Path, ledger_url: str) -> None:
        self._path = directory / f"classes-{blake2b(ledger_url.encode(), digest_size=8).hexdigest()}.json"

    def read(self) -> list[StoredClass]:
        """None at all where no gateway of this host has ever seen them, or the file is damaged."""
        try:
            return [StoredClass(*one) for one in json.loads(self._path.read_text())]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            log.error("classes.unread", extra={"file": str(self._path), "reason": str(error)[:300]})
            return []

    def write(self, classes: Sequence[StoredClass]) -> None:
        """Whole or not at all. A file that cannot be written is missed only while the ledger is away."""
        fresh = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(list(classes)))
            fresh.replace(self._path)
        except OSError as error:
            log.error("classes.unkept", extra={"file": str(self._path), "reason": str(error)[:300]})
