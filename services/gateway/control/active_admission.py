"""Which admission mode is in force: the ledger's, whichever gateway edited it, else this gateway's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast, get_args

from aiohttp import web
from pydantic import Field

from halfmoon.errors import Incompatible
from halfmoon.ledger.admission import AdmissionEdit, AdmissionEdits
from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.refusal import AdmissionMode
from services.gateway.http.received_request import receive_body
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.strict_model import Part

log = logging.getLogger(__name__)

_SHOWN = 20
_MAX_VALUES = 8


class AdmissionBody(Part):
    """A mode, None for each gateway's own, and the version that it replaces."""

    mode: AdmissionMode | None
    version: int = Field(0, ge=0, lt=1 << 31)  # 0: nobody has set one


class ActiveAdmission:
    """Owns the admission controller's mode. One edit or look at the ledger at a time."""

    def __init__(self, stored: AdmissionEdits, controller: AdmissionController, own: AdmissionMode) -> None:
        self._stored = stored
        self._controller = controller
        self._own = own
        self._turn = asyncio.Lock()

    async def refresh(self) -> None:
        """Takes over what others edited. Raises Unavailable, and Incompatible for a mode of a later release."""
        async with self._turn:
            self._use(await self._stored.newest(1))

    async def put(self, body: AdmissionBody) -> AdmissionEdit:
        """Raises VersionConflict or Unavailable; nothing has changed then."""
        async with self._turn:
            edit = await self._stored.put(body.mode, body.version)
            self._use([edit])
        return edit

    async def shown(self) -> dict[str, Any]:
        """What is in force here, what is set for all gateways, and the newest edits. Raises Unavailable."""
        edits = await self._stored.newest(_SHOWN)
        return {
            "mode": self._controller.mode,
            "own": self._own,
            "set": edits[0].mode if edits else None,
            "version": edits[0].version if edits else 0,
            "edits": [{**one._asdict(), "edited_at": one.edited_at.isoformat()} for one in edits],
        }

    def _use(self, newest: Sequence[AdmissionEdit]) -> None:
        mode = _known((newest[0].mode if newest else None) or self._own)
        if mode != self._controller.mode:
            log.info("admission.changed", extra={"mode": mode, "before": self._controller.mode})
            self._controller.mode = mode


class AdmissionEndpoint:
    """Serves the mode. Owns nothing."""

    def __init__(self, admission: ActiveAdmission) -> None:
        self._admission = admission

    async def get(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/admission. Raises Unavailable."""
        return web.json_response(await self._admission.shown())

    async def put(self, request: web.Request) -> web.Response:
        """PUT /halfmoon/v1/admission: the mode, and the version that it replaces.

        Raises InvalidRequest, VersionConflict or Unavailable; then nothing has changed.
        """
        await self._admission.put(parse_body(AdmissionBody, await receive_body(request), _MAX_VALUES))
        return web.json_response(await self._admission.shown())


def _known(mode: str) -> AdmissionMode:
    if mode not in get_args(AdmissionMode):
        raise Incompatible(f"admission mode {mode!r} of the ledger is of a release that this one does not know")
    return cast(AdmissionMode, mode)
