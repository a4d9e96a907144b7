"""Block keys: the content address of a block, chained so that equal keys mean equal prefixes.

`key[i] = blake2b-128(key[i-1] || tokens of block i as little-endian u32)`; `key[-1]` is the root, which names the
model, the layout and, by a salt, the adapter and, where caches must not be shared, the tenant. Keys are equal on all
machines and in all processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from halfmoon.kv.kv_layout import KVLayout

KEY_BYTES = 16
_ADAPTER = b"\xfe"  # begins no text in UTF-8, and no salt of a tenant
_ADAPTER_BYTES = 16
ADAPTER_SALT_BYTES = 1 + _ADAPTER_BYTES  # of a salt that names an adapter


def root_key(model_fingerprint: str, layout: KVLayout, tenant_salt: bytes = b"") -> bytes:
    """The chain's first parent. Tenants with different salts never share a block."""
    hasher = hashlib.blake2b(digest_size=KEY_BYTES, person=b"halfmoon-root")
    for part in (model_fingerprint.encode(), layout.fingerprint().to_bytes(8, "little"), tenant_salt):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


def adapter_salt(adapter: str, tenant_salt: bytes) -> bytes:
    """The salt of KV that is computed with an adapter, from its fingerprint (128 bits in hex; empty: without one)."""
    return _ADAPTER + bytes.fromhex(adapter) + tenant_salt if adapter else tenant_salt


def adapter_of(salt: bytes) -> str:
    """The fingerprint of the adapter that KV under this salt is computed with; empty: without one."""
    return salt[1:ADAPTER_SALT_BYTES].hex() if salt.startswith(_ADAPTER) else ""


def child_key(parent: bytes, block_token_ids: Sequence[int]) -> bytes:
    """Key of the block that holds exactly `block_token_ids` after the prefix named by `parent`."""
    return _hash(parent + np.asarray(block_token_ids, dtype="<u4").tobytes())


def iter_block_keys(root: bytes, token_ids: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    """Keys of a prompt's full blocks, first block first; a partly filled last block has no key."""
    tokens = np.asarray(token_ids, dtype="<u4")
    parent = root
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = _hash(parent + tokens[start : start + block_tokens].tobytes())
        yield parent


def block_keys(root: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """`iter_block_keys` as a list: `len(token_ids) // block_tokens` keys."""
    return list(iter_block_keys(root, token_ids, block_tokens))


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
