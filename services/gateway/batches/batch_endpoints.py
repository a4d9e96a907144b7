"""/v1/batches: a tenant's batches."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from halfmoon.errors import InvalidRequest, NoCapacity
from halfmoon.ledger.kept.batches import Batch, Batches
from services.gateway.batches.batch_runner import BatchRunner
from services.gateway.http.api_keys import tenant_of
from services.gateway.http.pages import requested_page, shown_page
from services.gateway.http.rate_limits import RateLimits
from services.gateway.http.received_request import receive_body
from services.gateway.openai.bodies.batch_body import BatchBody
from services.gateway.openai.bodies.parse_body import parse_body

_WINDOW = timedelta(hours=24)
_MOST_UNFINISHED = 100  # of a tenant
_MAX_VALUES = 1_000  # of a body
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class BatchEndpoints:
    """Serves batches. A tenant sees its own; another's are not there. Owns nothing."""

    def __init__(self, batches: Batches, runner: BatchRunner, limits: RateLimits, *, is_open: bool) -> None:
        self._batches = batches
        self._runner = runner
        self._limits = limits
        self._is_open = is_open

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/batches. Raises InvalidRequest, NotFound for the file, and NoCapacity."""
        tenant, now = tenant_of(request), datetime.now(UTC)
        self._limits.take_request(tenant)
        if not self._is_open:
            raise InvalidRequest("no batches are run here (gateway.batch_concurrency is 0)")
        body = parse_body(BatchBody, await receive_body(request), _MAX_VALUES)
        if await self._batches.num_unfinished(tenant.name) >= _MOST_UNFINISHED:
            message = f"{_MOST_UNFINISHED} of your batches are not finished yet: wait for some, or cancel them"
            raise NoCapacity(message, retry_after_ms=60_000)
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            tenant=tenant.name,
            status="validating",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            output_file_id=None,
            error_file_id=None,
            created_at=now,
            expires_at=now + _WINDOW,
            labels=body.metadata or {},
            times={},
            errors=[],
            num_total=0,
            num_completed=0,
            num_failed=0,
        )
        await self._batches.create(batch, now)
        self._runner.tasks.wake()
        return web.json_response(shown_batch(batch))

    async def list(self, request: web.Request) -> web.Response:
        """GET /v1/batches, with `limit` and `after`: the newest first."""
        page = requested_page(request)
        rows = await self._batches.page(tenant_of(request).name, page)
        return web.json_response(shown_page([shown_batch(batch) for batch in rows], page))

    async def get(self, request: web.Request) -> web.Response:
        """GET /v1/batches/{id}."""
        return web.json_response(shown_batch(await self._batches.get(*_own(request))))

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /v1/batches/{id}/cancel: lines that run end, results so far become files."""
        batch = await self._batches.cancel(*_own(request), datetime.now(UTC))
        self._runner.note_cancelled(batch.id)
        return web.json_response(shown_batch(batch))


def _own(request: web.Request) -> tuple[str, str]:
    return request.match_info["batch_id"], tenant_of(request).name


def shown_batch(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI's API shows it."""
    counts = {"total": batch.num_total, "completed": batch.num_completed, "failed": batch.num_failed}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": list(batch.errors)} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at.timestamp()),
        "expires_at": int(batch.expires_at.timestamp()),
        **{f"{status}_at": batch.times.get(f"{status}_at") for status in _TIMES},
        "request_counts": counts,
        "metadata": dict(batch.labels),
    }
