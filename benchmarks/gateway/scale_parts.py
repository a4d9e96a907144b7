"""Costs of a large cluster that need none to be measured, and what one would need by all of them.

Rows of requests are written to a ledger as fast as it takes them. Of the index of blocks, which a gateway keeps of all
workers and stores, messages of 24 blocks stored and 24 evicted are applied one by one: what a prompt of 1,500 tokens
causes at a worker whose cache is full.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from halfmoon.ledger.ledger import open_ledger
from halfmoon.ledger.models import RequestRow
from halfmoon.policy.view.block_index import BlockEvents, BlockIndex

_NUM_ROWS = 20_000
_BLOCKS_A_HOLDER = 10_000  # of 64 tokens
_PROMPT_BLOCKS = 24
_FILLED = 0.7  # of a core: above that requests wait for each other
_MESSAGES_A_REQUEST = 2  # to each gateway: its blocks at the prefill worker and at the decode worker


class Costs(NamedTuple):
    """CPU of one gateway."""

    idle: Sequence[tuple[int, float]]  # numbers of workers, and the share of a core while nothing is asked
    request_s: float
    index_s: float  # for one message of blocks


def needed(costs: Costs, num_workers: int, rate: float) -> list[str]:
    """Lines on what `rate` requests a second over so many workers need. A worker reports to each gateway."""
    workers, shares = zip(*costs.idle, strict=True)
    slope, base = np.polyfit(workers, shares, 1)
    reports, events = slope * num_workers, rate * _MESSAGES_A_REQUEST * costs.index_s
    fixed = base + reports + events
    lines = [
        f"{num_workers} workers, {rate:.0f} requests/s, on paper; each worker's reports: {1e3 * slope:.2f} ms of CPU/s",
        f"each gateway uses {100 * fixed:.0f} % of a core, however many there are: {100 * base:.0f} alone, "
        f"{100 * reports:.0f} for reports, {100 * events:.0f} for block events",
    ]
    if fixed >= _FILLED:
        return [*lines, "no number of gateways is enough: divide the workers among groups of gateways"]
    gateways = math.ceil(rate * costs.request_s / (_FILLED - fixed))
    return [
        *lines,
        f"{gateways} gateways with {100 * _FILLED:.0f} % of a core used, at {1e3 * costs.request_s:.1f} ms a request",
        f"{num_workers * gateways} reports/s in all, {gateways} by each worker",
    ]


async def ledger_rate(url: str) -> tuple[float, float]:
    """Rows per second that a ledger takes, and CPU seconds of this process for a row."""
    async with open_ledger(url) as ledger:
        rows = [_row(number) for number in range(_NUM_ROWS)]
        cpu_s, started_s = time.process_time(), time.perf_counter()
        for row in rows:
            while not ledger.record(row):  # noqa: ASYNC110 (its queue is full)
                await asyncio.sleep(0.001)
        while len(await ledger.recent(1)) == 0 or not await _has(ledger, rows[-1].request_id):  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.01)
        return _NUM_ROWS / (time.perf_counter() - started_s), (time.process_time() - cpu_s) / _NUM_ROWS


def index_cost(num_holders: int) -> tuple[float, float]:
    """CPU seconds for one holder's message, and bytes for each block and holder."""
    index, random = BlockIndex(), np.random.default_rng(0)
    keys = random.integers(1, 1 << 63, (num_holders, _BLOCKS_A_HOLDER + _PROMPT_BLOCKS), dtype=np.uint64)
    for holder in range(num_holders):
        number = index.number(str(holder))
        index.apply(number, BlockEvents(0, keys[holder, :_BLOCKS_A_HOLDER], is_snapshot=True))
    num_bytes = index.num_bytes / index.num_pairs
    started_s = time.process_time()
    for holder in range(num_holders):
        evicted, stored = keys[holder, :_PROMPT_BLOCKS], keys[holder, _BLOCKS_A_HOLDER:]
        assert index.apply(index.number(str(holder)), BlockEvents(1, stored, evicted))
    return (time.process_time() - started_s) / num_holders, num_bytes


async def _has(ledger: Any, request_id: str) -> bool:
    return await ledger.outcomes.of(request_id) is not None


def _row(number: int) -> RequestRow:
    return RequestRow(
        request_id=f"cmpl-{time.time_ns():x}-{number}",
        created_at=datetime.now(UTC),
        model="demo",
        endpoint="completions",
        status="ok",
        http_status=200,
        prompt_tokens=1_500,
        cached_tokens=512,
        output_tokens=300,
        finish_reason="stop",
        prefill_worker="prefill-1",
        decode_worker="decode-1",
        ttft_s=0.2,
        e2e_s=6.0,
        num_retries=0,
        num_outputs=1,
        qos_class="default",
    )
