"""The gateway's HTTP API as the console uses it. Standard library only; every call has a time limit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

_LOOK_S = 5.0  # the look-ups are instant on a healthy gateway
_CHAT_SILENCE_S = 120.0  # longest wait for the next token


class GatewayError(Exception):
    """The gateway did not give what was asked for; the text is for the user."""


class GatewayApi:
    """Knows the gateway's address, and the API key if it needs one. Every method raises GatewayError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def cluster(self) -> dict[str, Any]:
        """The gateway, its model and its workers."""
        found = self._get("/halfmoon/v1/cluster")
        if not isinstance(found, dict) or "workers" not in found:
            raise GatewayError(f"{self.url} answered something that is not a cluster: is it a Halfmoon gateway?")
        return found

    def requests(self, limit: int) -> list[dict[str, Any]]:
        """The newest ledger rows, newest first."""
        found = self._get(f"/halfmoon/v1/requests?limit={limit}")
        if not isinstance(found, list):
            raise GatewayError(f"{self.url} answered something that is not a list of requests")
        return found

    def chat(
        self, model: str, messages: Sequence[Mapping[str, str]], max_tokens: int, temperature: float
    ) -> Iterator[str]:
        """Pieces of the reply as they come."""
        body = {
            "model": model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
        }
        with self._open("/v1/chat/completions", _CHAT_SILENCE_S, body) as response:
            yield from _deltas(response)

    def _get(self, path: str) -> Any:
        with self._open(path, _LOOK_S) as response:
            return json.load(response)

    @contextmanager
    def _open(self, path: str, timeout_s: float, body: Mapping[str, Any] | None = None) -> Iterator[HTTPResponse]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, self._headers)
        try:
            with urlopen(request, timeout=timeout_s) as response:
                yield response
        except HTTPError as err:
            with err:
                raise GatewayError(_message_of(err)) from err
        except URLError as err:
            raise GatewayError(f"no gateway at {self.url}: {err.reason}") from err
        except (OSError, HTTPException, ValueError) as err:
            raise GatewayError(f"the gateway at {self.url} broke off: {err or type(err).__name__}") from err


def _deltas(lines: Iterator[bytes] | HTTPResponse) -> Iterator[str]:
    """The text of an SSE chat stream. Raises GatewayError for an error event or an end without [DONE]."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise GatewayError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", ()):
            yield choice.get("delta", {}).get("content") or ""
    raise GatewayError("the reply broke off before its end")


def _message_of(error: HTTPError) -> str:
    """What an error response says, in the OpenAI shape or not."""
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason
    return f"the gateway answered {error.code}: {message}"
