"""The log of a service: one JSON object a line, and no traceback for what is no fault."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from grpc._cython import cygrpc

from halfmoon.rpc.telemetry.logs import configure_logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers.clear()
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:] = before
    root.setLevel(level)


def test_a_reader_that_leaves_while_a_message_is_on_its_way_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("demo")
    log = logging.getLogger("grpc._cython.cygrpc")
    for error in (cygrpc.ExecuteBatchError("execute_batch", ()), cygrpc.UsageError("a bug")):
        try:
            raise error
        except Exception:
            log.exception("raised in core by servicer method [%s]", "/halfmoon.KVStoreBytes/Get")
    log.error("something else")
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [event["event"].split()[0] for event in events] == ["raised", "something"]
    assert "a bug" in events[0]["exc_info"]
