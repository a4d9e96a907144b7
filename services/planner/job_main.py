"""`python -m services.planner.job_main`: one job of the planner, in its working directory; see `job.py`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any, TextIO

from halfmoon.errors import InvalidRequest
from halfmoon.plan.planning import make_plan
from halfmoon.plan.summary import summary_of
from halfmoon.sim.simulate_point import simulate_point
from services.planner.job import Job, PlanJob, job_from

_NICE = 5  # services on the same host have precedence
_PROGRESS_INTERVAL_S = 0.1


class _Messages:
    """Owns the pipe to the planner."""

    def __init__(self, pipe: TextIO) -> None:
        self._pipe = pipe
        self._sent_s = 0.0

    def send(self, event: dict[str, Any]) -> None:
        self._pipe.write(json.dumps(event) + "\n")
        self._pipe.flush()

    def progress(self, what: str, done: int, total: int) -> None:
        """Sends progress, but not more often than anyone reads it."""
        now_s = time.monotonic()
        if done >= total or now_s - self._sent_s >= _PROGRESS_INTERVAL_S:
            self._sent_s = now_s
            self.send({"progress": [what, done, total]})


def main() -> None:
    """Runs the job named on stdin."""
    os.nice(_NICE)
    messages = _Messages(os.fdopen(os.dup(sys.stdout.fileno()), "w"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps prints out of the pipe
    job = job_from(json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        messages.send({"result": _done(job, messages)})
    except InvalidRequest as error:
        messages.send({"error": {"message": error.message, "param": error.param}})


def _done(job: Job, messages: _Messages) -> dict[str, Any]:
    if isinstance(job, PlanJob):
        plan = make_plan(job.request, job.num_processes, messages.progress, with_curves=job.with_curves)
        return {"summary": summary_of(plan), "plan_yaml": plan.file_text}
    point = simulate_point(job.request, lambda done, total: messages.progress("requests", done, total))
    return point.summary(with_requests=job.with_requests)


def _end_with_stdin() -> None:
    """Ends this process and its children when the planner is gone or wants no more."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
