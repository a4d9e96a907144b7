"""JSON log lines: time, level, logger, event, service, request id, then the event's own fields."""

from __future__ import annotations

import logging
import sys

from pythonjsonlogger.json import JsonFormatter

from halfmoon.rpc.context import request_id


def _is_news(record: logging.LogRecord) -> bool:
    """False for the traceback that gRPC logs when a reader leaves while a message to it is on its way."""
    kind = record.exc_info[0] if record.exc_info else None
    return not (record.name == "grpc._cython.cygrpc" and kind is not None and kind.__name__ == "ExecuteBatchError")


class _RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if request_id() and not hasattr(record, "request_id"):
            record.request_id = request_id()
        return True


def configure_logs(service: str, level: str = "INFO") -> None:
    """Sends the root logger's records to stderr as one JSON object per line. Called once, by `__main__`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_is_news)
    handler.addFilter(_RequestIdFilter())
    handler.setFormatter(
        JsonFormatter(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger", "message": "event"},
            static_fields={"service": service},
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
