"""Runs one job in a process and a directory of its own; the directory holds the request's files."""

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
from services.planner.job import Job, JobProgress, JobResult, job_line

_MOST_LINE_BYTES = 256 << 20  # for a result with the times of every request


async def run_job(job: Job, files: Mapping[str, bytes]) -> AsyncGenerator[JobProgress | JobResult, None]:
    """Yields the job's messages, its result last. Leaving the iteration ends the process and all that it started.

    Raises the job's InvalidRequest, and ServiceFailed for a process that ends without a result.
    """
    with TemporaryDirectory(prefix="halfmoon-planner-") as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        process = await asyncio.create_subprocess_exec(
            # -P: the request's files cannot be imported as modules
            *(sys.executable, "-P", "-m", "services.planner.job_main"),
            cwd=name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_MOST_LINE_BYTES,
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
