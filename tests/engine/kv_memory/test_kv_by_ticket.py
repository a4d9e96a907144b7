"""What one rank keeps for a ticket is what its memory holds, and what it writes by one is what was kept."""

from __future__ import annotations

import pytest

from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.kv_memory.kv_by_ticket import KVByTicket
from halfmoon.errors import Incompatible, InvalidRequest, Unavailable
from halfmoon.kv.device_bytes import DeviceBytes
from halfmoon.kv.kv_layout import KVLayout, KVSlice, Shard
from halfmoon.kv.staged_shards import Ticket, rows_of

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, dtype="bfloat16", block_tokens=4)
TICKET = Ticket(b"a link's", 3, 7)
BLOCKS, TOKENS = (4, 1), 6
WHERE = (BLOCKS, KVSlice(0, LAYOUT.num_layers, 1, TOKENS))
PAYLOAD = bytes(n % 251 for n in range(TOKENS * LAYOUT.token_bytes))
AWAY = DeviceBytes(len(PAYLOAD), TICKET)


@pytest.fixture
def kv() -> KVByTicket:
    return KVByTicket(KVArena(LAYOUT, 6, "cpu"), LAYOUT)


def test_other_ranks_cut_what_was_read_for_a_ticket(kv: KVByTicket) -> None:
    kv.write(*WHERE, PAYLOAD)
    assert kv.read(*WHERE) == PAYLOAD  # as of the memory
    assert not kv.read(*WHERE, AWAY)
    kv.write(*WHERE, bytes(len(PAYLOAD)))  # a copy is kept
    assert kv.ranks.staged.cut(TICKET, 0, LAYOUT.whole()) == PAYLOAD
    part = rows_of(LAYOUT.whole(), TOKENS, PAYLOAD)[1:2, :, 1:3]
    assert kv.ranks.staged.cut(TICKET, 0, Shard(1, 2, 1, 3)) == part.tobytes()


def test_what_was_fetched_is_written_once(kv: KVByTicket) -> None:
    kv.ranks.staged.put(TICKET, 0, LAYOUT.whole(), rows_of(LAYOUT.whole(), TOKENS, PAYLOAD), 0.0)
    kv.write(*WHERE, AWAY)
    assert kv.read(*WHERE) == PAYLOAD
    assert kv.ranks.staged.num_bytes == 0
    with pytest.raises(Unavailable, match="rank 0 keeps this part of a KV transfer no more"):
        kv.write(*WHERE, AWAY)


def test_what_is_too_short_is_not_written(kv: KVByTicket) -> None:
    kv.ranks.staged.put(TICKET, 0, LAYOUT.whole(), rows_of(LAYOUT.whole(), TOKENS, PAYLOAD)[..., :4], 0.0)
    with pytest.raises(InvalidRequest, match="KV payload has"):
        kv.write(*WHERE, AWAY)


def test_memory_of_a_device_is_the_memorys_own_affair(kv: KVByTicket) -> None:
    with pytest.raises(Incompatible, match="triton"):
        kv.read(*WHERE, DeviceBytes(len(PAYLOAD), object()))
    with pytest.raises(Incompatible, match="triton"):
        kv.write(*WHERE, DeviceBytes(len(PAYLOAD), object()))
