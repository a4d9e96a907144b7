"""Workloads from files: Mooncake JSON lines, Azure CSV, and plain JSON rows {start_time, prompt_len, output_len}."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.sim.json_text import parsed_json
from halfmoon.sim.workloads.answers import with_answers
from halfmoon.sim.workloads.workload import LONGEST_TOKENS, Prefixes, Workload, check_duration

MOONCAKE_BLOCK_TOKENS = 512
_FORMATS = (
    "JSON rows with start_time (s), prompt_len and output_len, "
    "Mooncake JSON lines with timestamp (ms), input_length, output_length and hash_ids, "
    "or CSV with TIMESTAMP, ContextTokens and GeneratedTokens"
)


def read_workload(path: Path) -> Workload:
    """The requests of a file, by arrival, the first at second 0. Raises InvalidRequest, which names the wrong row.

    Plain rows may also have `hash_ids`, for blocks of 512 tokens or of their own `block_tokens`.
    """
    return _from_rows(path, trace_rows(path))


def trace_rows(path: Path) -> Sequence[Any]:
    """The rows of a file as they are, at least one. Raises InvalidRequest."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows write a mark before the first row
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the workload {path} cannot be read: {error}", param="workload") from error
    rows = _csv_rows(path, text) if path.suffix == ".csv" else _json_rows(path, text)
    if not rows:
        raise InvalidRequest(f"the workload {path} has no requests", param="workload")
    return rows


def _csv_rows(path: Path, text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        for row in csv.DictReader(StringIO(text)):
            at = datetime.fromisoformat(row["TIMESTAMP"])
            at = at if at.tzinfo else at.replace(tzinfo=UTC)  # else the time zone of this host would move them
            context, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            rows.append({"start_time": at.timestamp(), "prompt_len": context, "output_len": generated})
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise _wrong_row(path, len(rows), error) from error
    return rows


def _json_rows(path: Path, text: str) -> Sequence[Any]:
    """Reads an array, an object with an array `requests`, or one object per line."""
    try:
        document = parsed_json(text)
    except ValueError:
        return _json_lines(path, text)
    if isinstance(document, Mapping):
        document = document.get("requests", [document])
    if not isinstance(document, list):
        raise InvalidRequest(f"the workload {path} is not {_FORMATS}", param="workload")
    return document


def _json_lines(path: Path, text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n")):  # strings of JSON may hold what else `splitlines` splits at
        try:
            rows += [parsed_json(line)] if line.strip() else []
        except ValueError as error:
            raise _wrong_row(path, number, error) from error
    return rows


def _from_rows(path: Path, rows: Sequence[Any]) -> Workload:
    figures = np.empty((len(rows), 3))
    for number, row in enumerate(rows):
        try:
            figures[number] = _figures(row)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _wrong_row(path, number, error) from error
    order = np.argsort(figures[:, 0], kind="stable")
    start_s, prompt, output = figures[order].T
    check_duration(float(start_s[-1]) - float(start_s[0]), f"correct the times in {path}", "workload")
    prefixes = _prefixes(path, rows, order.tolist())
    lengths = prompt.astype(np.int64), np.maximum(output.astype(np.int64), 1)
    if prefixes is not None:
        prefixes = with_answers(prefixes, *lengths)
    return Workload(start_s - start_s[0], *lengths, prefixes, path.stem, order)


def _figures(row: Mapping[str, Any]) -> tuple[float, int, int]:
    """Seconds, prompt tokens and output tokens of either kind of row."""
    if "timestamp" in row:
        lengths = row_length(row, "input_length", 1), row_length(row, "output_length", 0)
        return row_time(row, "timestamp") / 1000, *lengths
    return row_time(row, "start_time"), row_length(row, "prompt_len", 1), row_length(row, "output_len", 0)


def row_time(row: Mapping[str, Any], name: str) -> float:
    """A row's finite number. Raises KeyError or ValueError."""
    result = row[name]
    if isinstance(result, bool) or not isinstance(result, (int, float)) or not math.isfinite(result):
        raise ValueError(f"{name} is {result!r}, and must be a finite number")
    return result


def row_length(row: Mapping[str, Any], name: str, least: int) -> int:
    """A row's number of tokens, at least `least`. Raises KeyError or ValueError."""
    result = row[name]
    is_number = isinstance(result, (int, float)) and not isinstance(result, bool)
    if not is_number or not least <= result <= LONGEST_TOKENS or result != int(result):
        raise ValueError(f"{name} is {result!r}, and must be a whole number from {least} to {LONGEST_TOKENS:,}")
    return int(result)


def _prefixes(path: Path, rows: Sequence[Mapping[str, Any]], order: Sequence[int]) -> Prefixes | None:
    if not any("hash_ids" in row for row in rows):
        return None
    lists, sizes = [], set()
    for number in order:
        row = rows[number]
        try:
            sizes.add(_block_tokens(row))
            lists.append(_block_ids(row))
        except ValueError as error:
            raise _wrong_row(path, number, error) from error
    if len(sizes) > 1:
        raise InvalidRequest(
            f"the workload {path} has hash_ids of blocks of {sorted(sizes)} tokens: give all rows one block_tokens",
            param="workload",
        )
    ids = np.array([block_id for ids in lists for block_id in ids], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in lists])])
    return Prefixes(sizes.pop(), ids, offsets)


def _block_tokens(row: Mapping[str, Any]) -> int:
    try:
        return row_length({"block_tokens": MOONCAKE_BLOCK_TOKENS, **row}, "block_tokens", 1)
    except ValueError as error:
        raise ValueError(f"hash_ids are of blocks of {row['block_tokens']!r} tokens: {error}") from error


def _block_ids(row: Mapping[str, Any]) -> list[int]:
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids is {ids!r}, and must be a list of whole numbers")
    for block_id in ids:
        if isinstance(block_id, bool) or not isinstance(block_id, int) or not -(2**63) <= block_id < 2**63:
            raise ValueError(f"hash_ids are not whole numbers of 64 bits: there is {block_id!r}")
    return ids


def _wrong_row(path: Path, number: int, error: Exception) -> InvalidRequest:
    missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return InvalidRequest(
        f"request {number} of the workload {path} is wrong ({missing}); it should be {_FORMATS}", param="workload"
    )
