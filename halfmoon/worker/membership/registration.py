"""The worker's side of membership: dial the gateway, identify, then report load until told to stop."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable

from halfmoon.errors import Cancelled, DeadlineExceeded, HalfmoonError, Unavailable
from halfmoon.pb import gateway_pb2, gateway_pb2_grpc
from halfmoon.rpc.peer import LONG_LIVED_S, Peer
from halfmoon.worker.membership.block_feed import BlockFeed
from halfmoon.worker.membership.decode_peers import DecodePeers
from halfmoon.worker.store.source_links import SourceLinks

log = logging.getLogger(__name__)

_FIRST_INTERVAL_S = 0.25  # until the gateway's Welcome sets another
_BACKOFF_S = 0.5

_TEMPORARY = (Unavailable, DeadlineExceeded, Cancelled)


class Registration:
    """Owns the membership with one gateway, and the connection to it. `run` lasts as long as it `is_wanted`.

    Reports at the gateway's interval, or every `report_s` if that is shorter.
    """

    def __init__(
        self,
        gateway: Peer,
        identity: gateway_pb2.WorkerIdentity,
        load: Callable[[], gateway_pb2.WorkerLoad],
        blocks: BlockFeed,
        decode_peers: DecodePeers,
        sources: SourceLinks,
        process_key: bytes,
        report_s: float = math.inf,
        on_drain: Callable[[bool], None] = lambda returns: None,
        on_role: Callable[[gateway_pb2.RoleChange], None] = lambda change: None,
    ) -> None:
        """`on_drain(returns)` and `on_role(change)` are called with what operators want of this worker."""
        self._gateway = gateway
        self._address = gateway.address
        self._identity = identity
        self._load = load
        self._blocks = blocks
        self._decode_peers = decode_peers
        self._sources = sources
        self._process_key = process_key
        self._report_s = report_s
        self._on_drain = on_drain
        self._on_role = on_role
        self._interval_s = min(_FIRST_INTERVAL_S, report_s)
        self._hurry = asyncio.Event()
        self._logged_reason = ""  # why the gateway is away
        self._leaves = False
        self.is_wanted = True  # after a loss it registers again

    def report_now(self) -> None:
        """Sends the next load report at once, because something important changed."""
        self._hurry.set()

    def leave(self) -> None:
        """Ends the membership after a last report. `run` returns when the gateway has read everything."""
        self.is_wanted, self._leaves = False, True
        self._hurry.set()

    async def run(self) -> None:
        """Registers, and again after every loss while it is wanted.

        Raises the error with which the gateway refuses this worker.
        """
        async with self._gateway as peer:
            while self.is_wanted:
                try:
                    await self._register(peer)
                    if self._leaves:
                        return
                    log.warning("registration.ended", extra={"gateway": self._address})
                except _TEMPORARY as err:
                    if err.message != self._logged_reason:  # log once, however long the gateway is away
                        log.warning("registration.lost", extra={"gateway": self._address, "reason": err.message})
                    self._logged_reason = err.message
                except HalfmoonError as err:
                    log.error("registration.refused", extra={"gateway": self._address, "reason": err.message})
                    raise
                await asyncio.sleep(_BACKOFF_S)

    async def _register(self, peer: Peer) -> None:
        stub = gateway_pb2_grpc.ClusterStub(peer.channel)
        async with peer.stream(stub.Register, self._messages(), deadline_s=LONG_LIVED_S) as answers:
            async for answer in answers:
                if answer.HasField("welcome"):
                    self._interval_s = min(answer.welcome.heartbeat_interval_s, self._report_s)
                    self._logged_reason = ""
                    self._decode_peers.begin_anew(self._address)
                    self._sources.begin_anew(self._address)
                    log.info("registration.welcome", extra={"gateway_id": answer.welcome.gateway_id})
                elif answer.HasField("resend_blocks"):
                    self._blocks.begin_anew()
                elif answer.HasField("decode_members"):
                    members = answer.decode_members
                    self._decode_peers.change(self._address, members.joined, members.left)
                elif answer.HasField("cache_members"):
                    workers = answer.cache_members
                    self._sources.change_workers(self._address, workers.joined, workers.left)
                elif answer.HasField("drain"):
                    self._on_drain(answer.drain.returns)
                elif answer.HasField("change_role"):
                    self._on_role(answer.change_role)
                elif answer.HasField("stores"):
                    await self._sources.name_stores(self._address, answer.stores.addresses)

    async def _messages(self) -> AsyncIterator[gateway_pb2.WorkerMessage]:
        yield gateway_pb2.WorkerMessage(identity=self._identity, process_key=self._process_key)
        self._blocks.begin_anew()
        while True:
            self._hurry.clear()
            is_last = self._leaves
            yield gateway_pb2.WorkerMessage(load=self._load())
            for events in self._blocks.messages():
                yield gateway_pb2.WorkerMessage(blocks=events)
            if is_last:
                return
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._hurry.wait()
            except TimeoutError:
                continue
