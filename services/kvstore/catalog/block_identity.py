"""Who a block is: its key within its tenant, the block before it, and what making it again would cost.

Keys are chained over the tokens (`halfmoon.kv.keys`). The store adds a tag of the caller's tenant salt to each, so
that who does not know a salt can neither name nor probe what was stored under it; the salt itself is not kept.
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

    id: bytes  # tenant tag, key
    parent: bytes | None = None  # id of the block before it; None: the first of its prompt, or a chain of its own
    depth: int = 0  # blocks before it in its prompt
    layout: KVLayout | None = None  # None: known by its name in the cold tier, and not read since
    recompute_s: float = 0.0  # what computing it took, 0: unknown
    expires_at_s: float = math.inf  # wall clock

    @property
    def num_tokens(self) -> int:
        """Tokens of the block; 0 if its layout is not known."""
        return 0 if self.layout is None else self.layout.block_tokens


def tenant_tag(salt: bytes) -> bytes:
    """The public name of a tenant: all zeros for the empty salt."""
    return hashlib.blake2b(salt, digest_size=TAG_BYTES, person=b"halfmoon-tenant").digest() if salt else NO_TENANT


def block_id(key: bytes, salt: bytes = b"") -> bytes:
    """The id of `key` for the tenant who knows `salt`. Raises InvalidRequest if it is not a key."""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"a block key has {KEY_BYTES} bytes, not {len(key)}", param="key")
    return tenant_tag(salt) + key


def key_of(block: bytes) -> bytes:
    """The key in an id."""
    return block[TAG_BYTES:]


def tag_of(block: bytes) -> bytes:
    """The tenant's tag in an id."""
    return block[:TAG_BYTES]
