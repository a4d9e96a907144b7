"""What holds for the whole suite."""

from __future__ import annotations

import os
from collections.abc import Generator
from threading import Timer

import pytest
import pytest_timeout
from hypothesis import settings

# A deadline of an example asserts a timing, and a busy machine fails it.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

_LAST = pytest.StashKey[Timer]()


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
