"""Admitting the outputs of one HTTP request before their turns: all of them, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from halfmoon.errors import HalfmoonError
from halfmoon.policy.admission.refusal import Refused
from services.gateway.routing.request_routing import RequestRouting
from services.gateway.routing.routing_context import RoutingContext

_AT_ONCE = 8  # placements between which the event loop does nothing else: half a millisecond each
_PAUSE_S = 0.001  # between them


async def reserve_together(context: RoutingContext, routings: Sequence[RequestRouting]) -> None:
    """Reserves all of these, the outputs of one HTTP request, or none. Raises Refused and what placement raises."""
    try:
        await _reserve_all(routings)
    except Refused as refusal:
        is_by_targets = refusal.reason in ("ttft", "tbt")
        if not is_by_targets or not context.admission.is_probe(context.clock()):
            raise
        await _reserve_all(routings, is_probe=True)


async def _reserve_all(routings: Sequence[RequestRouting], *, is_probe: bool = False) -> None:
    try:
        for number, routing in enumerate(routings, start=1):
            routing.reserve(is_probe=is_probe)
            if number % _AT_ONCE == 0:
                await asyncio.sleep(_PAUSE_S)
    except HalfmoonError:
        for routing in routings:
            routing.release()
        raise
