"""KV from rank to rank: each host serves what its ranks keep, and fetches what they need from others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc

from halfmoon.errors import InvalidRequest
from halfmoon.kv.frame import Frame, FrameKind, KVRange, decode_frame, encode_frame
from halfmoon.kv.kv_layout import Shard
from halfmoon.kv.staged_shards import RankShard, StagedShards, Ticket, decode_ticket, gathered, overlap
from halfmoon.pb import rank_kv_pb2, rank_kv_pb2_grpc
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.peer import Peer

BYTES_SERVICE = "halfmoon.RankKVBytes"

_READ = f"/{BYTES_SERVICE}/Read"
_FETCH_S = 10.0  # to bring one frame's part, or to find that its rank is gone
_REACH_S = 3.0  # a first token waits for it where packets are dropped: once a minute, as often as links are offered
_MAX_IDLE = 64  # addresses change when workers restart; channels to old ones must not pile up
_NO_TRANSFER = bytes(16)


@dataclass(slots=True)
class _Channel:
    peer: Peer
    num_calls: int = 0


class RankFetches:
    """Owns the channels from this host to ranks of other workers. `staged`: where this host's ranks keep parts."""

    def __init__(self, staged: StagedShards, credential: Credential | None = None) -> None:
        self._staged = staged
        self._credential = credential
        self._channels: dict[str, _Channel] = {}  # by address, the least recently used first

    async def fetch(
        self, sources: Sequence[RankShard], ticket: Ticket, wanted: RankShard, num_tokens: int, kept_as: Ticket
    ) -> None:
        """Brings what `wanted` lacks of a frame, as a part of `kept_as`.

        Raises Unavailable when a source is gone or keeps it no more, Incompatible unless the sources have all of it.
        """
        places = [(source, overlap(source.shard, wanted.shard)) for source in sources]
        needed = [(source, place) for source, place in places if place is not None]
        payloads = await asyncio.gather(*(self._read(source, ticket, place) for source, place in needed))
        pieces = [(place, payload) for (_, place), payload in zip(needed, payloads, strict=True)]
        rows = gathered(wanted.shard, pieces, num_tokens)
        self._staged.put(kept_as, wanted.rank, wanted.shard, rows, time.monotonic())

    async def reach(self, addresses: Iterable[str | None]) -> None:
        """Raises Unavailable unless every address answers, or the refusal with which one does."""
        empty = encode_frame(Frame(FrameKind.RENEW, _NO_TRANSFER, 0, 0))
        named = sorted({address or "" for address in addresses})
        await asyncio.gather(*(self._call(address, empty, _REACH_S) for address in named))

    async def close(self) -> None:
        """Closes the channels."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.peer.close()

    async def _read(self, source: RankShard, ticket: Ticket, place: Shard) -> bytes | bytearray | memoryview:
        where = KVRange(place.layer_start, place.layer_end, place.head_start, place.head_end)
        request = Frame(FrameKind.OPEN, _NO_TRANSFER, 0, source.rank, where, payload=ticket.encoded())
        return decode_frame(await self._call(source.address or "", encode_frame(request), _FETCH_S)).payload

    async def _call(self, address: str, message: bytes, deadline_s: float) -> bytes:
        channel = self._channels.pop(address, None) or _Channel(Peer(address, self._credential, "worker"))
        self._channels[address] = channel
        channel.num_calls += 1
        try:
            method = channel.peer.channel.unary_unary(_READ)
            answer: bytes = await channel.peer.call(method, message, deadline_s=deadline_s)
        finally:
            channel.num_calls -= 1
            await self._close_idle()
        return answer

    async def _close_idle(self) -> None:
        idle = [address for address, channel in self._channels.items() if not channel.num_calls]
        for channel in [self._channels.pop(address) for address in idle[: max(0, len(idle) - _MAX_IDLE)]]:
            await channel.peer.close()


class RankKVServicer(rank_kv_pb2_grpc.RankKVServicer):
    """halfmoon.RankKV: what the ranks of this host keep, and what they fetch."""

    def __init__(self, staged: StagedShards, fetches: RankFetches) -> None:
        self._staged = staged
        self._fetches = fetches

    async def Fetch(
        self, request: rank_kv_pb2.FetchRequest, context: grpc.aio.ServicerContext
    ) -> rank_kv_pb2.FetchResponse:
        """See rank_kv.proto."""
        sources = [shard_from(message) for message in request.sources]
        if any(source.address is None for source in sources):
            raise InvalidRequest("a rank can only be read at an address")
        if not request.ticket:
            await self._fetches.reach(source.address for source in sources)
            return rank_kv_pb2.FetchResponse()
        ticket, kept_as = decode_ticket(request.ticket), decode_ticket(request.kept_as)
        await self._fetches.fetch(sources, ticket, shard_from(request.wanted), request.num_tokens, kept_as)
        return rank_kv_pb2.FetchResponse()

    async def read(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Answers a frame that names a ticket, a rank and a place with one that has its bytes."""
        request = decode_frame(message)
        if request.kind is not FrameKind.OPEN:  # whether anybody is here
            return encode_frame(request)
        r = request.range
        place = Shard(r.layer_start, r.layer_end, r.head_start, r.head_end)
        payload = self._staged.cut(decode_ticket(request.payload), request.sequence, place)
        return encode_frame(Frame(FrameKind.DATA, _NO_TRANSFER, 0, request.sequence, r, payload=payload))

    def registrations(self) -> tuple[Callable[[grpc.aio.Server], None], ...]:
        """Adds both services to a server."""

        def add_bytes(server: grpc.aio.Server) -> None:
            methods = {"Read": grpc.unary_unary_rpc_method_handler(self.read)}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BYTES_SERVICE, methods),))

        return (lambda server: rank_kv_pb2_grpc.add_RankKVServicer_to_server(self, server)), add_bytes


async def fetch_there(
    peer: Peer, sources: Sequence[RankShard], ticket: Ticket, wanted: RankShard, num_tokens: int, kept_as: Ticket
) -> None:
    """`RankFetches.fetch` by a rank of another host."""
    request = rank_kv_pb2.FetchRequest(
        sources=map(shard_message, sources),
        ticket=ticket.encoded(),
        wanted=shard_message(wanted),
        num_tokens=num_tokens,
        kept_as=kept_as.encoded(),
    )
    await peer.call(rank_kv_pb2_grpc.RankKVStub(peer.channel).Fetch, request, deadline_s=2 * _FETCH_S)


async def reach_there(peer: Peer, sources: Sequence[RankShard]) -> None:
    """`RankFetches.reach` by a rank of another host."""
    request = rank_kv_pb2.FetchRequest(sources=map(shard_message, sources))
    await peer.call(rank_kv_pb2_grpc.RankKVStub(peer.channel).Fetch, request, deadline_s=2 * _REACH_S)


def shard_message(rank: RankShard) -> rank_kv_pb2.RankShard:
    """The message of a rank's shard."""
    s = rank.shard
    return rank_kv_pb2.RankShard(
        rank=rank.rank,
        address=rank.address or "",
        layer_start=s.layer_start,
        layer_end=s.layer_end,
        head_start=s.head_start,
        head_end=s.head_end,
    )


def shard_from(message: rank_kv_pb2.RankShard) -> RankShard:
    """The rank's shard of a message."""
    shard = Shard(message.layer_start, message.layer_end, message.head_start, message.head_end)
    return RankShard(message.rank, shard, message.address or None)
