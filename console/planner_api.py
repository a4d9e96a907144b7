"""The planner service as the console uses it. Every call has a time limit; a search that nobody looks at ends."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from console.gateway_api import GatewayError
from halfmoon.pb import planner_pb2, planner_pb2_grpc
from halfmoon.rpc.operator_token import AUTHORIZATION_KEY
from halfmoon.rpc.status import is_told

_LOOK_S = 5.0
_SEARCH_S = 900.0
_PREVIEW_S = 30.0
_APPLY_S = 3600.0  # loading weights, and requests that end

Plan = dict[str, Any]


class PlannerError(GatewayError):
    """The planner, and not the gateway, did not give what was asked for; the text is for the user."""


class SearchCancelled(PlannerError):
    """It ended because somebody wanted it to."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What a search may name."""

    gpus: tuple[str, ...]
    models: tuple[str, ...]
    workloads: tuple[str, ...]
    can_apply: bool  # a plan, to the workers that run here


class PlannerApi:
    """Owns a connection to the planner, with the operator token where there is one. Methods raise PlannerError."""

    def __init__(self, address: str, operator_token: str | None = None) -> None:
        self.address = address
        self._stub = planner_pb2_grpc.PlannerStub(grpc.insecure_channel(address))
        self._metadata = ((AUTHORIZATION_KEY, f"Bearer {operator_token}"),) if operator_token else ()

    def catalogue(self) -> Catalogue:
        """GPUs, models, workloads."""
        with _told(self.address):
            found = self._stub.Catalogue(planner_pb2.CatalogueRequest(), timeout=_LOOK_S, metadata=self._metadata)
        return Catalogue(tuple(found.gpus), tuple(found.models), tuple(found.workloads), found.can_apply)

    def plans(self, limit: int = 50) -> list[Plan]:
        """Of before, newest first."""
        with _told(self.address):
            request = planner_pb2.ListPlansRequest(limit=limit)
            found = self._stub.ListPlans(request, timeout=_LOOK_S, metadata=self._metadata)
        return [plan_of(one) for one in found.plans]

    def search(self, asked: Mapping[str, Any], files: Mapping[str, bytes]) -> Search:
        """Begins one; what is wrong with it is in the search's state later. `asked` are fields of PlanRequest."""
        sent = [planner_pb2.File(name=name, content=content) for name, content in files.items()]
        request = planner_pb2.PlanRequest(**asked, files=sent, with_curves=True)
        channel = grpc.insecure_channel(self.address)
        call = planner_pb2_grpc.PlannerStub(channel).Plan(request, timeout=_SEARCH_S, metadata=self._metadata)
        return Search(self.address, channel, call)

    def preview_apply(self, plan_id: int) -> planner_pb2.WorkerChange:
        """How the workers would change."""
        with _told(self.address):
            request = planner_pb2.ApplyRequest(plan_id=plan_id)
            found: planner_pb2.WorkerChange = self._stub.PreviewApply(
                request, timeout=_PREVIEW_S, metadata=self._metadata
            )
        return found

    def apply(self, plan_id: int, stop_first: bool) -> Iterator[planner_pb2.ApplyUpdate]:
        """Changes them; what is said meanwhile."""
        with _told(self.address):
            request = planner_pb2.ApplyRequest(plan_id=plan_id, stop_first=stop_first)
            yield from self._stub.Apply(request, timeout=_APPLY_S, metadata=self._metadata)


@dataclass(slots=True)
class SearchState:
    """Where a search is. Written by its thread alone; each assignment is whole."""

    num_ahead: int = 0
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)  # done, of how many, by what
    plan: Plan | None = None
    problem: str | None = None
    was_cancelled: bool = False
    is_over: bool = False


class Search:
    """Owns a call to the planner. When it is cancelled, or nobody holds it any more, the planner's search ends."""

    def __init__(self, address: str, channel: grpc.Channel, call: Any) -> None:
        self.state = SearchState()
        self._begun_s = time.monotonic()
        # The thread knows the call and the state only: this object goes with its browser's session.
        threading.Thread(target=_follow, args=(address, channel, call, self.state), daemon=True).start()
        self._end = weakref.finalize(self, call.cancel)

    @property
    def age_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self._begun_s

    def cancel(self) -> None:
        """It ends, soon."""
        self._end()


def plan_of(message: planner_pb2.StoredPlan) -> Plan:
    """Its parts as plain values."""
    return {
        "id": message.id,
        "created_at": message.created_at,
        "model": message.model,
        "request": json.loads(message.request_json),
        "summary": json.loads(message.summary_json),
        "plan_yaml": message.plan_yaml,
    }


def _follow(address: str, channel: grpc.Channel, call: Iterable[Any], state: SearchState) -> None:
    try:
        with _told(address):
            for update in call:
                _note(update, state)
    except SearchCancelled:
        state.was_cancelled = True
    except PlannerError as error:
        state.problem = str(error)
    finally:
        state.is_over = True
        channel.close()


def _note(update: planner_pb2.PlanUpdate, state: SearchState) -> None:
    kind = update.WhichOneof("update")
    if kind == "waiting":
        state.num_ahead = update.waiting.ahead
    elif kind == "progress":
        state.num_ahead = 0
        one = update.progress
        state.progress = {**state.progress, one.what: (one.done, one.total)}
    elif kind == "plan":
        state.plan = plan_of(update.plan)


@contextmanager
def _told(address: str) -> Iterator[None]:
    """What gRPC raises, in words."""
    try:
        yield
    except grpc.RpcError as error:
        kind = SearchCancelled if error.code() is grpc.StatusCode.CANCELLED else PlannerError
        raise kind(_message_of(address, error)) from error


def _message_of(address: str, error: Any) -> str:
    code, details = error.code(), error.details()
    if is_told(error):
        return str(details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the planner at {address} did not answer in time: {details}"
    return f"no planner at {address}: {details}"
