"""One job in a process of its own, in a directory of its own that has the files of its request."""

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

_MOST_LINE_BYTES = 256 << 20  # of a result with every request's times


async def run_job(job: Job, files: Mapping[str, bytes]) -> AsyncGenerator[JobProgress | JobResult, None]:
    """What the job says; its result is the last. Leaving the iteration ends the process and all that it started.

    Raises InvalidRequest as the job does, and ServiceFailed for a process that ends without a word.
    """
    with TemporaryDirectory(prefix="halfmoon-planner-") as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        process = await asyncio.create_subprocess_exec(
            # -P: files that came with the request are no modules
            *(sys.executable, "-P", "-m", "services.planner.job_main"),
            cwd=name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_MOST_LINE_BYTES,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(one for one in sys.path if one)},
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


def _event(said: dict[str, Any]) -> JobProgress | JobResult:
    if "error" in said:
        raise InvalidRequest(said["error"]["message"], param=said["error"]["param"])
    return JobProgress(*said["progress"]) if "progress" in said else JobResult(said["result"])
