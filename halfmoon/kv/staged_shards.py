"""KV on its way between two workers of several ranks, kept by each rank on its own host.

The sender's rank 0 has each rank copy its part of a frame out of its memory; the receiver's ranks fetch what they need
of these copies, and write it once their own rank 0 says so. No torch, no I/O.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import Incompatible, InvalidRequest, Unavailable
from halfmoon.kv.kv_layout import KVBytes, KVDtype, Shard

_TICKET = struct.Struct("<8sIQ")
_KEPT_S = 60.0  # after which a part that nobody took is dropped: its transfer has ended long before


class Ticket(NamedTuple):
    """Names one frame's parts, which all ranks of a worker keep under this name."""

    owner: bytes  # 8 random bytes: a link's or a transfer's
    slot: int  # of the owner's
    use: int = 0  # of the slot: a later one replaces an earlier one

    def encoded(self) -> bytes:
        """The ticket in a frame's reference."""
        return _TICKET.pack(*self)


def decode_ticket(data: KVBytes) -> Ticket:
    """Raises InvalidRequest if it is malformed."""
    if memoryview(data).nbytes != _TICKET.size:
        raise InvalidRequest("a reference to KV of several ranks must be a ticket of 20 bytes")
    return Ticket(*_TICKET.unpack(data))


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one rank holds. `address` (host:port) is where its parts are fetched; None: at the worker's own address."""

    rank: int
    shard: Shard
    address: str | None = None


class _Part(NamedTuple):
    place: Shard
    rows: NDArray[np.uint8]  # [layers, 2, heads, num_tokens, row_bytes]
    use: int
    kept_s: float


class StagedShards:
    """Owns the parts that the ranks of one host keep. Any thread."""

    def __init__(self) -> None:
        self._parts: dict[tuple[bytes, int, int], _Part] = {}  # by owner, slot and rank
        self._gate = threading.Lock()

    def put(self, ticket: Ticket, rank: int, place: Shard, rows: NDArray[np.uint8], now_s: float) -> None:
        """Keeps a part, [layers, 2, heads, num_tokens, row_bytes], instead of the slot's earlier use."""
        key = (ticket.owner, ticket.slot, rank)
        with self._gate:
            self._drop_old(now_s)
            self._parts[key] = _Part(place, rows, ticket.use, now_s)

    def cut(self, ticket: Ticket, rank: int, place: Shard) -> bytes:
        """The canonical bytes of `place`, in the whole model's numbering, out of what `rank` keeps.

        Raises Unavailable for a part that is not kept any more, InvalidRequest for one that lies outside of it.
        """
        part = self._part(ticket, rank)
        has = part.place
        inside = has.layer_start <= place.layer_start < place.layer_end <= has.layer_end
        if not (inside and has.head_start <= place.head_start < place.head_end <= has.head_end):
            raise InvalidRequest(f"rank {rank} keeps {has}, not {place}")
        layers = slice(place.layer_start - has.layer_start, place.layer_end - has.layer_start)
        heads = slice(place.head_start - has.head_start, place.head_end - has.head_start)
        return part.rows[layers, :, heads].tobytes()

    def take(self, ticket: Ticket, rank: int) -> memoryview:
        """All bytes of a part, which is then kept no more. Raises Unavailable."""
        part = self._part(ticket, rank)
        with self._gate:
            self._parts.pop((ticket.owner, ticket.slot, rank), None)
        return part.rows.reshape(-1).data

    @property
    def num_bytes(self) -> int:
        """Size of all parts."""
        with self._gate:
            return sum(part.rows.nbytes for part in self._parts.values())

    def _part(self, ticket: Ticket, rank: int) -> _Part:
        with self._gate:
            part = self._parts.get((ticket.owner, ticket.slot, rank))
        if part is None or part.use != ticket.use:
            raise Unavailable(f"rank {rank} keeps this part of a KV transfer no more")
        return part

    def _drop_old(self, now_s: float) -> None:
        for key in [key for key, part in self._parts.items() if now_s - part.kept_s > _KEPT_S]:
            del self._parts[key]


@dataclass(frozen=True, slots=True)
class WorkerRanks:
    """All ranks of a worker, and the parts that those of rank 0's host keep."""

    shards: tuple[RankShard, ...]  # by rank
    readable: tuple[bool, ...]  # by rank; False for the second copy of a head
    dtype: KVDtype
    staged: StagedShards

    @property
    def spans_hosts(self) -> bool:
        """Whether some ranks are on other hosts."""
        return any(shard.address for shard in self.shards)


def overlap(a: Shard, b: Shard) -> Shard | None:
    """What two shards have in common."""
    layers = max(a.layer_start, b.layer_start), min(a.layer_end, b.layer_end)
    heads = max(a.head_start, b.head_start), min(a.head_end, b.head_end)
    return Shard(*layers, *heads) if layers[0] < layers[1] and heads[0] < heads[1] else None


def gathered(place: Shard, pieces: Sequence[tuple[Shard, KVBytes]], num_tokens: int) -> NDArray[np.uint8]:
    """Puts pieces together to [layers, 2, heads, num_tokens, row_bytes] of `place`.

    Raises Incompatible unless they cover it exactly and have rows of one length, InvalidRequest for an empty place.
    """
    num_layers, num_heads = place.layer_end - place.layer_start, place.head_end - place.head_start
    if num_layers < 1 or num_heads < 1 or num_tokens < 1:
        raise InvalidRequest(f"no KV is at {place} of {num_tokens} tokens")
    cells = [_cells(piece, place) for piece, _ in pieces]
    times_held = np.zeros((num_layers, num_heads), np.uint8)
    for layers, heads in cells:
        times_held[layers, heads] += 1
    total_bytes = sum(memoryview(payload).nbytes for _, payload in pieces)
    row_bytes, rest = divmod(total_bytes, 2 * num_layers * num_heads * num_tokens)
    if (times_held != 1).any() or rest:
        raise Incompatible("the ranks of the other worker do not hold all of this KV once")
    rows = np.empty((num_layers, 2, num_heads, num_tokens, row_bytes), np.uint8)
    for (layers, heads), (_, payload) in zip(cells, pieces, strict=True):
        view = rows[layers, :, heads]
        if memoryview(payload).nbytes != view.nbytes:
            raise Incompatible("a rank of the other worker sent KV of another size")
        view[...] = np.frombuffer(payload, np.uint8).reshape(view.shape)
    return rows


def _cells(piece: Shard, place: Shard) -> tuple[slice, slice]:
    """Layers and heads of a piece, counted from the place's first."""
    layers = slice(piece.layer_start - place.layer_start, piece.layer_end - place.layer_start)
    return layers, slice(piece.head_start - place.head_start, piece.head_end - place.head_start)


def rows_of(place: Shard, num_tokens: int, payload: KVBytes) -> NDArray[np.uint8]:
    """Canonical bytes of `place` as [layers, 2, heads, num_tokens, row_bytes], not copied."""
    num_layers, num_heads = place.layer_end - place.layer_start, place.head_end - place.head_start
    return np.frombuffer(payload, np.uint8).reshape(num_layers, 2, num_heads, num_tokens, -1)
