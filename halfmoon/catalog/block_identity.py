"""Identity of a block: its key within its tenant, the block before it, and the cost of computing it again.

Keys are chained over the tokens (`halfmoon.kv.keys`). The store prefixes each with a tag of the caller's tenant salt: a
caller that does not know a salt can neither name nor probe blocks stored under it. The salt itself is not kept.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from halfmoon.errors import InvalidRequest
from halfmoon.kv.keys import KEY_BYTES
from halfmoon.kv.kv_layout import KVLayout

TAG_BYTES = 8
ID_BYTES = TAG_BYTES + KEY_BYTES
NO_TENANT = bytes(TAG_BYTES)


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What is known of a block besides its bytes."""

    id: bytes  # tenant tag and key
    parent: bytes | None = None  # id of the block before it; None for a prompt's first block or an unchained one
    depth: int = 0  # blocks before it in its prompt
    layout: KVLayout | None = None  # None if known only by its name in the cold tier and not read since
    recompute_s: float = 0.0  # 0 if unknown
    expires_at_s: float = math.inf  # wall clock
    tenant: str = ""  # who is charged for it; empty: shared, or known only by its name in the cold tier

    @property
    def num_tokens(self) -> int:
        """Tokens of the block; 0 if its layout is unknown."""
        return 0 if self.layout is None else self.layout.block_tokens


def tenant_tag(salt: bytes) -> bytes:
    """Public name of a tenant; all zeros for the empty salt."""
    return hashlib.blake2b(salt, digest_size=TAG_BYTES, person=b"halfmoon-tenant").digest() if salt else NO_TENANT


def block_id(key: bytes, salt: bytes = b"") -> bytes:
    """Id of `key` for the tenant with this salt. Raises InvalidRequest if `key` is not a key."""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"a block key has {KEY_BYTES} bytes, not {len(key)}", param="key")
    return tenant_tag(salt) + key


def key_of(block: bytes) -> bytes:
    """Extracts the key from an id."""
    return block[TAG_BYTES:]


def tag_of(block: bytes) -> bytes:
    """Extracts the tenant's tag from an id."""
    return block[:TAG_BYTES]
