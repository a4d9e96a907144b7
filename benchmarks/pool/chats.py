"""Chats of several turns: the KV that their hand-overs move, the time to the first token, and the longest gap.

Chats run side by side, each turn with the whole conversation so far. The link of each prefill worker is limited.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from operator import sub
from pathlib import Path
from typing import NamedTuple

import aiohttp

from benchmarks.chat_turns import question, timed_answer
from benchmarks.live_system import running_system

_FIRST_WORDS, _LATER_WORDS = 150, 30  # of a question
_ANSWER_TOKENS = 48
_LEDGER_S = 60.0


class Turn(NamedTuple):
    """What one answer took."""

    ttft_s: float
    longest_gap_s: float  # between two pieces of the answer
    num_bytes: int  # of KV handed over


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this measurement."""
    parser.add_argument("--chats", type=int, default=4, help="side by side")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--mbps", type=float, nargs="+", default=[50, 200, 1000], help="of the prefill worker's links")
    parser.set_defaults(run=lambda given: show(given.chats, given.turns, given.decode, given.mbps))


async def show(num_chats: int, num_turns: int, num_decode: int, speeds_mbps: Sequence[float]) -> None:
    """Prints a table for each speed of the link."""
    for mbps in speeds_mbps:
        os.environ["HALFMOON_PREFILL_KV_LINK_MBPS"] = str(mbps)
        workers = ("--prefill", "1", "--decode", str(num_decode), "--conditional-disaggregation", "off")
        with tempfile.TemporaryDirectory() as directory:
            async with (
                running_system(workers, Path(directory), 1 + num_decode) as url,
                aiohttp.ClientSession(url) as http,
            ):
                async with http.get("/v1/models") as response:
                    model = (await response.json())["data"][0]["id"]
                await _chat(http, model, 0, 2)  # warms up
                numbers = range(1, num_chats + 1)
                chats = await asyncio.gather(*(_chat(http, model, number, num_turns) for number in numbers))
        print(f"\n{num_chats} chats of {num_turns} turns, 1 prefill and {num_decode} decode workers, {mbps:g} MB/s")
        print(f"{'turns':>8}{'TTFT ms':>10}{'longest gap':>12}{'MB a chat':>11}")
        _print("1", [chat[:1] for chat in chats])
        _print(f"2-{num_turns}", [chat[1:] for chat in chats], flush=True)


def _print(turns: str, chats: Sequence[Sequence[Turn]], *, flush: bool = False) -> None:
    ttft_s, gap_s = (statistics.median(turn[index] for chat in chats for turn in chat) for index in (0, 1))
    megabytes = statistics.mean(sum(turn.num_bytes for turn in chat) for chat in chats) / 1e6
    print(f"{turns:>8}{ttft_s * 1e3:10.0f}{gap_s * 1e3:12.0f}{megabytes:11.1f}", flush=flush)


async def _chat(http: aiohttp.ClientSession, model: str, number: int, num_turns: int) -> list[Turn]:
    messages: list[dict[str, str]] = []
    turns = []
    for turn in range(num_turns):
        num_words = _LATER_WORDS if turn else _FIRST_WORDS
        messages.append(question(number, turn, num_words))
        request_id, times_s, text = await timed_answer(http, model, messages, _ANSWER_TOKENS)
        messages.append({"role": "assistant", "content": text})
        turns.append(Turn(times_s[0], max(map(sub, times_s[1:], times_s)), await _handed_over(http, request_id)))
    return turns


async def _handed_over(http: aiohttp.ClientSession, request_id: str) -> int:
    """Bytes of the request's hand-over, as its timeline shows them."""
    give_up_s = time.monotonic() + _LEDGER_S
    while time.monotonic() < give_up_s:
        async with http.get(f"/halfmoon/v1/requests/{request_id}") as response:
            spans = (await response.json())["timeline"] if response.status == 200 else []
        if spans:  # none is a transfer if the decode worker computed the prompt itself
            return sum(int(span["num_bytes"] or 0) for span in spans if span["name"] == "transfer")
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{request_id} has no timeline")
