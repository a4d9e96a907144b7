"""Runs one job in a process and a temporary directory of its own, with the files of its request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfmoon.errors import InvalidRequest, ServiceFailed, Unavailable
from halfmoon.rpc.credentials.child_environment import child_environment
from halfmoon.rpc.processes.owned_directory import owned_directory
from services.planner.job import JobProgress, JobResult, PlanJob, job_line

_MODULE = "services.planner.job_main"
_MAX_LINE_BYTES = 256 << 20  # the longest line is the result of a plan
_TRACKER_S = 2.0  # for the resource tracker to end
_POLL_S = 0.01
_QUIET_TRACKER = {"PYTHONWARNINGS": "ignore:resource_tracker"}  # that a killed job leaves semaphores is no news


async def run_job(job: PlanJob, files: Mapping[str, bytes]) -> AsyncGenerator[JobProgress | JobResult, None]:
    """Yields the job's updates, its result last. Closing the iterator ends the process and all that it started.

    Raises InvalidRequest as the job does, and ServiceFailed if the process ends without a result.
    """
    with owned_directory("planner") as directory:
        _write(directory, files)
        search_path = os.pathsep.join(path for path in sys.path if path)
        process = await asyncio.create_subprocess_exec(
            # -P: files that came with the request cannot be imported
            *(sys.executable, "-P", "-m", _MODULE),
            cwd=directory,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
            env={**child_environment(os.environ, _MODULE), "PYTHONPATH": search_path, **_QUIET_TRACKER},
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(job_line(job)).encode() + b"\n")
            while line := await process.stdout.readline():
                yield _event(json.loads(line))
            code = await process.wait()
            raise ServiceFailed(f"the planner's process ended with exit status {code}: see the planner's log")
        finally:
            await _ended(process)


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    try:
        for file, content in files.items():
            (directory / file).write_bytes(content)
    except OSError as error:
        raise Unavailable(f"the planner cannot keep the request's files in {directory}: {error.strerror}") from error


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Ends the job's process and all that it started.

    Python's resource tracker ignores SIGTERM: it removes the semaphores of the others' pool, and then ends by itself.
    """
    give_up_s = time.monotonic() + _TRACKER_S
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < give_up_s:
            os.killpg(process.pid, 0)
            await asyncio.sleep(_POLL_S)
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _event(message: dict[str, Any]) -> JobProgress | JobResult:
    if "error" in message:
        raise InvalidRequest(message["error"]["message"], param=message["error"]["param"])
    return JobProgress(*message["progress"]) if "progress" in message else JobResult(message["result"])
