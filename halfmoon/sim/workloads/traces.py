"""Workloads from files: Mooncake JSON lines, Azure CSV, and plain JSON rows {start_time, prompt_len, output_len}."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.sim.workloads.answers import with_answers
from halfmoon.sim.workloads.workload import LONGEST_TOKENS, Prefixes, Workload

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
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the workload {path} cannot be read: {error}", param="workload") from error
    rows = _csv_rows(path, text) if path.suffix == ".csv" else _json_rows(path, text)
    if not rows:
        raise InvalidRequest(f"the workload {path} has no requests", param="workload")
    return rows


def _csv_rows(path: Path, text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(csv.DictReader(text.splitlines())):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
            context, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise _wrong_row(path, number, error) from error
        rows.append({"start_time": at.timestamp(), "prompt_len": context, "output_len": generated})
    return rows


def _json_rows(path: Path, text: str) -> Sequence[Any]:
    """Reads an array, an object with an array `requests`, or one object per line."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        return _json_lines(path, text)
    if isinstance(document, Mapping):
        document = document.get("requests", [document])
    if not isinstance(document, list):
        raise InvalidRequest(f"the workload {path} is not {_FORMATS}", param="workload")
    return document


def _json_lines(path: Path, text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.splitlines()):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
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
    prefixes = _prefixes(path, [rows[index] for index in order])
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
    if isinstance(result, bool) or int(result) != float(result) or not least <= int(result) <= LONGEST_TOKENS:
        raise ValueError(f"{name} is {result!r}, and must be a whole number from {least} to {LONGEST_TOKENS:,}")
    return int(result)


def _prefixes(path: Path, rows: Sequence[Mapping[str, Any]]) -> Prefixes | None:
    if not any("hash_ids" in row for row in rows):
        return None
    sizes = {row.get("block_tokens", MOONCAKE_BLOCK_TOKENS) for row in rows}
    if len(sizes) > 1 or not all(_is_whole(size) and size > 0 for size in sizes):
        raise InvalidRequest(f"the workload {path} has hash_ids of blocks of {sorted(map(str, sizes))} tokens")
    lists = [row.get("hash_ids", []) for row in rows]
    try:
        all_ids = [block_id for ids in lists for block_id in ids]
        if not all(map(_is_whole, all_ids)):
            raise ValueError(f"there is {next(block_id for block_id in all_ids if not _is_whole(block_id))!r}")
        ids = np.array(all_ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the workload {path} has hash_ids that are not whole numbers: {error}") from error
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in lists])])
    return Prefixes(sizes.pop(), ids, offsets)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong_row(path: Path, number: int, error: Exception) -> InvalidRequest:
    missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return InvalidRequest(
        f"request {number} of the workload {path} is wrong ({missing}); it should be {_FORMATS}", param="workload"
    )
