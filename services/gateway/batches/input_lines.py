"""The lines of a batch's input: found in the file's bytes, and read as requests. No I/O of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from services.gateway.http.error_responses import shortened

ENDPOINTS: Mapping[str, str] = {
    "/v1/chat/completions": "chat.completions",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
}
_MOST_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A request of a batch."""

    number: int  # of the line, from 0
    custom_id: str
    raw: bytes  # its body


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request, and why."""

    number: int
    custom_id: str | None
    code: str
    message: str


async def input_lines(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[tuple[int, bytes | None]]:
    """The lines that are not empty, each with its number among these; None for one longer than `max_bytes`."""
    number, rest, is_too_long = 0, bytearray(), False
    async for chunk in chunks:
        pieces = chunk.split(b"\n")
        for position, piece in enumerate(pieces):
            if not is_too_long:
                rest += piece
            if len(rest) > max_bytes:
                is_too_long = True
                rest.clear()
            if position == len(pieces) - 1:
                break
            if is_too_long or rest.strip():
                yield number, None if is_too_long else bytes(rest)
                number += 1
            rest.clear()
            is_too_long = False
    if is_too_long or rest.strip():
        yield number, None if is_too_long else bytes(rest)


def read_line(number: int, line: bytes | None, url: str, max_bytes: int) -> LineRequest | BadLine:
    """The request in a line for the endpoint `url`."""
    place = f"line {number + 1}"
    if line is None:
        return BadLine(number, None, "line_too_long", f"{place} is longer than {max_bytes} bytes")
    try:
        fields: Any = from_json(line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line, allow_inf_nan=False)
    except ValueError as error:
        return BadLine(number, None, "invalid_json_line", f"{place} is not valid JSON: {shortened(str(error))}")
    if not isinstance(fields, dict):
        return BadLine(number, None, "invalid_json_line", f"{place} is no JSON object")
    given, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(given, str) or not 0 < len(given) <= _MOST_ID_CHARS:
        message = f"{place}: custom_id must be a text of 1 to {_MOST_ID_CHARS} characters"
        return BadLine(number, None, "missing_required_parameter", message)
    problem = None
    if fields.get("method") != "POST":
        problem = "invalid_method", "method must be POST"
    elif fields.get("url") != url:
        problem = "invalid_url", f"url must be that of the batch, {url}"
    elif not isinstance(body, dict):
        problem = "invalid_request", "body must be a JSON object"
    elif body.get("stream") or body.get("background"):
        problem = "invalid_request", "stream and background are not for batches: leave them out"
    if problem is not None:
        return BadLine(number, given, problem[0], f"{place}: {problem[1]}")
    return LineRequest(number, given, json.dumps(body).encode())
