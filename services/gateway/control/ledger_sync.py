"""Synchronizes the gateway with the ledger: reads other gateways' edits, writes the workers' latency profiles."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime

from halfmoon.errors import HalfmoonError, Incompatible, Unavailable
from halfmoon.ledger.ledger import Ledger
from halfmoon.ledger.profiles import StoredProfile
from halfmoon.policy.models.output_lengths import OutputLengths
from services.gateway.cluster.membership import Membership
from services.gateway.control.active_admission import ActiveAdmission
from services.gateway.control.active_classes import ActiveClasses
from services.gateway.control.active_tenants import ActiveTenants

log = logging.getLogger(__name__)

_MAX_SAMPLES = 20_000  # at start
_LENGTHS_EVERY = 10  # reads of the classes


class LedgerSync:
    """Owns how far this gateway has read the ledger. Requests never wait for it."""

    def __init__(
        self,
        ledger: Ledger,
        classes: ActiveClasses,
        tenants: ActiveTenants,
        admission: ActiveAdmission,
        lengths: OutputLengths,
        membership: Membership,
        gateway_id: str,
    ) -> None:
        self._ledger = ledger
        self._classes = classes
        self._tenants = tenants
        self._admission = admission
        self._lengths = lengths
        self._gateway_id = gateway_id
        self._membership = membership
        self._stored_kinds: set[str] = set()  # kinds of workers with a stored profile
        self._last_row_id = 0
        self._is_failing = False

    async def load(self, host: str) -> None:
        """Reads everything. If the ledger is unavailable, uses the classes and keys that this host saw last.

        Raises Incompatible for classes of a later release.
        """
        try:
            await self._tenants.refresh()
            await self._classes.refresh()
            await self._admission.refresh()
            await self.load_lengths()
        except Unavailable as error:
            self._classes.use_known()
            self._tenants.use_known(host)
            self._note_failure(error.message)

    async def load_lengths(self) -> None:
        """Reads new output lengths of other gateways, and of the time before this one started. Raises Unavailable."""
        self._last_row_id, samples = await self._ledger.outputs.after(self._last_row_id, _MAX_SAMPLES, self._gateway_id)
        for sample in samples:
            self._lengths.add(sample.qos_class, sample.prompt_tokens, sample.output_tokens)

    async def keep_profiles(self) -> None:
        """Stores the latency profiles of workers whose kind is new here. Raises Unavailable."""
        for member in self._membership.members():
            profile = member.identity.profile
            if profile.kind and profile.kind not in self._stored_kinds:
                stored = StoredProfile(profile.kind, datetime.now(UTC), tuple(profile.prefill), tuple(profile.step))
                await self._ledger.profiles.put(stored)
                self._stored_kinds.add(profile.kind)

    async def follow(self, interval_s: float) -> None:
        """Reads every `interval_s`, forever. While the ledger does not answer, what was read last stays in force."""
        num_reads = 0
        while True:
            await asyncio.sleep(interval_s)
            num_reads += 1
            try:
                await self._ledger.join()
                await self._read(with_lengths=num_reads % _LENGTHS_EVERY == 0)
            except HalfmoonError as error:
                self._note_failure(error.message)
            except Exception:  # no content of a ledger may end this loop
                self._note_failure("internal error", is_bug=True)
            else:
                self._is_failing = False

    async def _read(self, *, with_lengths: bool) -> None:
        """Reads what has changed. Raises Unavailable, and Incompatible once all that this release knows is read."""
        reads = [self._tenants.refresh, self._classes.refresh, self._admission.refresh]
        newer: Incompatible | None = None
        for read in [*reads, self.load_lengths, self.keep_profiles] if with_lengths else reads:
            try:
                await read()
            except Incompatible as error:
                newer = error
        if newer is not None:
            raise newer

    def _note_failure(self, reason: str, *, is_bug: bool = False) -> None:
        """Logs the first failure of an outage."""
        if not self._is_failing:
            log.error("ledger.unread", extra={"reason": reason}, exc_info=is_bug)
        self._is_failing = True
