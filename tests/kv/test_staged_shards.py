"""Parts of frames that ranks keep: any cut's parts make any other cut's, and nobody gets another frame's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from halfmoon.errors import Incompatible, InvalidRequest, Unavailable
from halfmoon.kv.kv_layout import Shard
from halfmoon.kv.staged_shards import StagedShards, Ticket, decode_ticket, gathered, overlap, rows_of

LAYERS, HEADS, TOKENS, ROW_BYTES = 4, 4, 3, 2
WHOLE = Shard(0, LAYERS, 0, HEADS)
TICKET = Ticket(b"a link's", 3, 7)

Rows = NDArray[np.uint8]


def kv() -> Rows:
    shape = (LAYERS, 2, HEADS, TOKENS, ROW_BYTES)
    return np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)


def part(rows: Rows, shard: Shard) -> Rows:
    return rows[shard.layer_start : shard.layer_end, :, shard.head_start : shard.head_end]


def cut(stages: int, tensor: int) -> list[Shard]:
    layers, heads = LAYERS // stages, HEADS // tensor
    return [
        Shard(stage * layers, (stage + 1) * layers, rank * heads, (rank + 1) * heads)
        for stage in range(stages)
        for rank in range(tensor)
    ]


def kept(shards: list[Shard], now_s: float = 0.0) -> StagedShards:
    staged = StagedShards()
    for rank, shard in enumerate(shards):
        staged.put(TICKET, rank, shard, part(kv(), shard), now_s)
    return staged


SIZES = st.sampled_from((1, 2, 4))


@given(SIZES, SIZES, SIZES, SIZES)
def test_parts_of_any_cut_make_those_of_any_other(stages: int, tensor: int, to_stages: int, to_tensor: int) -> None:
    shards = cut(stages, tensor)
    staged = kept(shards)
    for wanted in cut(to_stages, to_tensor):
        shared = [(rank, overlap(shard, wanted)) for rank, shard in enumerate(shards)]
        pieces = [(place, staged.cut(TICKET, rank, place)) for rank, place in shared if place is not None]
        assert np.array_equal(gathered(wanted, pieces, TOKENS), part(kv(), wanted))


def test_a_part_is_taken_once_in_canonical_order() -> None:
    staged = kept([WHOLE])
    assert bytes(staged.take(TICKET, 0)) == kv().tobytes()
    assert staged.num_bytes == 0
    with pytest.raises(Unavailable, match="rank 0 keeps this part of a KV transfer no more"):
        staged.take(TICKET, 0)


def test_bytes_are_cut_as_they_were_kept() -> None:
    shard = Shard(1, 3, 2, 4)
    payload = part(kv(), shard).tobytes()
    assert rows_of(shard, TOKENS, payload).tobytes() == payload


def test_a_slot_that_is_used_again_gives_nothing_of_its_earlier_use() -> None:
    staged = kept([WHOLE])
    staged.put(TICKET._replace(use=8), 0, WHOLE, kv() + 1, 0.0)
    with pytest.raises(Unavailable):
        staged.cut(TICKET, 0, WHOLE)
    assert staged.cut(TICKET._replace(use=8), 0, WHOLE) == (kv() + 1).tobytes()


def test_what_nobody_took_is_dropped_in_time() -> None:
    staged = kept([WHOLE], now_s=0.0)
    staged.put(Ticket(b"another."[:8], 0), 0, WHOLE, kv(), 59.0)
    assert staged.num_bytes == 2 * kv().nbytes
    staged.put(Ticket(b"a third."[:8], 0), 0, WHOLE, kv(), 61.0)
    assert staged.num_bytes == 2 * kv().nbytes
    with pytest.raises(Unavailable):
        staged.cut(TICKET, 0, WHOLE)


@pytest.mark.parametrize("place", [Shard(0, 3, 0, 2), Shard(0, 2, 0, 3), Shard(1, 1, 0, 2), Shard(2, 1, 0, 2)], ids=str)
def test_a_rank_gives_only_what_it_has(place: Shard) -> None:
    staged = kept([Shard(0, 2, 0, 2)])
    with pytest.raises(InvalidRequest, match="rank 0 keeps"):
        staged.cut(TICKET, 0, place)


def test_pieces_that_do_not_make_a_part_are_refused() -> None:
    half, other = cut(2, 1)
    payload = part(kv(), half).tobytes()
    twice = [(half, payload), (half, payload)]  # as many bytes as the whole
    for pieces in ([(half, payload)], twice, [*twice, (other, payload)]):
        with pytest.raises(Incompatible, match="do not hold all"):
            gathered(WHOLE, pieces, TOKENS)
    with pytest.raises(Incompatible, match="another size"):
        gathered(WHOLE, [(half, payload + payload), (other, b"")], TOKENS)
    with pytest.raises(InvalidRequest):
        gathered(Shard(1, 1, 0, 2), [], TOKENS)
    with pytest.raises(InvalidRequest):
        gathered(WHOLE, [], 0)


def test_tickets_travel_as_bytes() -> None:
    assert decode_ticket(TICKET.encoded()) == TICKET
    with pytest.raises(InvalidRequest, match="20 bytes"):
        decode_ticket(TICKET.encoded()[:-1])
