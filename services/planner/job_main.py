"""`python -m services.planner.job_main` runs one job of the planner in its working directory; see `job.py`."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from typing import Any, TextIO

from halfmoon.errors import InvalidRequest
from halfmoon.plan.planning import make_plan
from halfmoon.plan.search.search import Progress
from halfmoon.plan.summary import summary_of
from halfmoon.plan.targets.map_plot import map_spec
from halfmoon.plan.targets.map_summary import map_summary
from halfmoon.plan.targets.target_grid import around
from halfmoon.plan.targets.target_map import make_map
from services.planner.job import PlanJob, job_from

_NICE = 5  # below the priority of workers on the same host
_PROGRESS_EVERY_S = 0.1


class _UpdatePipe:
    """Owns the pipe to the planner."""

    def __init__(self, pipe: TextIO) -> None:
        self._pipe = pipe
        self._sent_s = 0.0

    def send(self, event: dict[str, Any]) -> None:
        self._pipe.write(json.dumps(event) + "\n")
        self._pipe.flush()

    def progress(self, what: str, done: int, total: int) -> None:
        """Sends progress at most every `_PROGRESS_EVERY_S`, and always the end of a stage."""
        now_s = time.monotonic()
        if done >= total or now_s - self._sent_s >= _PROGRESS_EVERY_S:
            self._sent_s = now_s
            self.send({"progress": [what, done, total]})


def main() -> None:
    """Runs the job that stdin describes."""
    os.nice(_NICE)
    tempfile.tempdir = os.getcwd()  # which goes with this job, however it ends
    updates = _UpdatePipe(os.fdopen(os.dup(sys.stdout.fileno()), "w"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints of libraries go to the log, not into the pipe
    job = job_from(json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        updates.send({"result": _result(job, updates.progress)})
    except InvalidRequest as error:
        updates.send({"error": {"message": error.message, "param": error.param}})
    except RecursionError:
        updates.send({"error": {"message": "a file of the request is nested too deeply", "param": "files"}})


def _result(job: PlanJob, on_progress: Progress) -> dict[str, Any]:
    if job.is_map:
        ttfts_s, tpots_s = (around(one) if one else () for one in (job.request.ttft_s, job.request.tpot_s))
        summary = map_summary(make_map(job.request, ttfts_s, tpots_s, job.num_processes, on_progress))
        return {"summary": summary, "chart": map_spec(summary)}
    result = make_plan(job.request, job.num_processes, on_progress, with_curves=job.with_curves)
    return {"summary": summary_of(result), "plan_yaml": result.file_text}


def _end_with_stdin() -> None:
    """Ends this process and those that it started once the planner closes stdin."""
    sys.stdin.read()
    os.killpg(0, signal.SIGTERM)  # but not the resource tracker, which removes semaphores and follows


if __name__ == "__main__":
    main()
