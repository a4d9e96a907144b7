"""The certificates of `halfmoon up --tls-dir`: one for each role, issued from that authority, and renewed in time."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from halfmoon.errors import HalfmoonError, Incompatible
from halfmoon.rpc.credentials.roles import CLUSTER_ROLES, ClusterRole
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES, state_paths

_DAYS = 30.0
_RENEW_AFTER = timedelta(days=10)
_LOOK_S = 60.0  # by the other clock, which stands still while a host is suspended
_RETRY_S = 3600.0


class RoleCertificates:
    """Owns the directory `tls` in the state directory. Without an authority there is none, and services use no TLS."""

    def __init__(
        self, authority: Path | None, state_dir: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._authority = authority
        self._state_dir = state_dir
        self._clock = clock
        self._issued_at = clock()

    def issue(self) -> None:
        """Writes a certificate for each role. Raises NotFound without an authority in the directory, InvalidRequest."""
        if self._authority is None:
            shutil.rmtree(self._state_dir / "tls", ignore_errors=True)
            return
        try:
            from halfmoon.rpc.tls.authority import Authority
        except ImportError as error:
            raise Incompatible("--tls-dir needs another package: pip install 'halfmoon[tls]'") from error
        authority, self._issued_at = Authority.open(self._authority), self._clock()
        for role in CLUSTER_ROLES:
            authority.issue(role, "up", days=_DAYS).write(state_paths(self._state_dir, role).cert.parent)

    def environment(self, role: ClusterRole) -> dict[str, str]:
        """Returns the variables that name the files of a role."""
        if self._authority is None:
            return {}
        return dict(zip(TLS_VARIABLES, map(str, state_paths(self._state_dir, role)), strict=True))

    async def renew(self, on_trouble: Callable[[str], None], on_renewed: Callable[[], Awaitable[None]]) -> None:
        """Issues new certificates long before the old ones end, as long as it runs. Services take them over.

        `on_renewed` copies them to other hosts.
        """
        while self._authority is not None:
            await asyncio.sleep(_LOOK_S)
            if not self._is_due():
                continue
            while (problem := await asyncio.to_thread(self._problem)) is not None:
                on_trouble(f"certificates are not renewed: {problem}")
                await asyncio.sleep(_RETRY_S)
            await on_renewed()

    def _is_due(self) -> bool:
        """Whether they were issued long ago, or the clock was set back: they may not be valid yet."""
        return not self._issued_at <= self._clock() < self._issued_at + _RENEW_AFTER

    def _problem(self) -> str | None:
        try:
            self.issue()
        except HalfmoonError as error:
            return error.message
        return None
