"""The certificates of `halfmoon up --tls-dir`: one for each role, issued from that authority, and renewed in time."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from halfmoon.errors import HalfmoonError, Incompatible
from halfmoon.rpc.credentials.roles import CLUSTER_ROLES, ClusterRole
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES, state_paths

_DAYS = 30.0
_RENEW_S = 10 * 24 * 3600.0
_RETRY_S = 3600.0


class RoleCertificates:
    """Owns the directory `tls` in the state directory. Without an authority there is none, and services use no TLS."""

    def __init__(self, authority: Path | None, state_dir: Path) -> None:
        self._authority = authority
        self._state_dir = state_dir

    def issue(self) -> None:
        """Writes a certificate for each role. Raises NotFound without an authority in the directory, InvalidRequest."""
        if self._authority is None:
            shutil.rmtree(self._state_dir / "tls", ignore_errors=True)
            return
        try:
            from halfmoon.rpc.tls.authority import Authority
        except ImportError as error:
            raise Incompatible("--tls-dir needs another package: pip install 'halfmoon[tls]'") from error
        authority = Authority.open(self._authority)
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
            await asyncio.sleep(_RENEW_S)
            while (problem := await asyncio.to_thread(self._problem)) is not None:
                on_trouble(f"certificates are not renewed: {problem}")
                await asyncio.sleep(_RETRY_S)
            await on_renewed()

    def _problem(self) -> str | None:
        try:
            self.issue()
        except HalfmoonError as error:
            return error.message
        return None
