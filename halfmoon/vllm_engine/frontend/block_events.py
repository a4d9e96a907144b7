"""What vLLM says of its prefix cache, in our block keys. No vLLM; its events are told apart by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from halfmoon.kv.keys import block_keys, iter_block_keys


class CacheChange(NamedTuple):
    """Keys of blocks that entered and left the cache."""

    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class BlockNames:
    """Owns the key of each block in vLLM's prefix cache, by vLLM's own hash of it."""

    def __init__(self, root: Callable[[bytes], bytes], block_tokens: int) -> None:
        """root: the parent of a tenant's first block keys, from its salt."""
        self._root = root
        self._block_tokens = block_tokens
        self._keys: dict[Any, bytes] = {}
        self._present: set[bytes] = set()

    def depth(self, token_ids: Sequence[int], salt: bytes) -> int:
        """Number of a prompt's leading tokens that lie in cached blocks."""
        keys = iter_block_keys(self._root(salt), token_ids, self._block_tokens)
        return self._block_tokens * sum(1 for _ in takewhile(self._present.__contains__, keys))

    def apply(self, events: Iterable[Any]) -> CacheChange:
        """Takes vLLM's events in their order. What hangs on a block that is not known is left out."""
        stored: dict[bytes, None] = {}
        evicted: dict[bytes, None] = {}
        for event in events:
            match type(event).__name__:
                case "BlockStored":
                    for vllm_hash, key in self._named(event):
                        self._keys[vllm_hash] = key
                        self._present.add(key)
                        stored[key] = None
                        evicted.pop(key, None)
                case "BlockRemoved":
                    gone = [self._keys.pop(name, None) for name in event.block_hashes]
                    self._remove((key for key in gone if key is not None), stored, evicted)
                case "AllBlocksCleared":
                    self._remove(tuple(self._keys.values()), stored, evicted)
                    self._keys.clear()
        return CacheChange(tuple(stored), tuple(evicted))

    def forget(self) -> CacheChange:
        """Forgets everything, because events were lost."""
        evicted = tuple(self._present)
        self._keys.clear()
        self._present.clear()
        return CacheChange((), evicted)

    def _remove(self, keys: Iterable[bytes], stored: dict[bytes, None], evicted: dict[bytes, None]) -> None:
        for key in keys:
            self._present.discard(key)
            evicted[key] = None
            stored.pop(key, None)

    def _named(self, event: Any) -> list[tuple[Any, bytes]]:
        if event.block_size != self._block_tokens:
            return []
        parent = self._parent(event)
        if parent is None:
            return []
        return list(zip(event.block_hashes, block_keys(parent, event.token_ids, self._block_tokens), strict=True))

    def _parent(self, event: Any) -> bytes | None:
        """The key before the event's first block; None if it is not known, or the blocks are private."""
        if event.parent_block_hash is not None:
            return self._keys.get(event.parent_block_hash)
        extra = [part for part in (event.extra_keys or [None])[0] or () if part not in (event.lora_name, None)]
        try:
            return self._root(bytes.fromhex("".join(extra)))
        except ValueError:  # of one request alone
            return None
