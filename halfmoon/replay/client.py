"""One request of a replay or a sweep: posted, streamed, timed."""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from halfmoon.errors import Unavailable
from halfmoon.replay.outcome import Outcome
from halfmoon.rpc.tls.http_context import client_context

_TAIL_BYTES = 4096  # of the stream, which contain usage and errors
_TIMEOUT = aiohttp.ClientTimeout(total=3600)
_EVENT = b"data: "
_CALL = aiohttp.ClientTimeout(total=30)
_TEXT = re.compile(rb'"text"')  # in every event with tokens, but not in the last one, which has the usage
_CONTENT = re.compile(rb'"(?:content|reasoning_content|reasoning)": ?"[^"]')  # of a chat, whose first event has none
_WORDS = (
    *("time", "year", "day", "man", "thing", "life", "child", "world", "school", "state", "house", "group"),
    *("case", "point", "work", "week", "number", "night"),
)
_UNBOUNDED_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway under test. Its time runs `speed` times as fast as the trace's."""

    url: str
    model: str
    context_tokens: int
    hides_length: bool  # the request's seed is the answer's length, which the gateway cannot see
    speed: float = 1.0
    trusted: ssl.SSLContext | None = None  # authorities of an https:// URL; None: the system's
    headers: Mapping[str, str] = field(default_factory=dict)
    is_chat: bool = False  # prompts are words, about one a token


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
    path = "/v1/chat/completions" if gateway.is_chat else "/v1/completions"
    sent_s = time.monotonic()
    late_s = (sent_s - request.due_s) * gateway.speed
    headers = {"Content-Type": "application/json", **gateway.headers}
    try:
        async with session.post(f"{gateway.url}{path}", data=body, headers=headers, timeout=_TIMEOUT) as response:
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
        **_prompt(gateway, request.prompt_token_ids),
        "max_tokens": most,
        "stream": True,
        "stream_options": {"include_usage": True},
        **how,
    }


def _prompt(gateway: Gateway, token_ids: list[int]) -> dict[str, Any]:
    if not gateway.is_chat:
        return {"prompt": token_ids}
    words = " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids)
    return {"messages": [{"role": "user", "content": words}]}


async def found_server(
    url: str, model: str | None = None, api_key: str | None = None, ca: Path | None = None, *, is_chat: bool = False
) -> Gateway:
    """Any server of OpenAI's API, and the first model that it lists, unless one is named. Raises Unavailable."""
    url = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    trusted = client_context(ca, url)
    try:
        async with (
            aiohttp.ClientSession(timeout=_CALL, raise_for_status=True) as session,
            session.get(f"{url}/v1/models", headers=headers, ssl=trusted or True) as response,
        ):
            cards = (await response.json())["data"]
            names = [card["id"] for card in cards]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"no server of OpenAI's API answers at {url}: {error}") from error
    chosen = model or next(iter(names), None)
    if chosen is None:
        raise Unavailable(f"{url} lists no model: name one")
    context_tokens = next((card.get("max_model_len") for card in cards if card["id"] == chosen), None)
    return Gateway(
        url,
        chosen,
        context_tokens or _UNBOUNDED_TOKENS,
        hides_length=False,
        trusted=trusted,
        headers=headers,
        is_chat=is_chat,
    )


async def _streamed(response: aiohttp.ClientResponse, gateway: Gateway, sent_s: float, late_s: float) -> Outcome:
    first_s = last_s = 0.0
    tail, content = b"", _CONTENT if gateway.is_chat else _TEXT
    async for data in response.content.iter_any():
        now_s = time.monotonic()
        if content.search(data):
            first_s, last_s = first_s or now_s, now_s
        tail = (tail + data)[-_TAIL_BYTES:]
    usage = _usage(tail)
    if usage is None:
        return Outcome("failed", _code(tail.rpartition(_EVENT)[2]), sent_late_s=late_s)
    num_tokens = int(usage["completion_tokens"])
    return Outcome(
        "answered",
        ttft_s=((first_s or time.monotonic()) - sent_s) * gateway.speed,
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
