"""A member as the gateway is connected to it."""

from __future__ import annotations

import asyncio

from halfmoon.errors import HalfmoonError
from halfmoon.pb.decode_pb2_grpc import DecodeStub
from halfmoon.pb.gateway_pb2 import GatewayMessage
from halfmoon.pb.prefill_pb2_grpc import PrefillStub
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.peer import Peer
from services.gateway.cluster.member import Member

_MOVES_AT_ONCE = 4  # answers that are copied from one worker


class Worker:
    """Owns the connection to one member.

    `gone` gets the reason when the membership ends. Answers that move away take turns (`move_turns`). `has_news` is set
    when there is something to tell the worker: `missed_blocks`, that it has to send all its blocks, other members or
    `stores` than it was `told`, or `orders`.
    """

    def __init__(self, member: Member, credential: Credential | None = None) -> None:
        self.member = member
        self.peer = Peer(member.identity.address, credential, "worker")
        self.prefill = PrefillStub(self.peer.channel)
        self.decode = DecodeStub(self.peer.channel)
        self.has_news = asyncio.Event()
        self.move_turns = asyncio.Semaphore(_MOVES_AT_ONCE)
        self.missed_blocks = False
        self.orders: list[GatewayMessage] = []  # of operators
        self.sent_members: frozenset[str] = frozenset()
        self.sent_stores: frozenset[str] | None = None
        self.sent_caches: frozenset[str] = frozenset()
        self.gone: asyncio.Future[HalfmoonError] = asyncio.get_running_loop().create_future()
