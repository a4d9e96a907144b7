"""Rows for tests."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from halfmoon.ledger.models import RequestRow

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2)))


def row(number: int, **changes: Any) -> RequestRow:
    values = {
        "request_id": f"r{number}",
        "created_at": WHEN,
        "model": "m",
        "endpoint": "completions",
        "status": "ok",
        "http_status": 200,
        "prompt_tokens": 5,
        "cached_tokens": 1,
        "output_tokens": number,
        "finish_reason": "stop",
        "e2e_s": 0.3,
        "num_retries": 0,
        "qos_class": "default",
        "num_outputs": 1,
    }
    return RequestRow(**{**values, **changes})
