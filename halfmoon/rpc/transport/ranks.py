"""The transport `ranks`: payloads that the ranks of two workers pass on among themselves, each from its own host.

Frames, reservation, credits and COMMIT stay between the two first ranks. A frame's reference is a ticket, under which
each of the sender's ranks keeps its part; the receiver has each of its own ranks fetch what it needs, from whichever
ranks have it, before it writes. So workers may be cut differently, and a part whose two ranks are on one host crosses
no link.

The digest of such a frame covers only its header and its reference: each fetched part has a digest of its own. Encoded
frames use another transport: codecs compute at the first rank.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from dataclasses import replace
from itertools import count

from google.protobuf.message import DecodeError

from halfmoon.errors import HalfmoonError, Incompatible, InvalidRequest
from halfmoon.kv.device_bytes import DeviceBytes
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import Shard
from halfmoon.kv.negotiation import Offer
from halfmoon.kv.staged_shards import RankShard, Ticket, WorkerRanks, decode_ticket, overlap
from halfmoon.pb import rank_kv_pb2
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transport.protocol import StagingBuffer
from halfmoon.rpc.transport.rank_fetches import RankFetches, fetch_there, reach_there, shard_from, shard_message

NAME = "ranks"

_OWNER_BYTES = 8
_MAX_REACHED = 256


class RankLinks:
    """Owns how this worker's ranks reach others, and others them. For all links of a process, both ways."""

    name = NAME

    def __init__(self, ranks: WorkerRanks, credential: Credential | None = None) -> None:
        self.ranks = ranks
        self.fetches = RankFetches(ranks.staged, credential)
        self._address: str | None = None
        self._own = {
            rank.address: Peer(rank.address, credential, "worker") for rank in ranks.shards if rank.address is not None
        }
        self._reached: set[tuple[RankShard, ...]] = set()

    def announce(self, address: str) -> None:
        """Notes where this worker's own server is reached: nothing is offered before."""
        self._address = address

    @property
    def offer(self) -> Offer:
        """Every shard and where it is. Raises Incompatible before `announce`."""
        if self._address is None:
            raise Incompatible("the worker does not serve yet")
        held = zip(self.ranks.shards, self.ranks.readable, strict=True)
        shards = [replace(rank, address=rank.address or self._address) for rank, readable in held if readable]
        message = rank_kv_pb2.RankShards(shards=map(shard_message, shards), dtype=self.ranks.dtype)
        return Offer(NAME, message.SerializeToString())

    async def join(self, parameters: bytes) -> _RankSource:
        """Takes a sender's shards once all ranks here have reached those there.

        Raises InvalidRequest, Incompatible for KV of another dtype or where it has but one way, and why a rank cannot
        be reached.
        """
        try:
            message = rank_kv_pb2.RankShards.FromString(parameters)
        except DecodeError as err:
            raise InvalidRequest("an offer of ranks cannot be parsed") from err
        if message.dtype != self.ranks.dtype:
            raise Incompatible(f"ranks pass KV on as it is: {message.dtype} there, {self.ranks.dtype} here")
        sources = tuple(map(shard_from, message.shards))
        if any(source.address is None for source in sources):
            raise InvalidRequest("an offer of ranks must say where each is")
        if not self.ranks.spans_hosts and len({source.address for source in sources}) == 1:
            raise Incompatible("the ranks of each worker are on one host: the first ones do as well")
        if sources not in self._reached:
            await self._reach(sources)
            if len(self._reached) >= _MAX_REACHED:  # most are of workers that are gone
                self._reached.clear()
            self._reached.add(sources)
        return _RankSource(self, sources)

    async def bring(
        self, sources: tuple[RankShard, ...], ticket: Ticket, wanted: RankShard, num_tokens: int, kept_as: Ticket
    ) -> None:
        """Has one rank fetch its share. Raises the reason why it cannot; the next transfer then tries anew."""
        peer = None if wanted.address is None else self._own[wanted.address]
        try:
            if peer is None:
                await self.fetches.fetch(sources, ticket, wanted, num_tokens, kept_as)
            else:
                await fetch_there(peer, sources, ticket, wanted, num_tokens, kept_as)
        except HalfmoonError:
            self._reached.discard(sources)
            raise

    async def aclose(self) -> None:
        """Closes all channels."""
        for peer in self._own.values():
            await peer.close()
        await self.fetches.close()

    def close(self) -> None:
        """See `Inlet.close`: channels are closed by `aclose`."""
        self._reached.clear()

    async def _reach(self, sources: tuple[RankShard, ...]) -> None:
        reaching = []
        for own in {rank.address: rank for rank in self.ranks.shards}.values():
            mine = [rank.shard for rank in self.ranks.shards if rank.address == own.address]
            needed = [source for source in sources if any(overlap(source.shard, shard) for shard in mine)]
            if own.address is None:
                reaching.append(self.fetches.reach(source.address for source in needed))
            else:
                reaching.append(reach_there(self._own[own.address], needed))
        await asyncio.gather(*reaching)


class RanksOutlet:
    """Owns one link's slots: each of the sender's ranks keeps its part of what is in one."""

    name = NAME

    def __init__(self, links: RankLinks | None, num_slots: int, slot_bytes: int) -> None:
        """Raises Incompatible for a process without an engine's ranks."""
        if links is None:
            raise Incompatible("there are no ranks here to pass KV on")
        self._links = links
        self._owner = os.urandom(_OWNER_BYTES)
        self._slot_bytes = slot_bytes
        self._uses = [0] * num_slots
        self._free = list(reversed(range(num_slots)))

    def offer(self) -> Offer:
        """The ranks and where they are."""
        return self._links.offer

    def charge_bytes(self, num_bytes: int) -> int:
        """Size of a whole slot."""
        return self._slot_bytes

    def room(self, num_bytes: int) -> StagingBuffer:
        """A slot, which only the ranks can fill."""
        slot = self._free.pop()
        self._uses[slot] += 1
        ticket = Ticket(self._owner, slot, self._uses[slot])
        device = DeviceBytes(num_bytes, ticket)
        nothing = memoryview(bytearray())
        return StagingBuffer(nothing, self._slot_bytes, slot, ticket.encoded(), weakref.ref(device), device)

    def hold(self, payload: memoryview) -> StagingBuffer:
        """Places a payload of this process inside its message."""
        return StagingBuffer(payload, self._slot_bytes, bytearray())

    def reuse(self, buffer: StagingBuffer) -> None:
        """Frees the slot, which is used next."""
        if isinstance(buffer.memory, int):
            self._free.append(buffer.memory)

    def close(self) -> None:
        """No-op: what the ranks still keep is dropped in time."""


class _RankSource:
    """A sender's ranks as seen by one transfer."""

    def __init__(self, links: RankLinks, sources: tuple[RankShard, ...]) -> None:
        self._links = links
        self._sources = sources
        self._owner = os.urandom(_OWNER_BYTES)
        self._numbers = count()

    async def fetch(self, reference: bytes, num_bytes: int) -> DeviceBytes:
        """What the reference names, still at the sender: `AwaitedParts` brings it."""
        return DeviceBytes(num_bytes, AwaitedParts(self, decode_ticket(reference)))

    def is_intact(self, reference: bytes) -> bool:
        """Always: a part is copied whole, and is found only under the use of its slot."""
        return True

    def close(self) -> None:
        """No-op: parts that were fetched and not written are dropped in time."""

    async def brought(self, ticket: Ticket, part: KVRange) -> Ticket:
        """Has each rank fetch its share of a frame; returns the ticket under which they keep it."""
        kept_as = Ticket(self._owner, next(self._numbers))
        frame = Shard(part.layer_start, part.layer_end, part.head_start, part.head_end)
        shares = [(rank, overlap(rank.shard, frame)) for rank in self._links.ranks.shards]
        await asyncio.gather(
            *(
                self._links.bring(self._sources, ticket, replace(rank, shard=share), part.num_tokens, kept_as)
                for rank, share in shares
                if share is not None
            )
        )
        return kept_as


class AwaitedParts:
    """One frame's payload before the receiver's ranks have fetched it."""

    def __init__(self, source: _RankSource, ticket: Ticket) -> None:
        self._source = source
        self._ticket = ticket

    async def brought(self, part: KVRange, num_bytes: int) -> DeviceBytes:
        """The payload, once every rank keeps its share of `part`. Raises Unavailable, Incompatible."""
        return DeviceBytes(num_bytes, await self._source.brought(self._ticket, part))
