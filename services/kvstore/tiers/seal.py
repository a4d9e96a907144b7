"""The keyed digest of blocks at rest: whoever can write bytes to a tier cannot make KV that is served. No I/O.

BLAKE3 with a key that is derived from the cluster's block key. Without a block key the digest finds damage only, as any
checksum does: then whoever reaches the store may put blocks anyway.
"""

from __future__ import annotations

import hmac

from blake3 import blake3

from halfmoon.kv.kv_layout import KVBytes

DIGEST_BYTES = 32
KEY_ID_BYTES = 8
_KEY = "halfmoon 2026-11 kv blocks at rest"
_KEY_ID = "halfmoon 2026-11 kv blocks at rest, name of the key"


class Seal:
    """Owns the key. `key_id` names it in public, so blocks of another cluster are told apart from damaged ones."""

    def __init__(self, block_key: bytes | None = None) -> None:
        """block_key: secret of at least 32 bytes; None for a checksum that anybody can compute."""
        assert block_key is None or len(block_key) >= DIGEST_BYTES, "derived from the cluster's secret"
        secret = block_key or b""
        self._key = blake3(secret, derive_key_context=_KEY).digest()
        self.key_id = blake3(secret, derive_key_context=_KEY_ID).digest(KEY_ID_BYTES)

    def digest(self, head: KVBytes, payload: KVBytes) -> bytes:
        """Digest of a header and its payload. Releases the GIL."""
        return blake3(head, key=self._key).update(payload).digest()

    def holds(self, digest: KVBytes, head: KVBytes, payload: KVBytes) -> bool:
        """Whether somebody with this key sealed these bytes."""
        return hmac.compare_digest(bytes(digest), self.digest(head, payload))
