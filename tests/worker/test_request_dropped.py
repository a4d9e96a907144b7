"""A request that is gone is told of once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from halfmoon.errors import Cancelled
from halfmoon.worker.request_dropped import RequestDropped


async def test_the_news_is_told_once_and_not_after_the_end(start_worker: Callable[..., Awaitable[Any]]) -> None:
    engine = (await start_worker("prefill")).async_engine
    gone, late = RequestDropped(engine), RequestDropped(engine)
    gone.tell()
    gone.tell()
    with pytest.raises(Cancelled):
        await gone.told
    gone.close()
    late.close()
    late.tell()
    late.close()
    assert late.told.cancelled()
