"""What all tests of the console share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.console.fake_gateway import FakeGateway, running_fake_gateway


@pytest.fixture(autouse=True)
def _own_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit's AppTest leaves its script behind as `__main__`, which processes started later would run again."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with running_fake_gateway() as fake:
        yield fake
