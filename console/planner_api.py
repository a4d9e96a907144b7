"""The planner service as the console uses it. Every call has a time limit; an abandoned search ends."""

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
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.credentials.operator_token import AUTHORIZATION_KEY
from halfmoon.rpc.status import is_from_service
from halfmoon.rpc.tls.channel import client_credentials, server_option

_LOOK_S = 5.0
_SEARCH_S = 900.0
_PREVIEW_S = 30.0
_APPLY_S = 3600.0  # loads weights and waits for running requests

Plan = dict[str, Any]


class PlannerError(GatewayError):
    """The planner, not the gateway, failed to answer; the text is for the user."""


class PlannerLost(PlannerError):
    """The planner did not say how the call ended: what it was asked to do may go on."""


class SearchCancelled(PlannerLost):
    """The search was cancelled by the user."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Names that a search may use."""

    gpus: tuple[str, ...]
    models: tuple[str, ...]
    workloads: tuple[str, ...]
    can_apply: bool  # whether plans can be applied to the workers running here


class PlannerApi:
    """Owns a connection to the planner. Methods raise PlannerError.

    Calls carry the operator token and the credential of an operator, as far as there are any.
    """

    def __init__(self, address: str, operator_token: str | None = None, credential: Credential | None = None) -> None:
        self.address = address
        self._tls = None if credential is None else credential.tls
        self._stub = planner_pb2_grpc.PlannerStub(self._channel())
        token = ((AUTHORIZATION_KEY, f"Bearer {operator_token}"),) if operator_token else ()
        self._metadata = (*token, *(credential.metadata("planner") if credential else ()))

    def _channel(self) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(self.address)
        return grpc.secure_channel(self.address, client_credentials(self._tls.current), (server_option("planner"),))

    def catalogue(self) -> Catalogue:
        """GPUs, models and workloads that the planner knows."""
        with _readable_errors(self.address):
            message = self._stub.Catalogue(planner_pb2.CatalogueRequest(), timeout=_LOOK_S, metadata=self._metadata)
        return Catalogue(tuple(message.gpus), tuple(message.models), tuple(message.workloads), message.can_apply)

    def plans(self) -> list[Plan]:
        """Stored plans, newest first."""
        with _readable_errors(self.address):
            request = planner_pb2.ListPlansRequest(limit=50)
            listed = self._stub.ListPlans(request, timeout=_LOOK_S, metadata=self._metadata)
        return [plan_of(plan) for plan in listed.plans]

    def search(self, fields: Mapping[str, Any], files: Mapping[str, bytes], *, is_map: bool = False) -> Search:
        """Starts a search for a plan, or for a map over targets; its state reports errors later.

        `fields` are those of PlanRequest.
        """
        sent = [planner_pb2.File(name=name, content=content) for name, content in files.items()]
        request = planner_pb2.PlanRequest(**fields, files=sent, with_curves=not is_map, is_map=is_map)
        channel = self._channel()
        call = planner_pb2_grpc.PlannerStub(channel).Plan(request, timeout=_SEARCH_S, metadata=self._metadata)
        return Search(self.address, channel, call)

    def preview_apply(self, plan_id: int) -> planner_pb2.WorkerChange:
        """Asks how the workers would change."""
        with _readable_errors(self.address):
            request = planner_pb2.ApplyRequest(plan_id=plan_id)
            change: planner_pb2.WorkerChange = self._stub.PreviewApply(
                request, timeout=_PREVIEW_S, metadata=self._metadata
            )
        return change

    def apply(self, plan_id: int, stop_first: bool) -> Iterator[planner_pb2.ApplyUpdate]:
        """Changes the workers; yields updates."""
        with _readable_errors(self.address):
            request = planner_pb2.ApplyRequest(plan_id=plan_id, stop_first=stop_first)
            yield from self._stub.Apply(request, timeout=_APPLY_S, metadata=self._metadata)


@dataclass(frozen=True, slots=True)
class TargetMap:
    """Over which targets separate prefill and decode workers pay, with its chart as Vega-Lite."""

    summary: dict[str, Any]
    chart: dict[str, Any]


@dataclass(slots=True)
class SearchState:
    """State of a search. Written by its thread alone; each assignment is complete."""

    num_ahead: int = 0
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)  # (done, total) by stage
    plan: Plan | None = None
    target_map: TargetMap | None = None
    problem: str | None = None
    was_cancelled: bool = False
    is_over: bool = False


class Search:
    """Owns a call to the planner. The planner's search ends when this is cancelled or no longer referenced."""

    def __init__(self, address: str, channel: grpc.Channel, call: Any) -> None:
        self.state = SearchState()
        self._begun_s = time.monotonic()
        # The thread holds only the call and the state, so this object is freed with its browser session.
        threading.Thread(target=_follow, args=(address, channel, call, self.state), daemon=True).start()
        self._end = weakref.finalize(self, call.cancel)

    @property
    def age_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begun_s

    def cancel(self) -> None:
        """Ends the search soon."""
        self._end()


def plan_of(message: planner_pb2.StoredPlan) -> Plan:
    """Converts a stored plan to plain values."""
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
        with _readable_errors(address):
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
        progress = update.progress
        state.progress = {**state.progress, progress.what: (progress.done, progress.total)}
    elif kind == "plan":
        state.plan = plan_of(update.plan)
    elif kind == "map":
        state.target_map = TargetMap(json.loads(update.map.summary_json), json.loads(update.map.chart_json))


@contextmanager
def _readable_errors(address: str) -> Iterator[None]:
    """Converts gRPC errors to PlannerError with a readable text."""
    try:
        yield
    except grpc.RpcError as error:
        known = PlannerError if is_from_service(error) else PlannerLost
        kind = SearchCancelled if error.code() is grpc.StatusCode.CANCELLED else known
        raise kind(_message_of(address, error)) from error


def _message_of(address: str, error: Any) -> str:
    code, details = error.code(), error.details()
    if is_from_service(error):
        return str(details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the planner at {address} did not answer in time: {details}"
    return f"no planner at {address}: {details}"
