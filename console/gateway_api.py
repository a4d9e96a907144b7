"""The gateway's HTTP API as the console uses it. Every call has a time limit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from halfmoon.rpc.tls.http_context import client_context

_LOOK_S = 5.0  # look-ups are immediate on a healthy gateway
_CHAT_SILENCE_S = 120.0  # longest wait for the next token


class GatewayError(Exception):
    """The gateway failed to answer; the text is for the user."""


class GatewayApi:
    """Knows the gateway's address, operator token and API key. Every method raises GatewayError.

    `ca`: file of authorities to trust for an https:// URL.
    """

    def __init__(
        self, url: str, api_key: str | None = None, operator_token: str | None = None, ca: Path | None = None
    ) -> None:
        self.url = url
        self._trusted = client_context(ca, url)
        self._api_key = api_key
        self._operator_token = operator_token

    def cluster(self, max_links: int = 0) -> dict[str, Any]:
        """The gateway, its model and its workers, with links if there are at most `max_links`."""
        return self._object(f"/halfmoon/v1/cluster?max_links={max_links}", "workers")

    def change_worker(self, name: str, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Changes a worker: `what` is `role` or `drain`."""
        path = f"/halfmoon/v1/workers/{quote(name, safe='')}/{what}"
        changed: dict[str, Any] = self._json(path, "POST", {"by": "console", **body})
        return changed

    def stores(self) -> list[dict[str, Any]]:
        """The KV stores with their figures."""
        return self._list("/halfmoon/v1/stores")

    def request(self, request_id: str) -> dict[str, Any]:
        """One request: its row, decision and timeline."""
        return self._object(f"/halfmoon/v1/requests/{quote(request_id, safe='')}", "timeline")

    def series(self, minutes: int) -> dict[str, Any]:
        """Figures over the last minutes."""
        return self._object(f"/halfmoon/v1/series?minutes={minutes}", "age_s")

    def placements(self, limit: int) -> list[dict[str, Any]]:
        """The newest decisions, newest first."""
        return self._list(f"/halfmoon/v1/placements?limit={limit}")

    def cache(self) -> dict[str, Any]:
        """What is cached where."""
        return self._object("/halfmoon/v1/cache", "prefixes")

    def workload(self, minutes: int) -> dict[str, Any]:
        """The last minutes' requests in the simulator's format."""
        return self._object(f"/halfmoon/v1/workload?minutes={minutes}", "requests")

    def classes(self) -> list[dict[str, Any]]:
        """The QoS classes with their versions."""
        classes: list[dict[str, Any]] = self._object("/halfmoon/v1/classes", "classes")["classes"]
        return classes

    def class_edits(self) -> list[dict[str, Any]]:
        """The newest edits of classes, newest first."""
        return self._list("/halfmoon/v1/class_edits?limit=50")

    def admission(self) -> dict[str, Any]:
        """The admission mode, where it was set, and its edits."""
        return self._object("/halfmoon/v1/admission", "mode")

    def put_admission(self, mode: str | None, version: int) -> dict[str, Any]:
        """Sets the mode over that version; None returns to each gateway's own."""
        saved: dict[str, Any] = self._json("/halfmoon/v1/admission", "PUT", {"mode": mode, "version": version})
        return saved

    def autopilot(self, limit: int) -> dict[str, Any]:
        """The autopilot's mode, its edits, how it stands, and its newest decisions."""
        return self._object(f"/halfmoon/v1/autopilot?limit={limit}", "decisions")

    def put_autopilot(self, mode: str | None, version: int) -> dict[str, Any]:
        """Sets the autopilot's mode over that version; None returns to the planner's own."""
        saved: dict[str, Any] = self._json("/halfmoon/v1/autopilot", "PUT", {"mode": mode, "version": version})
        return saved

    def put_class(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Saves a class over the version in `body`."""
        saved: dict[str, Any] = self._json(_class_path(name), "PUT", body)
        return saved

    def delete_class(self, name: str, version: int) -> None:
        """Removes that version of a class."""
        with self._open(f"{_class_path(name)}?version={version}", _LOOK_S, "DELETE"):
            return

    def preview_class(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Previews what a class would have done in the last hour."""
        preview: dict[str, Any] = self._json(f"/halfmoon/v1/class_previews/{quote(name, safe='')}", "POST", body)
        return preview

    def tenants(self) -> dict[str, Any]:
        """The tenants with their limits, keys by id, and usage of the last 24 hours. For operators."""
        return self._object("/halfmoon/v1/tenants", "tenants")

    def put_tenant(self, name: str, body: Mapping[str, Any]) -> None:
        """Saves a tenant's limits over the version in `body`."""
        self._json(_tenant_path(name), "PUT", body)

    def add_key(self, tenant: str, label: str, expires_days: float | None) -> dict[str, Any]:
        """Makes a key, which is in this answer only."""
        made: dict[str, Any] = self._json(
            f"{_tenant_path(tenant)}/keys", "POST", {"label": label, "expires_days": expires_days}
        )
        return made

    def revoke_key(self, tenant: str, key_id: str) -> None:
        """Revokes a key."""
        with self._open(f"{_tenant_path(tenant)}/keys/{quote(key_id, safe='')}", _LOOK_S, "DELETE"):
            return

    def chat(
        self, body: Mapping[str, Any], request_id: str = "", headers: Mapping[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Streams the answer to a chat completion's body: each choice of each chunk, with its `delta`."""
        own = {"X-Request-Id": request_id} if request_id else {}
        sent = {**body, "stream": True}
        with self._open("/v1/chat/completions", _CHAT_SILENCE_S, "POST", sent, {**(headers or {}), **own}) as response:
            yield from _choices(response)

    def _object(self, path: str, member: str) -> dict[str, Any]:
        answer = self._json(path)
        if not isinstance(answer, dict) or member not in answer:
            raise GatewayError(f"{self.url} answered something that is not a {_noun(path)}: is it a Halfmoon gateway?")
        return answer

    def _list(self, path: str) -> list[dict[str, Any]]:
        answer = self._json(path)
        if not isinstance(answer, list):
            raise GatewayError(f"{self.url} answered something that is not a list of {_noun(path)}")
        return answer

    def _json(self, path: str, method: str = "GET", body: Mapping[str, Any] | None = None) -> Any:
        with self._open(path, _LOOK_S, method, body) as response:
            return json.load(response)

    @contextmanager
    def _open(
        self,
        path: str,
        timeout_s: float,
        method: str = "GET",
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[HTTPResponse]:
        data = None if body is None else json.dumps(body).encode()
        token = self._operator_token if path.startswith("/halfmoon/") else self._api_key
        sent = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        request = Request(self.url + path, data, {**sent, **(headers or {})}, method=method)
        try:
            with urlopen(request, timeout=timeout_s, context=self._trusted) as response:
                yield response
        except HTTPError as err:
            with err:
                raise GatewayError(_message_of(err)) from err
        except URLError as err:
            raise GatewayError(f"no gateway at {self.url}: {err.reason}") from err
        except (OSError, HTTPException, ValueError) as err:
            raise GatewayError(f"the gateway at {self.url} broke off: {err or type(err).__name__}") from err


def _class_path(name: str) -> str:
    return f"/halfmoon/v1/classes/{quote(name, safe='')}"


def _tenant_path(name: str) -> str:
    return f"/halfmoon/v1/tenants/{quote(name, safe='')}"


def _noun(path: str) -> str:
    return path.partition("?")[0].split("/")[3].replace("_", " ")


def _choices(lines: Iterator[bytes] | HTTPResponse) -> Iterator[dict[str, Any]]:
    """Choices of an SSE chat stream. Raises GatewayError for an error event or an end without [DONE]."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise GatewayError(str(event["error"].get("message", event["error"])))
        yield from event.get("choices", ())
    raise GatewayError("the reply broke off before its end")


def _message_of(error: HTTPError) -> str:
    """Message of an error response, in the OpenAI format or not."""
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError, HTTPException):  # the last two: the connection broke
        message = error.reason
    return f"the gateway answered {error.code}: {message}"
