"""The admission mode in force, and its endpoint.

The mode that an operator has set for all gateways is kept in the ledger; without one, each gateway uses its own.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast, get_args

from aiohttp import web
from pydantic import Field

from halfmoon.ledger.edits.mode_edits import ModeEdit, ModeEdits
from halfmoon.ledger.edits.stored_classes import LaterRelease
from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.refusal import AdmissionMode
from services.gateway.http.received_request import receive_body
from services.gateway.openai.bodies.parse_body import parse_body
from services.gateway.openai.bodies.strict_model import Part

log = logging.getLogger(__name__)

_SHOWN = 20
_MAX_VALUES = 8


class AdmissionBody(Part):
    """A mode, or None for each gateway's own, and the version that it replaces."""

    mode: AdmissionMode | None
    version: int = Field(0, ge=0, lt=1 << 31)  # 0: none has been set


class ActiveAdmission:
    """Owns the admission controller's mode. Edits and reads of the ledger take turns."""

    def __init__(self, stored: ModeEdits, controller: AdmissionController, own: AdmissionMode) -> None:
        self._stored = stored
        self._controller = controller
        self._own = own
        self._turn = asyncio.Lock()

    async def refresh(self) -> None:
        """Applies other gateways' edits. Raises Unavailable, and LaterRelease for a mode of a later release."""
        async with self._turn:
            self._apply(await self._stored.present())

    async def put(self, body: AdmissionBody) -> ModeEdit:
        """Sets the mode for all gateways. Raises VersionConflict or Unavailable; nothing has changed then."""
        async with self._turn:
            edit = await self._stored.put(body.mode, body.version)
            self._apply(edit)
        return edit

    async def shown(self) -> dict[str, Any]:
        """The mode in force here, the one set for all gateways, and the newest edits. Raises Unavailable."""
        edits = await self._stored.newest(_SHOWN)
        return {
            "mode": self._controller.mode,
            "own": self._own,
            "set": edits[0].mode if edits else None,
            "version": edits[0].version if edits else 0,
            "edits": [{**edit._asdict(), "edited_at": edit.edited_at.isoformat()} for edit in edits],
        }

    def _apply(self, newest: ModeEdit | None) -> None:
        mode = _known((newest and newest.mode) or self._own)
        if mode != self._controller.mode:
            log.info("admission.changed", extra={"mode": mode, "before": self._controller.mode})
            self._controller.mode = mode


class AdmissionEndpoint:
    """Serves the admission mode. Owns nothing."""

    def __init__(self, admission: ActiveAdmission) -> None:
        self._admission = admission

    async def get(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/admission. Raises Unavailable."""
        return web.json_response(await self._admission.shown())

    async def put(self, request: web.Request) -> web.Response:
        """PUT /halfmoon/v1/admission: the mode, and the version that it replaces.

        Raises InvalidRequest, VersionConflict or Unavailable; nothing has changed then.
        """
        await self._admission.put(parse_body(AdmissionBody, await receive_body(request), _MAX_VALUES))
        return web.json_response(await self._admission.shown())


def _known(mode: str) -> AdmissionMode:
    if mode not in get_args(AdmissionMode):
        raise LaterRelease(f"admission mode {mode!r} of the ledger is of a release that this one does not know")
    return cast(AdmissionMode, mode)
