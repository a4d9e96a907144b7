"""A dropped request is reported once."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from halfmoon.errors import Cancelled
from halfmoon.worker.servicers.request_dropped import RequestDropped


async def test_a_drop_is_reported_once_and_not_after_close(start_worker: Callable[..., Awaitable[Any]]) -> None:
    engine = (await start_worker("prefill")).async_engine
    dropped, late = RequestDropped(engine), RequestDropped(engine)
    dropped.notify()
    dropped.notify()
    with pytest.raises(Cancelled):
        await dropped.event
    dropped.close()
    late.close()
    late.notify()
    late.close()
    assert late.event.cancelled()


async def test_a_drop_that_nobody_waits_for_is_no_error_in_the_log(
    start_worker: Callable[..., Awaitable[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """A client that leaves while its request enters the engine ends the call before it listens."""
    engine = (await start_worker("prefill")).async_engine
    dropped = RequestDropped(engine)
    dropped.notify()
    del dropped
    gc.collect()
    assert "never retrieved" not in caplog.text
