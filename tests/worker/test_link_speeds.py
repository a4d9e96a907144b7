"""What hand-overs took is in the next load report, and where KV lay on its way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.errors import InvalidRequest
from halfmoon.pb import prefill_pb2
from halfmoon.worker.main import link_settings
from halfmoon.worker.settings import WorkerSettings
from tests.worker.conftest import RunningWorker
from tests.worker.test_handover import generation, listening, prefilled

Start = Callable[..., Awaitable[RunningWorker]]


async def test_a_load_report_names_the_links_and_their_speed(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    assert not prefill.state.load(prefill.async_engine, prefill.servicer.links()).links
    async with listening(decode):
        request = prefill_pb2.PrefillRequest(
            generation=generation(tiny, [5] * 30, 4), decode_address=decode.peer.address
        )
        await prefilled(prefill, request)
    (link,) = prefill.state.load(prefill.async_engine, prefill.servicer.links()).links
    assert link.address == decode.peer.address
    assert link.bandwidth_bytes_per_s > 0
    assert link.latency_s >= 0


def test_the_settings_of_a_link_are_a_workers() -> None:
    told = WorkerSettings(
        role="prefill", gateway="g:1", kv_transports="shm, grpc", kv_window="8MiB", kv_link_mbps=50, kv_link_delay_ms=5
    )
    found = link_settings(told)
    assert found.transports == ("shm", "grpc")
    assert (found.window_bytes, found.bytes_per_s, found.delay_s, found.stall_s) == (8 << 20, 50e6, 0.005, 10.0)
    with pytest.raises(InvalidRequest, match="pigeon"):
        link_settings(WorkerSettings(role="prefill", gateway="g:1", kv_transports="pigeon"))
