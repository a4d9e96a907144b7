"""Runs batches: the lines of each, a few at a time, and then its files."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from halfmoon.background import cancelled
from halfmoon.errors import HalfmoonError, NoCapacity, Unavailable
from halfmoon.ledger.kept.batches import UNFINISHED, Batch, Batches, LineResult
from halfmoon.ledger.kept.stored_files import CHUNK_BYTES, StoredFiles
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.tenants import Tenant
from services.gateway.batches.file_endpoints import new_file
from services.gateway.batches.input_lines import ENDPOINTS, BadLine, LineRequest, input_lines, read_line
from services.gateway.batches.result_writer import ResultWriter
from services.gateway.detached_request import DetachedRequest, RunDetached
from services.gateway.http.error_responses import error_body, kind_of
from services.gateway.leased_tasks import POLL_S, LeasedTasks

log = logging.getLogger(__name__)

MOST_LINES = 50_000
_MOST_BATCHES = 4  # at once, which share the lines
_TURN = timedelta(minutes=1)  # after which a batch makes room for those that wait
_MOST_TRIES = 3  # of a line that fails by no fault of its own
_LONGEST_PAUSE_S = 5.0
_QUICK_BYTES = 1 << 18  # of a line that is read on the event loop


@dataclass(slots=True)
class _Turn:
    """A batch that runs here."""

    batch: Batch
    is_begun: bool  # lines of it have run before
    ends_at: datetime  # if other batches wait
    is_cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    is_ending: bool = False  # no more lines begin


class BatchRunner:
    """Owns how many lines run, of all batches of this gateway. `tasks` owns the batches."""

    def __init__(
        self,
        batches: Batches,
        files: StoredFiles,
        run: RunDetached,
        batch_class: Callable[[], QosClass],
        tenant_named: Callable[[str], Tenant],
        gateway_id: str,
        most: int,
        max_line_bytes: int,
        keep_days: float,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`most`: how many lines run at once."""
        self._batches = batches
        self._files = files
        self._run_detached = run
        self._batch_class = batch_class
        self._tenant_named = tenant_named
        self._gateway_id = gateway_id
        self._room = asyncio.Semaphore(most)
        self._max_line_bytes = max_line_bytes
        self._keep = timedelta(days=keep_days)
        self._clock = clock
        self._turns: dict[str, _Turn] = {}  # by batch that runs here
        leases = batches.leases if most else batches.leases_to_end
        self.tasks = LeasedTasks(leases, gateway_id, _MOST_BATCHES, self._run)

    def note_cancelled(self, batch_id: str) -> None:
        """Ends the lines of a batch at once, if it runs here; elsewhere that takes a few seconds."""
        if batch_id in self._turns:
            self._turns[batch_id].is_cancelled.set()
        self.tasks.wake()

    async def _run(self, batch_id: str) -> None:
        batch = await self._batches.claimed(batch_id, self._gateway_id)
        if batch is None:
            return
        is_begun = batch.status != "validating"
        if not is_begun:
            batch = await self._validate(batch)
        if batch is not None and batch.status == "in_progress":
            turn = self._turns[batch_id] = _Turn(batch, is_begun, self._clock() + _TURN)
            try:
                await self._run_lines(turn)
            finally:
                del self._turns[batch_id]
        batch = await self._batches.claimed(batch_id, self._gateway_id)
        if batch is not None:
            await self._finalize(batch)

    async def _validate(self, batch: Batch) -> Batch | None:
        """Counts the lines. None for a batch that cannot be run, or is not this gateway's any more."""
        num_lines = 0
        async for _ in self._lines(batch):
            num_lines += 1
        if 0 < num_lines <= MOST_LINES:
            return await self._changed(batch, "in_progress", num_total=num_lines)
        code, message = ("empty_file", "the input file has no lines")
        if num_lines:
            code, message = ("too_many_lines", f"the input file has {num_lines} lines: at most {MOST_LINES}")
        error = {"code": code, "message": message, "param": None, "line": None}
        await self._changed(batch, "failed", errors=[error])
        return None

    async def _run_lines(self, turn: _Turn) -> None:
        """Runs lines without a result, until all have one, the batch is cancelled, or its turn or window ends."""
        async with ResultWriter(self._batches, turn.batch.id, self._gateway_id) as writer:
            lines = asyncio.create_task(self._feed(turn, writer))
            try:
                while not lines.done() and not await self._is_over(turn):
                    told = asyncio.ensure_future(turn.is_cancelled.wait())
                    await asyncio.wait({lines, told}, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                    told.cancel()
            finally:
                if not lines.done():
                    await cancelled(lines)
            if not lines.cancelled():
                lines.result()

    async def _is_over(self, turn: _Turn) -> bool:
        """Whether running lines have to end. Notes when no more may begin, because other batches wait."""
        now, batch = self._clock(), turn.batch
        if turn.is_cancelled.is_set() or now >= batch.expires_at:
            return True
        try:
            current = await self._batches.claimed(batch.id, self._gateway_id)
            turn.is_ending = now >= turn.ends_at and await self._batches.leases.is_any_free(now)
        except Unavailable:
            return False
        return current is None or current.status != "in_progress"

    async def _feed(self, turn: _Turn, writer: ResultWriter) -> None:
        batch = turn.batch
        done = await self._batches.done(batch.id)
        async with asyncio.TaskGroup() as tasks:
            async for request in self._requests(batch):
                if request.number in done:
                    continue
                if isinstance(request, BadLine):
                    await writer.put(_bad_result(batch, request))
                    continue
                await self._room.acquire()
                if turn.is_ending:
                    self._room.release()
                    return
                tasks.create_task(self._run_line(turn, request, writer)).add_done_callback(
                    lambda _: self._room.release()
                )

    async def _run_line(self, turn: _Turn, line: LineRequest, writer: ResultWriter) -> None:
        batch = turn.batch
        detached = DetachedRequest(
            request_id=f"{batch.id}-{line.number}",
            endpoint=ENDPOINTS[batch.endpoint],
            raw=line.raw,
            tenant=self._tenant_named(batch.tenant),
            qos=self._batch_class(),
            created_at=int(self._clock().timestamp()),
            may_be_held=turn.is_begun,
            is_metered=False,
        )
        num_tries = 0
        while True:
            try:
                body = await self._run_detached(detached)
                await writer.put(_result(batch, line, 200, body))
                return
            except (NoCapacity, Unavailable) as error:  # others need the workers, or there are none
                pause_s = min((error.retry_after_ms or 1_000) / 1_000, _LONGEST_PAUSE_S)
            except HalfmoonError as error:
                num_tries += 1
                status = kind_of(error).status
                if status < 500 or num_tries == _MOST_TRIES:
                    await writer.put(_result(batch, line, status, error_body(error)))
                    return
                pause_s = 1.0
            except Exception:
                log.exception("batch.line_failed", extra={"request_id": detached.request_id})
                failure = HalfmoonError("internal error: see the gateway's log")
                await writer.put(_result(batch, line, 500, error_body(failure)))
                return
            await asyncio.sleep(pause_s)

    async def _finalize(self, batch: Batch) -> None:
        """Makes files of the results, and ends the batch."""
        status = "completed"
        if batch.status == "cancelling":
            status = "cancelled"
        elif batch.status == "finalizing":
            status = str(batch.times.get("ends_as", "completed"))
        elif batch.num_completed + batch.num_failed < batch.num_total:
            if self._clock() < batch.expires_at:
                return  # its turn is over, this gateway stops, or the lines failed: somebody goes on
            await self._expire_rest(batch)
            status = "expired"
        current = batch
        if batch.status == "in_progress":
            changed = await self._changed(batch, "finalizing", times={**batch.times, "ends_as": status})
            if changed is None:
                return
            current = changed
        output_file_id = await self._file_of(batch, is_error=False)
        error_file_id = await self._file_of(batch, is_error=True)
        if await self._changed(current, status, output_file_id=output_file_id, error_file_id=error_file_id):
            await self._batches.forget_results(batch.id)

    async def _expire_rest(self, batch: Batch) -> None:
        done = await self._batches.done(batch.id)
        message = "This request could not be executed before the completion window expired."
        async with ResultWriter(self._batches, batch.id, self._gateway_id) as writer:
            async for request in self._requests(batch):
                if request.number not in done:
                    late = BadLine(request.number, request.custom_id, "batch_expired", message)
                    await writer.put(_bad_result(batch, late))

    async def _file_of(self, batch: Batch, *, is_error: bool) -> str | None:
        """A file of one kind of results, in the order of their lines, visible once the batch names it."""
        kind = "errors" if is_error else "output"
        new = new_file(batch.tenant, f"{batch.id}_{kind}.jsonl", "batch_output", self._clock() + self._keep)
        waiting, number, after = bytearray(), 0, -1
        while page := await self._batches.results(batch.id, is_error=is_error, after=after):
            if after < 0:
                await self._files.begin(new)
            after = page[-1].number
            for result in page:
                waiting += result.line + b"\n"
            while len(waiting) >= CHUNK_BYTES:
                await self._files.append(new.id, number, bytes(waiting[:CHUNK_BYTES]))
                del waiting[:CHUNK_BYTES]
                number += 1
        if waiting:
            await self._files.append(new.id, number, bytes(waiting))
        return None if after < 0 else new.id

    async def _changed(self, batch: Batch, status: str, **values: Any) -> Batch | None:
        """The batch with another status; None if it is not this gateway's any more."""
        before = [one for one in UNFINISHED if one == batch.status]
        times = {**values.pop("times", batch.times), f"{status}_at": int(self._clock().timestamp())}
        is_changed = await self._batches.change(batch, self._gateway_id, before, status=status, times=times, **values)
        return batch._replace(status=status, times=times, **values) if is_changed else None

    def _lines(self, batch: Batch) -> Any:
        return input_lines(self._files.chunks(batch.input_file_id), self._max_line_bytes)

    async def _requests(self, batch: Batch) -> Any:
        """The lines of the input as requests. One whose `custom_id` came before is bad."""
        seen: set[str] = set()
        async for number, line in self._lines(batch):
            arguments = (number, line, batch.endpoint, self._max_line_bytes)
            is_long = line is not None and len(line) > _QUICK_BYTES
            request = await asyncio.to_thread(read_line, *arguments) if is_long else read_line(*arguments)
            if request.custom_id in seen:
                message = f"line {number + 1}: custom_id came before; each must be another"
                request = BadLine(number, request.custom_id, "duplicate_custom_id", message)
            elif request.custom_id is not None:
                seen.add(request.custom_id)
            yield request


def _result(batch: Batch, line: LineRequest, status: int, body: dict[str, Any]) -> LineResult:
    request_id = f"{batch.id}-{line.number}"
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(request_id, line.number, line.custom_id, status != 200, response, None)


def _bad_result(batch: Batch, line: BadLine) -> LineResult:
    error = {"code": line.code, "message": line.message}
    return _line(f"{batch.id}-{line.number}", line.number, line.custom_id, True, None, error)


def _line(
    request_id: str,
    number: int,
    custom_id: str | None,
    is_error: bool,
    response: dict[str, Any] | None,
    error: dict[str, Any] | None,
) -> LineResult:
    fields = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": error}
    return LineResult(number, is_error, json.dumps(fields).encode())
