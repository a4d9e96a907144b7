"""The control API's changes of one worker: it drains and ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web
from pydantic import Field

from halfmoon.errors import DeadlineExceeded
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.member import Member
from services.gateway.cluster.worker_changes import check_without, named
from services.gateway.http.received_request import receive_body
from services.gateway.openai.bodies.parse_body import parse_body
from services.gateway.openai.bodies.strict_model import Part

log = logging.getLogger(__name__)

_MAX_VALUES = 10  # of a body
_ANSWER_S = 10.0  # for the worker to report the change
_POLL_S = 0.02  # a worker's report is no event


class DrainBody(Part):
    """How a worker is to leave."""

    returns: bool = Field(False, description="its supervisor starts it again")
    force: bool = Field(False, description="also if the cluster cannot serve without it")


class WorkerEndpoints:
    """Serves them. Owns nothing: a change is the worker's own, which tells all its gateways."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def drain(self, request: web.Request) -> web.Response:
        """POST /halfmoon/v1/workers/{name}/drain: no new work; what was accepted finishes, then the worker ends.

        Returns when the worker has begun to. Raises NotFound, InvalidRequest, ChangeRefused or DeadlineExceeded.
        """
        member = self._member(request)
        body = parse_body(DrainBody, await receive_body(request) or b"{}", _MAX_VALUES)
        if not body.force:
            check_without(member, self._cluster.membership.members())
        log.info("worker.drain", extra={"worker_id": member.worker_id, "returns": body.returns})
        self._cluster.drain(member.worker_id, returns=body.returns)
        await self._until(member, lambda: member.load.draining)
        return web.json_response({"worker_id": member.worker_id, "draining": True, "returns": body.returns})

    def _member(self, request: web.Request) -> Member:
        return named(request.match_info["name"], self._cluster.membership.members())

    async def _until(self, member: Member, holds: Callable[[], bool]) -> None:
        """Returns when it holds, or the worker has left. Raises DeadlineExceeded."""
        membership = self._cluster.membership
        try:
            async with asyncio.timeout(_ANSWER_S):
                while not holds() and member in membership.members():  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise DeadlineExceeded(f"{member.worker_id} has not answered within {_ANSWER_S:g} s") from None
