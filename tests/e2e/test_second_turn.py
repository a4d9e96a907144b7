"""A second turn is computed by the decode worker that has the first one, and reads as if it had been handed over."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.e2e.conftest import Reference
from tests.e2e.system import running_system
from tests.e2e.test_golden import MAX_TOKENS, completion

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

QUESTION = "The moon rose over the quiet harbour, and the fishermen counted their boats before the tide. " * 10
FOLLOW_UP = " Then the wind turned, and all of them went home."
SLOW_LINK = ("--set", "workers.prefill.kv_link_mbps=2")  # of hand-overs: those of a turn take about a second


async def test_a_second_turn_stays(tmp_path: Path, reference: Reference) -> None:
    options = ("--dtype", "float32", "--quantization", "none", "--conditional-disaggregation", "auto", *SLOW_LINK)
    async with running_system(tmp_path, *options) as system, aiohttp.ClientSession(system.url) as http:
        prompt = QUESTION
        for _ in range(4):
            answer = await completion(http, prompt)
            tokens = answer["choices"][0]["token_ids"]
            assert tokens == reference(prompt, MAX_TOKENS, tokens)
            prompt += answer["choices"][0]["text"] + FOLLOW_UP
        async with http.get("/halfmoon/v1/placements") as response:
            placements = await response.json()
    kept = [placement for placement in placements if placement["disaggregation"].startswith("kept_")]
    assert kept
    assert all(placement["prefill_worker"] == placement["decode_worker"] for placement in kept)
    cached = [placement for placement in kept if placement["disaggregation"] == "kept_cached"]
    assert cached, [placement["disaggregation"] for placement in placements]
    assert all(placement["measured"]["cached_tokens"] for placement in cached)
