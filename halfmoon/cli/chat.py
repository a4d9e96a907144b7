"""`halfmoon chat`: a conversation in the terminal, and under each answer how quick it was and where it ran."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.text import Text

from halfmoon.cli.top import duration
from halfmoon.errors import HalfmoonError, Unavailable
from halfmoon.rpc.tls.http_context import client_context, unreached

_CONNECT_S = 5.0
_HELP = "/system TEXT sets the system message, /new begins a new conversation, /exit or Ctrl-D ends"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of `halfmoon chat`."""

    gateway: str
    api_key: str | None = None
    token: str | None = None  # the operator token: without one, where it is needed, workers are not named
    ca: Path | None = None  # authorities of the gateway's certificate; None: the system's
    system: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)  # model, temperature and so on, as the API names them


@dataclass(slots=True)
class Answer:
    """Owns what came of one answer so far."""

    text: str = ""
    reasons: bool = False  # reasoning came before the text; it is shown and not sent back
    ttft_s: float | None = None
    whole_s: float | None = None
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    request_id: str | None = None
    workers: str | None = None

    def summary(self) -> str:
        """A line of figures: those that are known."""
        usage = self.usage or {}
        num_output = usage.get("completion_tokens", 0)
        parts = [f"first token {duration(self.ttft_s)}"] if self.ttft_s is not None else []
        if self.ttft_s is not None and self.whole_s is not None and num_output > 1:
            parts.append(f"{(num_output - 1) / max(self.whole_s - self.ttft_s, 1e-9):.1f} tokens/s")
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            parts.append(f"{num_output} tokens, prompt {usage['prompt_tokens']} ({cached} cached)")
        parts += [self.workers] if self.workers else []
        return " · ".join([*parts, "cut off by the limit of tokens"] if self.finish_reason == "length" else parts)


def chat(options: ChatOptions, terminal: Console, questions: Iterator[str]) -> int:
    """Answers questions until there are no more, and returns the exit status."""
    system, messages = options.system, list[dict[str, str]]()
    terminal.print(Text(_HELP, style="dim"))
    for question in questions:
        command, _, rest = question.strip().partition(" ")
        match command:
            case "":
                continue
            case "/exit":
                break
            case "/new":
                messages = []
                continue
            case "/system":
                system = rest.strip() or None
                continue
        if command.startswith("/"):
            terminal.print(Text(f"there is no {command}: {_HELP}", style="red"))
            continue
        turns = [*messages, {"role": "user", "content": question}]
        head = [{"role": "system", "content": system}] if system else []
        answer = Answer()

        def write(text: str, style: str = "") -> None:
            terminal.print(Text(text, style=style), end="", soft_wrap=True)

        try:
            asyncio.run(_ask(options, [*head, *turns], answer, write))
        except KeyboardInterrupt:
            write(" …")
        except HalfmoonError as error:
            terminal.print(Text(error.message, style="red"))
            continue
        messages = [*turns, {"role": "assistant", "content": answer.text}]
        terminal.print()
        terminal.print(Text(answer.summary(), style="dim"))
    return 0


def typed_questions(terminal: Console) -> Iterator[str]:
    """What the user types, line by line, until Ctrl-D or Ctrl-C."""
    with suppress(ImportError):
        import readline  # noqa: F401 (gives `input` a history)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield terminal.input("[bold]> [/bold]")
    terminal.print()


async def _ask(
    options: ChatOptions, messages: list[dict[str, str]], answer: Answer, write: Callable[..., None]
) -> None:
    """Streams one answer. Raises HalfmoonError with the gateway's reason."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    body = {**options.parameters, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    connector = aiohttp.TCPConnector(ssl=client_context(options.ca, options.gateway) or True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    began_s = time.monotonic()
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            url = f"{options.gateway}/v1/chat/completions"
            async with session.post(url, json=body, headers=headers) as response:
                if response.status != 200:
                    raise HalfmoonError(await _reason(response))
                answer.request_id = response.headers.get("X-Request-Id")
                async for event in _events(response):
                    _take(answer, event, time.monotonic() - began_s, write)
            answer.whole_s = time.monotonic() - began_s
            answer.workers = await _workers(session, options, answer.request_id)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"no answer from {options.gateway}: {unreached(error)}") from error


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])


def _take(answer: Answer, event: dict[str, Any], at_s: float, write: Callable[..., None]) -> None:
    if "error" in event:
        raise HalfmoonError(event["error"]["message"])
    answer.usage = event.get("usage") or answer.usage
    for choice in event["choices"]:
        if answer.ttft_s is None:
            answer.ttft_s = at_s
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if reasoning := choice["delta"].get("reasoning"):
            answer.reasons = True
            write(reasoning, "dim")
        if text := choice["delta"].get("content"):
            if answer.reasons and not answer.text:
                write("\n\n")
            answer.text += text
            write(text)


async def _reason(response: aiohttp.ClientResponse) -> str:
    advice = " (--api-key or HALFMOON_API_KEY)" if response.status == 401 else ""
    try:
        return f"{response.status}: {(await response.json(content_type=None))['error']['message']}{advice}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status}: this is no gateway of Halfmoon"


async def _workers(session: aiohttp.ClientSession, options: ChatOptions, request_id: str | None) -> str | None:
    """Which workers computed the answer; None where the control API is closed to us."""
    headers = {"Authorization": f"Bearer {options.token}"} if options.token else {}
    async with session.get(f"{options.gateway}/halfmoon/v1/requests/{request_id}", headers=headers) as response:
        decision = (await response.json(content_type=None)).get("decision") if response.status == 200 else None
    if not decision:
        return None
    last = [decision, *decision["moves"]][-1]
    return " → ".join(dict.fromkeys((last["prefill_worker"], last["decode_worker"])))
