"""Admitting the outputs of one HTTP request before their turns: all of them, or none."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.errors import HalfmoonError
from halfmoon.policy.admission.refusal import Refused
from services.gateway.routing.request_routing import RequestRouting
from services.gateway.routing.routing_context import RoutingContext


def reserve_together(context: RoutingContext, routings: Sequence[RequestRouting]) -> None:
    """Reserves all of these, the outputs of one HTTP request, or none. Raises Refused and what placement raises."""
    try:
        _reserve_all(routings)
    except Refused as refusal:
        is_by_targets = refusal.reason in ("ttft", "tbt")
        if not is_by_targets or not context.admission.is_probe(context.clock()):
            raise
        _reserve_all(routings, is_probe=True)


def _reserve_all(routings: Sequence[RequestRouting], *, is_probe: bool = False) -> None:
    try:
        for routing in routings:
            routing.reserve(is_probe=is_probe)
    except HalfmoonError:
        for routing in routings:
            routing.release()
        raise
