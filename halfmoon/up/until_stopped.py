"""Runs something with supervised services until a signal or a failure ends it: `halfmoon up` and `halfmoon join`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from halfmoon.background import running
from halfmoon.errors import HalfmoonError, InvalidRequest, leaf_errors
from halfmoon.rpc.processes.descriptors import raise_descriptor_limit
from halfmoon.rpc.processes.private_files import PRIVATE_UMASK, make_private
from halfmoon.up.hosts import Hosts, opened_hosts
from halfmoon.up.state.state_lock import locked_state_dir
from halfmoon.up.state.written_state import WrittenState
from halfmoon.up.supervision.announcements import (
    WeightsProgress,
    print_restart,
    print_stopping,
    print_trouble,
    progress_bars,
)
from halfmoon.up.supervision.child import OnEvent
from halfmoon.up.supervision.log_files import LogFiles
from halfmoon.up.supervision.supervisor import Supervisor
from halfmoon.up.up_options import UpOptions


class UpContext(NamedTuple):
    """What a run works with."""

    options: UpOptions
    supervisor: Supervisor
    hosts: Hosts
    written: WrittenState
    terminal: Console
    bars: Progress


Run = Callable[[UpContext], Coroutine[Any, Any, None]]


def _ignored(service: str, event: dict[str, Any]) -> None:
    """Nobody listens."""


async def until_stopped(options: UpOptions, terminal: Console, run: Run, on_event: OnEvent = _ignored) -> bool:
    """Calls `run` and ends it, and all services, at Ctrl-C or SIGTERM; a second signal ends everything at once.

    `on_event` gets each log event of a service.

    Returns whether there was a second one. Raises what `run` raises, and InvalidRequest for a state directory that
    cannot be used or that another process uses.
    """
    raise_descriptor_limit()
    _open_state_dir(options.state_dir, terminal)
    with locked_state_dir(options.state_dir):
        return await _until_stopped(options, terminal, run, on_event)


async def _until_stopped(options: UpOptions, terminal: Console, run: Run, on_event: OnEvent) -> bool:
    stopping, killing = asyncio.Event(), asyncio.Event()
    written = WrittenState(options.state_dir, partial(print_trouble, terminal), options.joins or "")
    written.write(())  # what an earlier run has left there is not what runs
    on_trouble = partial(print_trouble, terminal)
    logs = LogFiles(options.state_dir / "logs", options.log_limits, on_trouble)
    hosts = await opened_hosts(options, logs, on_trouble)
    with progress_bars(terminal) as bars:
        weights = WeightsProgress(bars)

        def on_line(service: str, event: dict[str, Any]) -> None:
            weights.on_event(service, event)
            on_event(service, event)

        supervisor = Supervisor(
            logs,
            on_line,
            partial(print_restart, terminal),
            launch=hosts.launch,
            on_change=lambda: written.write(supervisor.children),
        )

        def on_signal() -> None:
            if stopping.is_set():
                terminal.print("halfmoon ends at once")
                killing.set()
                supervisor.kill()
            stopping.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        context = UpContext(options, supervisor, hosts, written, terminal, bars)
        try:
            async with running(stopping.wait()) as stop, running(run(context)) as runs:
                await asyncio.wait({stop, runs}, return_when=asyncio.FIRST_COMPLETED)
                if runs.done():
                    await runs
                print_stopping(options, terminal)
        finally:
            await supervisor.stop()
            await hosts.close()
    return killing.is_set()


def _open_state_dir(directory: Path, terminal: Console) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"--state-dir {directory} cannot be made: {error.strerror}") from error
    num_changed = make_private(directory)
    if num_changed:
        print_trouble(terminal, f"other users could read {num_changed} files in {directory}; they are private now")


def exit_status(stopped: Coroutine[Any, Any, bool], terminal: Console) -> int:
    """Runs what `until_stopped` returns, prints an error, and returns the exit status of the command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.umask(PRIVATE_UMASK)
    try:
        if asyncio.run(stopped):
            terminal.file.flush()
            os._exit(0)  # the interpreter would clean up for seconds where the cores are busy
    except (HalfmoonError, ExceptionGroup) as err:
        for error in leaf_errors(err):
            if not isinstance(error, HalfmoonError):
                raise
            terminal.out(f"halfmoon: {error}", style="red", highlight=False)
        return 1
    return 0
