"""What holds for the whole suite."""

from __future__ import annotations

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
    timer = Timer(1.5 * settings.timeout, pytest_timeout.timeout_timer, (item, settings))
    timer.daemon = True
    timer.start()
    item.stash[_LAST] = timer
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Generator[None, object, object]:
    if _LAST in item.stash:  # a file that cannot be imported has none
        item.stash[_LAST].cancel()
    return (yield)
