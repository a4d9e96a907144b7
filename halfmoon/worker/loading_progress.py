"""Progress of a long load: a bar on a terminal, log events otherwise (a supervisor draws its bars from them)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

log = logging.getLogger(__name__)

_EVENT_SHARE = 0.02  # share of the whole between two events


@contextmanager
def loading_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a callback `(done_bytes, total_bytes)`."""
    if not sys.stderr.isatty():
        yield _event_callback(title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _event_callback(title: str) -> Callable[[int, int], None]:
    next_share = 0.0

    def report(done: int, total: int) -> None:
        nonlocal next_share
        if done >= total or done >= next_share * total:
            next_share = done / max(total, 1) + _EVENT_SHARE
            log.info("weights.progress", extra={"title": title, "done_bytes": done, "total_bytes": total})

    return report
