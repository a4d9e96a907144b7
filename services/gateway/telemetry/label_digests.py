"""A client's own labels (`user`, `metadata`, …) as the log has them: keyed digests, because they may name people."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from halfmoon.rpc.processes.private_files import kept_private

log = logging.getLogger(__name__)

_KEY_BYTES = 32
_DIGEST_BYTES = 8
_FILE = "label_key"


class LabelDigests:
    """Owns the key. Equal labels have equal digests; without the key nobody can try which label a digest is of."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, labels: Mapping[str, Any]) -> dict[str, str]:
        """The digest of each label's value, by its name."""
        return {name: self._digest(value) for name, value in labels.items()}

    def _digest(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        return blake2b(text.encode(errors="replace"), digest_size=_DIGEST_BYTES, key=self._key).hexdigest()


def label_key(state_dir: Path) -> bytes:
    """Returns the key in the state directory, made at the first start; gateways of one host share it.

    A directory that cannot be written is logged, and gives a key for this process alone.
    """
    path = state_dir / _FILE
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = kept_private(path, lambda: secrets.token_bytes(_KEY_BYTES))
    except OSError as error:
        log.warning("labels.unkept", extra={"file": str(path), "reason": str(error)})
        return secrets.token_bytes(_KEY_BYTES)
    return key[:64] or secrets.token_bytes(_KEY_BYTES)
