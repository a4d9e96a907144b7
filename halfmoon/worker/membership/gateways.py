"""The gateways that a worker registers with. Names are resolved again and again: gateways come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from halfmoon.rpc.addresses.resolved import resolved
from halfmoon.worker.membership.registration import Registration

log = logging.getLogger(__name__)

_RESOLVE_S = 5.0
_FIRST_S = 0.5  # until there is a gateway


class Gateways:
    """Owns a registration for each address that `named` stands for.

    A gateway that its name no longer stands for is left when its registration ends: it may be draining. While a name
    cannot be resolved, what it stood for before counts.
    """

    def __init__(
        self,
        named: Sequence[str],
        registration: Callable[[str], Registration],
        on_left: Callable[[str], Awaitable[None]],
        resolve: Callable[[str], Awaitable[Iterable[str]]] = resolved,
        resolve_s: float = _RESOLVE_S,
    ) -> None:
        """named: host:port of each; `registration` makes one from an address, and `on_left` is told of its end."""
        self._named = named
        self._registration = registration
        self._on_left = on_left
        self._resolve = resolve
        self._resolve_s = resolve_s
        self._known: dict[str, frozenset[str]] = {}  # addresses by name
        self._unresolved: set[str] = set()  # names that were logged
        self._running: dict[str, Registration] = {}  # by address
        self._leaving = asyncio.Event()
        self.most = 0  # registrations that there have been at a time

    def report_now(self) -> None:
        """Sends a load report to every gateway at once, because something important changed."""
        for registration in self._running.values():
            registration.report_now()

    def leave(self) -> None:
        """Ends every registration after a last report. `run` returns when the gateways have read everything."""
        self._leaving.set()
        for registration in self._running.values():
            registration.leave()

    async def run(self) -> None:
        """Stays registered until `leave`. Raises the error with which a gateway refuses this worker."""
        async with asyncio.TaskGroup() as group:
            while True:
                wanted = await self._wanted()
                if self._leaving.is_set():
                    return
                for address in sorted(wanted - self._running.keys()):
                    self._running[address] = self._registration(address)
                    group.create_task(self._registered(address))
                for address, registration in self._running.items():
                    registration.is_wanted = address in wanted
                if len(self._running) > self.most:
                    self.most = len(self._running)
                    self.report_now()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._resolve_s if self._running else min(_FIRST_S, self._resolve_s)):
                        await self._leaving.wait()
                        return

    async def _registered(self, address: str) -> None:
        await self._running[address].run()
        log.info("gateway.left", extra={"gateway": address})
        del self._running[address]
        await self._on_left(address)

    async def _wanted(self) -> set[str]:
        for name in self._named:
            try:
                self._known[name] = frozenset(await self._resolve(name))
                self._unresolved.discard(name)
            except OSError as error:
                if name not in self._unresolved:
                    log.warning("registration.lost", extra={"gateway": name, "reason": f"cannot resolve it: {error}"})
                self._unresolved.add(name)
        return {address for found in self._known.values() for address in found}
