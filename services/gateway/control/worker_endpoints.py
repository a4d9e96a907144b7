"""The control API's changes of one worker: it serves another role, or drains and ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from pydantic import Field

from halfmoon.errors import DeadlineExceeded, Unavailable
from halfmoon.ledger.history.worker_changes import WorkerChange, WorkerChanges
from halfmoon.policy.view.worker_view import Role
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.member import Member
from services.gateway.cluster.worker_changes import (
    ChangeRefused,
    check_epoch,
    check_role_change,
    check_without,
    named,
)
from services.gateway.http.received_request import query_number, receive_body
from services.gateway.openai.bodies.parse_body import parse_body
from services.gateway.openai.bodies.strict_model import Part

log = logging.getLogger(__name__)

_MAX_VALUES = 10  # of a body
_MAX_BY_CHARS = 128
_ANSWER_S = 10.0  # for the worker to report the change
_POLL_S = 0.02  # a worker's report is no event
_MAX_ROWS = 1_000


class ChangeBody(Part):
    """What every change may say."""

    force: bool = Field(False, description="also where it is refused for the cluster's sake")
    by: str | None = Field(None, max_length=_MAX_BY_CHARS, description="who changes it, for the record")


class DrainBody(ChangeBody):
    """How a worker is to leave."""

    returns: bool = Field(False, description="its supervisor starts it again")


class RoleBody(ChangeBody):
    """The role that a worker is to serve."""

    role: Role
    epoch: int | None = Field(None, ge=0, description="of the role that this replaces; 409 if it has another by now")


class WorkerEndpoints:
    """Serves them. Owns nothing: a change is the worker's own, which tells all its gateways."""

    def __init__(self, cluster: Cluster, changes: WorkerChanges, dwell_s: float) -> None:
        """dwell_s: least time between two changes of one worker's role."""
        self._cluster = cluster
        self._changes = changes
        self._dwell_s = dwell_s

    async def drain(self, request: web.Request) -> web.Response:
        """POST /halfmoon/v1/workers/{name}/drain: no new work; what was accepted finishes, then the worker ends.

        Returns when the worker has begun to. Raises NotFound, InvalidRequest, ChangeRefused or DeadlineExceeded.
        """
        member = self._member(request)
        body = parse_body(DrainBody, await receive_body(request), _MAX_VALUES)
        if not body.force:
            check_without(member, self._cluster.membership.members())
        self._cluster.drain(member.worker_id, returns=body.returns)
        member = await self._until(member, lambda present: present.load.draining)
        self._record(request, member, member.role, "restarted" if body.returns else "drained", body)
        return web.json_response({"worker_id": member.worker_id, "draining": True, "returns": body.returns})

    async def role(self, request: web.Request) -> web.Response:
        """POST /halfmoon/v1/workers/{name}/role: the worker serves another role; what was accepted finishes.

        Returns when it does. Raises NotFound, InvalidRequest, ChangeRefused, DeadlineExceeded or Unavailable.
        """
        member = self._member(request)
        body = parse_body(RoleBody, await receive_body(request), _MAX_VALUES)
        check_epoch(member, body.epoch)
        before, epoch = member.role, member.role_epoch
        if before != body.role:
            members, now_s = self._cluster.membership.members(), self._cluster.clock()
            check_role_change(member, body.role, members, self._dwell_s, now_s, force=body.force)
            self._cluster.change_role(member.worker_id, body.role, epoch)
            member = await self._until(member, lambda present: present.role_epoch != epoch)
            if member.role_epoch == epoch:
                raise Unavailable(f"{member.worker_id} has left the cluster")
            if member.role != body.role:
                raise ChangeRefused(f"another change came first: {member.worker_id} serves {member.role} now")
            self._record(request, member, before, member.role, body)
        shown: dict[str, Any] = {"worker_id": member.worker_id, "before": before, "role": member.role}
        return web.json_response({**shown, "epoch": member.role_epoch})

    async def changes(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/worker_changes?limit=50: newest first. Raises InvalidRequest or Unavailable."""
        rows = await self._changes.newest(query_number(request, "limit", 50, _MAX_ROWS))
        return web.json_response([{**row._asdict(), "changed_at": row.changed_at.isoformat()} for row in rows])

    def _member(self, request: web.Request) -> Member:
        return named(request.match_info["name"], self._cluster.membership.members())

    async def _until(self, member: Member, holds: Callable[[Member], bool]) -> Member:
        """Returns the member when it holds, or the worker has left. Raises DeadlineExceeded.

        A worker that registers again meanwhile, as another member, may not have heard of the change.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                while not holds(member):
                    members = self._cluster.membership.members()
                    present = next((one for one in members if one.worker_id == member.worker_id), None)
                    if present is None:
                        break
                    member = present
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise DeadlineExceeded(f"{member.worker_id} has not answered within {_ANSWER_S:g} s") from None
        return member

    def _record(self, request: web.Request, member: Member, before: str, after: str, body: ChangeBody) -> None:
        """Logs the change and writes it to the ledger, which may be away."""
        by = body.by or request.remote or "unknown"
        change = WorkerChange(
            datetime.now(UTC), member.worker_id, before, after, member.role_epoch, by, body.force,
            self._cluster.gateway_id,
        )  # fmt: skip
        log.info("worker.changed", extra={"worker_id": member.worker_id, "before": before, "after": after, "by": by})
        self._cluster.spawn(self._changes.add(change))
