"""The control API's admission mode: kept in the ledger, set while gateways run, in force with the next request."""

from __future__ import annotations

from aiohttp import web

from services.gateway.control.active_admission import ActiveAdmission, AdmissionBody
from services.gateway.http.received_body import receive_body
from services.gateway.openai.parse_body import parse_body

_MAX_VALUES = 8


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
