"""What a worker tells of its blocks, an index that hears it knows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.pb.gateway_pb2 import BlockEvents as PbBlockEvents
from halfmoon.policy.view.block_index import BlockEvents, BlockIndex, short_keys, unpack_keys
from halfmoon.worker.membership.block_feed import BlockFeed, CachedBlocks

KEYS = [bytes([number]) * 16 for number in range(1, 30)]
CHANGES = st.tuples(st.sets(st.sampled_from(KEYS)), st.sets(st.sampled_from(KEYS)), st.booleans(), st.booleans())


class Gateway:
    """Hears a feed, as the gateway does."""

    def __init__(self, feed: BlockFeed) -> None:
        self.feed = feed
        self.index = BlockIndex()
        self.number = self.index.number("w")

    def hear(self) -> None:
        assert all(self.apply(message) for message in self.feed.messages())

    def apply(self, message: PbBlockEvents) -> bool:
        stored, evicted = unpack_keys(message.stored), unpack_keys(message.evicted)
        return self.index.apply(self.number, BlockEvents(message.sequence, stored, evicted, message.is_snapshot))

    def knows(self) -> set[bytes]:
        return {key for key in KEYS if self.index.match(short_keys([key]))[self.number]}


@given(st.lists(CHANGES, max_size=12))
def test_the_gateway_knows_what_is_cached(changes: list[tuple[set[bytes], set[bytes], bool, bool]]) -> None:
    cached, held = CachedBlocks(), set[bytes]()
    gateways = [Gateway(cached.feed()), Gateway(cached.feed())]
    for stored, evicted, first_hears, second_begins_anew in changes:
        stored, evicted = stored - held, (evicted & held) - stored  # as a prefix cache tells it
        cached.change(stored, evicted)
        held = (held | stored) - evicted
        if first_hears:
            gateways[0].hear()
            assert gateways[0].knows() == held
        if second_begins_anew:
            gateways[1].feed.begin_anew()
    for gateway in gateways:
        gateway.hear()
        assert gateway.knows() == held
        assert gateway.index.num_pairs == len(held)
        assert list(gateway.feed.messages()) == []


def test_a_long_snapshot_goes_on_in_later_messages() -> None:
    cached = CachedBlocks()
    many = [number.to_bytes(8, "little") + bytes(8) for number in range(1, 250_001)]
    cached.change(many, ())
    gateway = Gateway(cached.feed())
    messages = list(gateway.feed.messages())
    assert [message.is_snapshot for message in messages] == [True, False, False]
    assert max(message.ByteSize() for message in messages) < 1 << 20
    assert all(map(gateway.apply, messages))
    assert gateway.index.num_pairs == len(many)


def test_after_a_lost_message_a_snapshot_sets_it_right() -> None:
    cached = CachedBlocks()
    gateway = Gateway(cached.feed())
    gateway.hear()
    cached.change(KEYS[:2], ())
    list(gateway.feed.messages())  # lost
    cached.change(KEYS[2:4], ())
    assert not all(map(gateway.apply, gateway.feed.messages()))
    gateway.feed.begin_anew()
    gateway.hear()
    assert gateway.knows() == set(KEYS[:4])
