"""What others write into the ledger reaches this gateway; what its workers measured of themselves goes there."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime

from halfmoon.errors import HalfmoonError, Unavailable
from halfmoon.ledger.ledger import Ledger
from halfmoon.ledger.profiles import StoredProfile
from halfmoon.policy.models.output_lengths import OutputLengths
from services.gateway.cluster.membership import Membership
from services.gateway.control.active_admission import ActiveAdmission
from services.gateway.control.active_classes import ActiveClasses

log = logging.getLogger(__name__)

_MAX_SAMPLES = 20_000  # at start
_LENGTHS_EVERY = 10  # looks at the classes


class LedgerSync:
    """Owns how far this gateway has read the ledger. Who serves requests never waits for it."""

    def __init__(
        self,
        ledger: Ledger,
        classes: ActiveClasses,
        admission: ActiveAdmission,
        lengths: OutputLengths,
        membership: Membership,
        gateway_id: str,
    ) -> None:
        self._ledger = ledger
        self._classes = classes
        self._admission = admission
        self._lengths = lengths
        self._gateway_id = gateway_id
        self._membership = membership
        self._kept: set[str] = set()  # kinds of workers
        self._last_row_id = 0
        self._is_failing = False

    async def load(self) -> None:
        """Everything that is there; of a ledger that is away the classes that it had last, as far as this host knows.

        Raises Incompatible for classes of a later release.
        """
        try:
            await self._classes.refresh()
            await self._admission.refresh()
            await self.load_lengths()
        except Unavailable as error:
            self._classes.use_known()
            self._note_failure(error.message)

    async def load_lengths(self) -> None:
        """Outputs of requests at other gateways, and before this one began, since the last time. Raises Unavailable."""
        self._last_row_id, samples = await self._ledger.outputs.after(self._last_row_id, _MAX_SAMPLES, self._gateway_id)
        for sample in samples:
            self._lengths.add(sample.qos_class, sample.prompt_tokens, sample.output_tokens)

    async def keep_profiles(self) -> None:
        """Writes down what workers of a kind that is new here measured of themselves. Raises Unavailable."""
        for member in self._membership.members():
            told = member.identity.profile
            if told.kind and told.kind not in self._kept:
                profile = StoredProfile(told.kind, datetime.now(UTC), tuple(told.prefill), tuple(told.step))
                await self._ledger.profiles.put(profile)
                self._kept.add(told.kind)

    async def follow(self, interval_s: float) -> None:
        """For ever. While the ledger does not answer, what is known stays in force."""
        looks = 0
        while True:
            await asyncio.sleep(interval_s)
            looks += 1
            try:
                await self._ledger.join()
                await self._classes.refresh()
                await self._admission.refresh()
                if looks % _LENGTHS_EVERY == 0:
                    await self.load_lengths()
                    await self.keep_profiles()
            except HalfmoonError as error:
                self._note_failure(error.message)
            except Exception:  # nothing that stands in a ledger may end it
                self._note_failure("internal error", is_bug=True)
            else:
                self._is_failing = False

    def _note_failure(self, reason: str, *, is_bug: bool = False) -> None:
        """Once an outage."""
        if not self._is_failing:
            log.error("ledger.unread", extra={"reason": reason}, exc_info=is_bug)
        self._is_failing = True
