"""One request of a replay or a benchmark: posted, streamed, timed."""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from halfmoon.errors import Unavailable
from halfmoon.replay.outcome import Outcome
from halfmoon.rpc.tls.http_context import client_context, unreached

_TAIL_BYTES = 4096  # of the stream, which contain usage and errors
_LEAVE_OUT = tuple(map(frozenset[str], ((), ("ignore_eos",), ("stream_options",), ("ignore_eos", "stream_options"))))
_PROBE = ([1000, 1001, 1002], 2)  # token ids and the answer's length of a server's first request
_TIMEOUT = aiohttp.ClientTimeout(total=3600)
_EVENT = b"data:"
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
    leaves_out: frozenset[str] = frozenset()  # parameters that the server refuses
    name: str = ""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request as it is sent."""

    prompt_token_ids: list[int]
    output_tokens: int
    most_output_tokens: int  # `max_tokens` if the length is hidden
    due_s: float  # on `time.monotonic`
    history: Sequence[Mapping[str, str]] | None = None  # a chat's turns before this one, and its answer is kept


async def send(session: aiohttp.ClientSession, gateway: Gateway, request: ReplayRequest) -> Outcome:
    """Sends a request and reads the whole answer. Never raises network or gateway errors."""
    body = json.dumps(_body(gateway, request)).encode()
    path = "/v1/chat/completions" if _is_chat(gateway, request) else "/v1/completions"
    sent_s = time.monotonic()
    late_s = (sent_s - request.due_s) * gateway.speed
    headers = {"Content-Type": "application/json", **gateway.headers}
    try:
        async with session.post(f"{gateway.url}{path}", data=body, headers=headers, timeout=_TIMEOUT) as response:
            if response.status != 200:
                return _turned_away(response.status, await response.read(), late_s)
            return await _streamed(response, gateway, request, sent_s, late_s)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Outcome("failed", type(error).__name__, sent_late_s=late_s)


def _body(gateway: Gateway, request: ReplayRequest) -> dict[str, Any]:
    hidden = gateway.hides_length
    room = gateway.context_tokens - len(request.prompt_token_ids)
    most = max(min(request.most_output_tokens, room), request.output_tokens) if hidden else request.output_tokens
    how: dict[str, Any] = {"seed": request.output_tokens} if hidden else {"ignore_eos": True}
    body = {
        "model": gateway.model,
        **_prompt(gateway, request),
        "max_tokens": most,
        "stream": True,
        "stream_options": {"include_usage": True},
        **how,
    }
    return {name: value for name, value in body.items() if name not in gateway.leaves_out}


def _is_chat(gateway: Gateway, request: ReplayRequest) -> bool:
    return gateway.is_chat or request.history is not None


def _prompt(gateway: Gateway, request: ReplayRequest) -> dict[str, Any]:
    if not _is_chat(gateway, request):
        return {"prompt": request.prompt_token_ids}
    return {"messages": [*(request.history or ()), user_message(request.prompt_token_ids)]}


def user_message(token_ids: Sequence[int]) -> dict[str, str]:
    """A message of as many words, which most tokenizers write with one token each."""
    return {"role": "user", "content": " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids)}


async def discover_server(
    url: str,
    model: str | None = None,
    api_key: str | None = None,
    ca: Path | None = None,
    *,
    is_chat: bool = False,
    name: str = "",
) -> Gateway:
    """Any server of OpenAI's API, and the first model that it lists, unless one is named.

    Raises Unavailable if it does not answer, lists no model, or refuses a first request of two tokens, with
    `ignore_eos` and `stream_options` or without.
    """
    url = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    trusted = client_context(ca, url)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted or True)) as session:
        cards = await _listed(session, url, headers, is_needed=model is None)
        chosen = model or next((card["id"] for card in cards), None)
        if chosen is None:
            raise Unavailable(f"{url} lists no model: name one with --model")
        context = next((card.get("max_model_len") for card in cards if card["id"] == chosen), None)
        server = Gateway(
            url,
            chosen,
            context or _UNBOUNDED_TOKENS,
            hides_length=False,
            trusted=trusted,
            headers=headers,
            is_chat=is_chat,
            name=name or url.partition("://")[2],
        )
        return await _fitted(session, server)


async def _listed(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], *, is_needed: bool
) -> list[dict[str, Any]]:
    """The cards of the server's models; none if there is no such list and none is needed."""
    try:
        async with session.get(f"{url}/v1/models", headers=headers, timeout=_CALL) as response:
            if not is_needed and response.status != 200:
                return []
            response.raise_for_status()
            cards = (await response.json())["data"]
            return [card for card in cards if isinstance(card["id"], str)]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"no server of OpenAI's API answers at {url}: {unreached(error)}") from error


async def _fitted(session: aiohttp.ClientSession, server: Gateway) -> Gateway:
    """The server without those parameters that it refuses, found by a short request, which also warms it up."""
    ids, num_tokens = _PROBE
    reason = ""
    for leaves_out in _LEAVE_OUT:
        fitted = replace(server, leaves_out=leaves_out)
        outcome = await send(session, fitted, ReplayRequest(ids, num_tokens, num_tokens, time.monotonic()))
        if outcome.end == "answered":
            return fitted
        reason = reason or f"{outcome.reason} {outcome.text}".strip()
    hint = "" if server.is_chat else ". If it takes no token ids as prompts, --chat sends words"
    raise Unavailable(f"{server.url} does not stream an answer of {server.model}: {reason}{hint}")


async def _streamed(
    response: aiohttp.ClientResponse, gateway: Gateway, request: ReplayRequest, sent_s: float, late_s: float
) -> Outcome:
    first_s = last_s = 0.0
    num_events, whole = 0, list[bytes]()
    tail, unread, content = b"", b"", _CONTENT if _is_chat(gateway, request) else _TEXT
    async for data in response.content.iter_any():
        now_s = time.monotonic()
        *lines, unread = (unread + data).split(b"\n")  # a read may end anywhere
        if found := sum(content.search(line) is not None for line in lines):
            first_s, last_s = first_s or now_s, now_s
            num_events += found
        tail = (tail + data)[-_TAIL_BYTES:]
        if request.history is not None:
            whole.append(data)
    usage = _usage(tail)
    if usage is None and not (b"[DONE]" in tail and num_events):
        return Outcome("failed", _code(tail.rpartition(_EVENT)[2]), sent_late_s=late_s)
    num_tokens = num_events if usage is None else int(usage["completion_tokens"])
    details = {} if usage is None else usage.get("prompt_tokens_details") or {}
    return Outcome(
        "answered",
        ttft_s=((first_s or time.monotonic()) - sent_s) * gateway.speed,
        tbt_s=(last_s - first_s) * gateway.speed / max(num_tokens - 1, 1),
        num_tokens=num_tokens,
        num_prompt_tokens=0 if usage is None else int(usage["prompt_tokens"]),
        num_cached_tokens=int(details.get("cached_tokens") or 0),
        sent_late_s=late_s,
        text=_text(b"".join(whole)),
    )


def _text(stream: bytes) -> str:
    """The answer's text in the events of a chat; reasoning is not sent back."""
    events = (line.removeprefix(_EVENT) for line in stream.split(b"\n") if line.startswith(_EVENT) and b"{" in line)
    choices = (choice for event in events for choice in json.loads(event).get("choices") or ())
    return "".join((choice.get("delta") or {}).get("content") or "" for choice in choices)


def _usage(tail: bytes) -> dict[str, Any] | None:
    """The usage in the last event of a complete stream; None if the stream broke off, or the server sends none."""
    for line in reversed(tail.split(b"\n")):
        if line.startswith(_EVENT) and b'"completion_tokens"' in line:
            result: dict[str, Any] = json.loads(line.removeprefix(_EVENT))["usage"]
            return result
    return None


def _turned_away(status: int, body: bytes, late_s: float) -> Outcome:
    error = _error(body)
    reason = str(error.get("reason") or error.get("code") or status)
    text = str(error.get("message") or "")
    return Outcome("refused" if status == 429 else "failed", reason, sent_late_s=late_s, text=text)


def _code(body: bytes) -> str:
    return str(_error(body).get("code") or "broken stream")


def _error(body: bytes) -> dict[str, Any]:
    try:
        result = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return result if isinstance(result, dict) else {}
