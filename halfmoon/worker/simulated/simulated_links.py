"""The modelled KV links of one simulated worker: how long the profile's KV takes, not the few bytes that are moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.transport.estimate import LinkEstimate
from halfmoon.rpc.transport.limiter import LinkLimiter
from halfmoon.sim.latency_sources.worker_profile import WorkerProfile


class SimulatedLinks:
    """Owns when the link out of the worker and the link into it are free. Both have the profile's rate."""

    def __init__(self, profile: WorkerProfile, clock: Callable[[], float]) -> None:
        self._profile = profile
        self._clock = clock
        rate = profile.link_bytes_per_s or None
        self._out = LinkLimiter(rate, profile.link_latency_s)
        self._into = LinkLimiter(rate)

    def crossing_s(self, num_tokens: int) -> float:
        """Puts KV on the link out; returns the seconds until it has arrived."""
        now_s = self._clock()
        return self._out.arrival_s(self._num_bytes(num_tokens), now_s) - now_s

    async def read(self, num_tokens: int) -> None:
        """Returns when KV that somebody else reads has left."""
        await asyncio.sleep(max(self.crossing_s(num_tokens) - self._profile.link_latency_s, 0.0))

    async def load(self, num_tokens: int) -> None:
        """Returns when KV from elsewhere has arrived. The latency is that of the call that brings it."""
        now_s = self._clock()
        await asyncio.sleep(max(self._into.arrival_s(self._num_bytes(num_tokens), now_s) - now_s, 0.0))

    def estimate(self, layout: KVLayout) -> LinkEstimate | None:
        """The speed of the link out in bytes of `layout`, in which gateways count; None if nothing takes time."""
        profile = self._profile
        if not profile.link_bytes_per_s:
            return None
        share = layout.token_bytes / profile.kv_token_bytes
        return LinkEstimate(profile.link_bytes_per_s * share, profile.link_latency_s)

    def _num_bytes(self, num_tokens: int) -> int:
        return num_tokens * self._profile.kv_token_bytes
