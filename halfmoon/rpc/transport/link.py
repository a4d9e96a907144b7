"""What successive transfers from this process to one receiver share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from halfmoon.errors import HalfmoonError, Incompatible, InvalidRequest
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES
from halfmoon.kv.negotiation import INLINE, Acceptance, Offer
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transport.cuda_ipc import NAME as CUDA_IPC
from halfmoon.rpc.transport.cuda_ipc import CudaIpcOutlet, DeviceMemory
from halfmoon.rpc.transport.estimate import LinkEstimator
from halfmoon.rpc.transport.inline import InlineOutlet
from halfmoon.rpc.transport.limiter import Clock, LinkLimiter, WallClock
from halfmoon.rpc.transport.nixl import NAME as NIXL
from halfmoon.rpc.transport.nixl import NixlOutlet
from halfmoon.rpc.transport.protocol import Outlet, StagingBuffer
from halfmoon.rpc.transport.ranks import NAME as RANKS
from halfmoon.rpc.transport.ranks import RankLinks, RanksOutlet
from halfmoon.rpc.transport.shm import NAME as SHM
from halfmoon.rpc.transport.shm import SharedMemoryOutlet
from halfmoon.rpc.transport.window import Share, Window

log = logging.getLogger(__name__)

_OFFER_AGAIN_S = 60.0  # a receiver that declined may have been restarted by then

_NAMES = (CUDA_IPC, SHM, NIXL, INLINE)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How this process sends KV.

    Raises InvalidRequest for an unknown transport, or a window too small for two frames.
    """

    transports: tuple[str, ...] = (SHM,)  # offered in this order; `grpc` is the fallback
    window_bytes: int = 32 << 20  # most bytes in flight on one link
    stall_s: float = 10.0  # a link without progress for this long has failed
    batch_s: float = 0.0  # frames wait until they take the link this long; for senders whose cores compute meanwhile
    bytes_per_s: float | None = None  # for experiments: throttles the link
    delay_s: float = 0.0  # for experiments: one way

    def __post_init__(self) -> None:
        for name in self.transports:
            if name not in _NAMES:
                raise InvalidRequest(f"no KV transport is called {name!r}: there are {', '.join(_NAMES)}")
        if self.window_bytes < 2 * MAX_PAYLOAD_BYTES:
            raise InvalidRequest(f"a KV link needs a window of at least {2 * MAX_PAYLOAD_BYTES} bytes")


class KVLink:
    """Owns the channel to one receiver, its outlets, its window and the estimate of its speed.

    `on_fallback` is called with the name of each transport that was offered and could not be used. `device` holds
    `cuda_ipc`'s memory. `ranks` pass KV on to the receiver's: see `_in_order`.
    """

    def __init__(
        self,
        peer: Peer,
        settings: LinkSettings | None = None,
        on_fallback: Callable[[str], None] = lambda transport: None,
        device: DeviceMemory | None = None,
        ranks: RankLinks | None = None,
    ) -> None:
        self.peer = peer
        self.settings = settings or LinkSettings()
        self.window = Window(self.settings.window_bytes)
        self.estimator = LinkEstimator()
        self.raw_estimator = LinkEstimator()  # of raw frames alone: others wait for their decoder, too
        self.clock: Clock = WallClock()
        self.limiter: LinkLimiter | None = None
        if self.settings.bytes_per_s is not None or self.settings.delay_s:
            self.limiter = LinkLimiter(self.settings.bytes_per_s, self.settings.delay_s)
        self._on_fallback = on_fallback
        self._inline = InlineOutlet()
        self._new_outlet: dict[str, Callable[[int, int], Outlet]] = {
            CUDA_IPC: partial(CudaIpcOutlet, device),
            SHM: SharedMemoryOutlet,
            RANKS: partial(RanksOutlet, ranks),
        }
        self._transports = _in_order(self.settings.transports, ranks)
        self._outlets: dict[str, Outlet] = {}
        self._making = asyncio.Lock()  # guards creating an outlet, which the next transfer will use, too
        self._declined_at_s: dict[str, float] = {}
        self._parked: list[tuple[Outlet, StagingBuffer, Share]] = []  # of ended transfers, possibly still being filled

    def estimators(self, codec: Codec) -> tuple[LinkEstimator, ...]:
        """The estimators that frames in `codec` are measured by."""
        return (self.estimator, self.raw_estimator) if codec is Codec.RAW else (self.estimator,)

    @property
    def batch_bytes(self) -> float:
        """The fewest bytes that are sent while more will come: what fits in `batch_s`.

        0 before the first transfer, and over a slow link, to which a single frame is a batch.
        """
        estimate = self.estimator.estimate
        if estimate is None or not self.settings.batch_s:
            return 0.0
        num_bytes = min(self.settings.batch_s * estimate.bandwidth_bytes_per_s, self.settings.window_bytes)
        return num_bytes if num_bytes > MAX_PAYLOAD_BYTES else 0.0

    async def offers(self, codec: Codec = Codec.RAW) -> list[Offer]:
        """Offers to make now for a transfer in `codec`, best first."""
        async with self._making:
            return [outlet.offer() for outlet in await self._usable(codec)]

    def chosen(self, acceptance: Acceptance) -> Outlet:
        """Applies the receiver's decision. Raises Incompatible for a transport that was not offered."""
        for name, reason in acceptance.declined:
            self._fall_back(name, reason)
        if acceptance.name == INLINE:
            return self._inline
        if acceptance.name not in self._outlets:
            raise Incompatible(f"the receiver chose the transport {acceptance.name!r}, which was not offered")
        return self._outlets[acceptance.name]

    async def passed(self, num_bytes: int) -> None:
        """Returns when `num_bytes` would be through, if the link is throttled."""
        if self.limiter is not None:
            now_s = self.clock.time()
            await self.clock.sleep(self.limiter.arrival_s(num_bytes, now_s) - now_s)

    def abandon(self, outlet: Outlet, buffer: StagingBuffer, share: Share) -> None:
        """Returns a buffer that was never sent: it becomes free once no one fills it."""
        self._parked.append((outlet, buffer, share))
        self.unpark()

    def unpark(self) -> None:
        """Frees the buffers of ended transfers that are no longer being filled."""
        parked, self._parked = self._parked, []
        for outlet, buffer, share in parked:
            if buffer.release():
                outlet.reuse(buffer)
                self.window.give_back(share, buffer.charge_bytes)
            else:
                self._parked.append((outlet, buffer, share))

    async def close(self) -> None:
        """Closes the channel and releases all shared memory."""
        for outlet in (*self._outlets.values(), self._inline):
            outlet.close()
        await self.peer.close()

    async def _usable(self, codec: Codec) -> list[Outlet]:
        now_s = self.clock.time()
        usable = []
        for name in self._transports:
            if name in (CUDA_IPC, RANKS) and codec is not Codec.RAW:
                continue
            declined_at_s = self._declined_at_s.get(name)
            if name == INLINE or (declined_at_s is not None and now_s - declined_at_s < _OFFER_AGAIN_S):
                continue
            if name not in self._outlets:
                try:
                    self._outlets[name] = await self._made(name)
                except (OSError, HalfmoonError) as err:
                    self._fall_back(name, str(err))
                    continue
            usable.append(self._outlets[name])
        return usable

    async def _made(self, name: str) -> Outlet:
        num_slots = self.settings.window_bytes // MAX_PAYLOAD_BYTES
        if name == NIXL:  # looks for devices: takes tenths of a second
            return await asyncio.to_thread(NixlOutlet, num_slots, MAX_PAYLOAD_BYTES)
        return self._new_outlet[name](num_slots, MAX_PAYLOAD_BYTES)

    def _fall_back(self, name: str, reason: str) -> None:
        level = logging.INFO if name not in self._declined_at_s else logging.DEBUG  # once per peer
        log.log(level, "kv.fallback", extra={"transport": name, "peer": self.peer.address, "reason": reason})
        self._declined_at_s[name] = self.clock.time()
        self._on_fallback(name)


def _in_order(transports: tuple[str, ...], ranks: RankLinks | None) -> tuple[str, ...]:
    """All transports to offer, best first.

    Ranks on several hosts send from each. Those of one host use memory that they share with the receiver's first rank
    if they can: its other hosts then get their part over one link, as they would from here.
    """
    if ranks is None:
        return transports
    return (RANKS, *transports) if ranks.ranks.spans_hosts else (*transports, RANKS)
