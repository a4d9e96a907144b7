"""What strangers are told, and the log lines about them, which they must not be able to multiply."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from halfmoon.errors import Forbidden, HalfmoonError, Unauthenticated

log = logging.getLogger(__name__)

NEEDS_CREDENTIAL = "a credential of this cluster is needed: set HALFMOON_CLUSTER_SECRET or HALFMOON_CLUSTER_SECRET_FILE"
_LOG_EVERY_S = 10.0


def stranger() -> HalfmoonError:
    """The answer to whoever has no credential of this cluster, whatever was asked."""
    return Unauthenticated(NEEDS_CREDENTIAL)


def wrong_role(role: str, method: str) -> HalfmoonError:
    """The answer to a process of the cluster whose role may not do this."""
    return Forbidden(f"a {role} may not call {method}")


class RefusalLog:
    """Owns the count of refusals since the last line. Writes at most one line in ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = clock()
        self._num_untold = 0

    def note(self, error: HalfmoonError, peer: str) -> None:
        """Counts a refusal, and logs it if enough time has passed."""
        self._num_untold += 1
        if self._clock() < self._next_s:
            return
        fields = {"status": error.grpc_status, "peer": peer, "num_refused": self._num_untold}
        log.warning("rpc.refused", extra=fields)
        self._next_s, self._num_untold = self._clock() + _LOG_EVERY_S, 0
