"""A tier that fails for a while: said once when it begins and once when it ends, however often it is tried."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Outage:
    """Owns whether one thing fails at present, and why."""

    def __init__(self, event: str, **fields: object) -> None:
        """event: name of the log lines, which carry `fields`."""
        self._event = event
        self._fields = fields
        self.reason = ""  # empty: it works

    def failed(self, reason: object) -> None:
        """Notes a failure; the first is a warning."""
        is_new = not self.reason
        self.reason = str(reason)[:300] or "failed"
        log.log(
            logging.WARNING if is_new else logging.DEBUG, self._event, extra={**self._fields, "reason": self.reason}
        )

    def succeeded(self) -> None:
        """Notes that it works."""
        if self.reason:
            self.reason = ""
            log.info(f"{self._event}.over", extra=self._fields)
