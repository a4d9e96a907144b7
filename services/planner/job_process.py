"""Runs one job in a process and a temporary directory of its own, with the files of its request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from halfmoon.errors import InvalidRequest, ServiceFailed
from services.planner.job import JobProgress, JobResult, PlanJob, job_line

_MAX_LINE_BYTES = 256 << 20  # the longest line is the result of a plan


async def run_job(job: PlanJob, files: Mapping[str, bytes]) -> AsyncGenerator[JobProgress | JobResult, None]:
    """Yields the job's updates, its result last. Closing the iterator ends the process and all that it started.

    Raises InvalidRequest as the job does, and ServiceFailed if the process ends without a result.
    """
    with TemporaryDirectory(prefix="halfmoon-planner-") as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        process = await asyncio.create_subprocess_exec(
            # -P: files that came with the request cannot be imported
            *(sys.executable, "-P", "-m", "services.planner.job_main"),
            cwd=name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
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
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _event(message: dict[str, Any]) -> JobProgress | JobResult:
    if "error" in message:
        raise InvalidRequest(message["error"]["message"], param=message["error"]["param"])
    return JobProgress(*message["progress"]) if "progress" in message else JobResult(message["result"])
