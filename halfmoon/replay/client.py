"""One request of a replay: posted, streamed, timed."""

from __future__ import annotations

import json
import ssl
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from halfmoon.replay.outcome import Outcome

_TAIL_BYTES = 4096  # of the stream, which contain usage and errors
_TIMEOUT = aiohttp.ClientTimeout(total=3600)
_EVENT = b"data: "
_CONTENT = b'"text"'  # in every event with tokens, but not in the last one, which has the usage


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway under test. Its time runs `speed` times as fast as the trace's."""

    url: str
    model: str
    context_tokens: int
    hides_length: bool  # the request's seed is the answer's length, which the gateway cannot see
    speed: float = 1.0
    trusted: ssl.SSLContext | None = None  # authorities of an https:// URL; None: the system's


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request as it is sent."""

    prompt_token_ids: list[int]
    output_tokens: int
    most_output_tokens: int  # `max_tokens` if the length is hidden
    due_s: float  # on `time.monotonic`


async def send(session: aiohttp.ClientSession, gateway: Gateway, request: ReplayRequest) -> Outcome:
    """Sends a request and reads the whole answer. Never raises network or gateway errors."""
    body = json.dumps(_body(gateway, request)).encode()
    sent_s = time.monotonic()
    late_s = (sent_s - request.due_s) * gateway.speed
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(
            f"{gateway.url}/v1/completions", data=body, headers=headers, timeout=_TIMEOUT
        ) as response:
            if response.status != 200:
                return _turned_away(response.status, await response.read(), late_s)
            return await _streamed(response, gateway, sent_s, late_s)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Outcome("failed", type(error).__name__, sent_late_s=late_s)


def _body(gateway: Gateway, request: ReplayRequest) -> dict[str, Any]:
    hidden = gateway.hides_length
    room = gateway.context_tokens - len(request.prompt_token_ids)
    most = max(min(request.most_output_tokens, room), request.output_tokens) if hidden else request.output_tokens
    how: dict[str, Any] = {"seed": request.output_tokens} if hidden else {"ignore_eos": True}
    return {
        "model": gateway.model,
        "prompt": request.prompt_token_ids,
        "max_tokens": most,
        "stream": True,
        "stream_options": {"include_usage": True},
        **how,
    }


async def _streamed(response: aiohttp.ClientResponse, gateway: Gateway, sent_s: float, late_s: float) -> Outcome:
    first_s = last_s = 0.0
    tail = b""
    async for data in response.content.iter_any():
        now_s = time.monotonic()
        if _CONTENT in data:
            first_s, last_s = first_s or now_s, now_s
        tail = (tail + data)[-_TAIL_BYTES:]
    usage = _usage(tail)
    if usage is None:
        return Outcome("failed", _code(tail.rpartition(_EVENT)[2]), sent_late_s=late_s)
    num_tokens = int(usage["completion_tokens"])
    return Outcome(
        "answered",
        ttft_s=(first_s - sent_s) * gateway.speed,
        tbt_s=(last_s - first_s) * gateway.speed / max(num_tokens - 1, 1),
        num_tokens=num_tokens,
        num_prompt_tokens=int(usage["prompt_tokens"]),
        num_cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        sent_late_s=late_s,
    )


def _usage(tail: bytes) -> dict[str, Any] | None:
    """The usage in the last event of a complete stream; None if the stream broke off."""
    for line in reversed(tail.split(b"\n")):
        if line.startswith(_EVENT) and b'"completion_tokens"' in line:
            result: dict[str, Any] = json.loads(line.removeprefix(_EVENT))["usage"]
            return result
    return None


def _turned_away(status: int, body: bytes, late_s: float) -> Outcome:
    error = _error(body)
    reason = str(error.get("reason") or error.get("code") or status)
    return Outcome("refused" if status == 429 else "failed", reason, sent_late_s=late_s)


def _code(body: bytes) -> str:
    return str(_error(body).get("code") or "broken stream")


def _error(body: bytes) -> dict[str, Any]:
    try:
        result = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return result if isinstance(result, dict) else {}
