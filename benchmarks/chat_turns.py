"""Turns of chats against a running gateway: what is asked, and when each piece of the answer came."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import aiohttp

WORDS = ("harbour", "lantern", "meadow", "copper", "glacier", "violin", "pepper", "thunder", "willow", "canvas")


class TimedAnswer(NamedTuple):
    """One streamed answer."""

    request_id: str
    times_s: list[float]  # from the request to each piece
    text: str


def question(number: int, turn: int, num_words: int) -> dict[str, str]:
    """What chat `number` asks in one of its turns: another text in each."""
    words = [WORDS[(number * 7 + turn * 3 + n * n) % len(WORDS)] for n in range(num_words)]
    return {"role": "user", "content": f"Chat {number}, turn {turn}: {' '.join(words)}"}


async def timed_answer(
    http: aiohttp.ClientSession, model: str, messages: Sequence[Mapping[str, str]], num_tokens: int
) -> TimedAnswer:
    """Asks for exactly `num_tokens`, greedily. Raises aiohttp.ClientError if the gateway refuses."""
    body = {
        "model": model, "messages": messages, "max_tokens": num_tokens, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    times_s, text = list[float](), ""
    began_s = time.perf_counter()
    async with http.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if piece := choice["delta"].get("content"):
                        times_s.append(time.perf_counter() - began_s)
                        text += piece
        return TimedAnswer(response.headers["X-Request-Id"], times_s, text)
