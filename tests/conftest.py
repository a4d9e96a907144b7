"""What holds for the whole suite."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from threading import Timer

import pytest
import pytest_timeout
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# A deadline of an example asserts a timing, and a busy machine fails it.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

# Their one system takes ten seconds of processor to start.
_OF_ONE_SYSTEM = tuple(f"tests/e2e/test_{name}.py::" for name in ("api", "golden", "system"))

_LAST = pytest.StashKey[Timer]()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    directory = tmp_path / "mounted"
    directory.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory))
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=False, capture_output=True)


class _Schedule(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Of processes: tests of one file, and those of one started system, come to one of them."""

    def _split_scope(self, nodeid: str) -> str:
        return "one system" if nodeid.startswith(_OF_ONE_SYSTEM) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return _Schedule(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> Generator[None, object, object]:
    """Half as long again after its time, a test that still runs ends the suite, with the stacks of all threads.

    The time itself only raises an exception in the test, once: hypothesis takes it for a failing example and tries that
    again, and what hangs when it is torn down is asked no second time.
    """
    timer = Timer(1.5 * settings.timeout, _end, (item, settings))
    timer.daemon = True
    timer.start()
    item.stash[_LAST] = timer
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Generator[None, object, object]:
    if _LAST in item.stash:  # a file that cannot be imported has none
        item.stash[_LAST].cancel()
    return (yield)


def _end(item: pytest.Item, settings: pytest_timeout.Settings) -> None:
    """Of this process, which `--max-worker-restart 0` lets be the end of the others."""
    if hasattr(item.config, "workerinput"):  # one of pytest-xdist's, whose standard output leads nowhere
        item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
        os.dup2(2, 1)
    pytest_timeout.timeout_timer(item, settings)
