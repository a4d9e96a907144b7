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
from halfmoon.sim.point import simulate_point
from services.planner.job import Job, PlanJob, job_from

_NICE = 5  # what is served on the same host goes first
_SAID_EVERY_S = 0.1


class _Voice:
    """Owns the pipe to the planner."""

    def __init__(self, pipe: TextIO) -> None:
        self._pipe = pipe
        self._said_s = 0.0

    def say(self, event: dict[str, Any]) -> None:
        self._pipe.write(json.dumps(event) + "\n")
        self._pipe.flush()

    def progress(self, what: str, done: int, total: int) -> None:
        """Not more often than somebody reads."""
        now_s = time.monotonic()
        if done >= total or now_s - self._said_s >= _SAID_EVERY_S:
            self._said_s = now_s
            self.say({"progress": [what, done, total]})


def main() -> None:
    """Runs the job that stdin names."""
    os.nice(_NICE)
    voice = _Voice(os.fdopen(os.dup(sys.stdout.fileno()), "w"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whoever prints does not print there
    job = job_from(json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        voice.say({"result": _done(job, voice)})
    except InvalidRequest as error:
        voice.say({"error": {"message": error.message, "param": error.param}})


def _done(job: Job, voice: _Voice) -> dict[str, Any]:
    if isinstance(job, PlanJob):
        found = make_plan(job.request, job.num_processes, voice.progress, with_curves=job.with_curves)
        return {"summary": summary_of(found), "plan_yaml": found.file_text}
    point = simulate_point(job.request, lambda done, total: voice.progress("requests", done, total))
    return point.summary(with_requests=job.with_requests)


def _end_with_stdin() -> None:
    """The planner is gone, or wants no more: this process and those that it started end."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
