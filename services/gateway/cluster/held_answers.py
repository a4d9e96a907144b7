"""Finds the answers that workers hold for a repeated request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

from halfmoon.errors import HalfmoonError
from halfmoon.pb.decode_pb2 import FindRequest, FindResponse
from halfmoon.pb.types_pb2 import Repeatable
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.seen_ids import SeenIds
from services.gateway.cluster.worker import Worker

log = logging.getLogger(__name__)

_ASK_S = 2.0
_FIRST_LOOK_S = 0.1  # for an id that may be a proxy's, and that was not seen here before
_NEW_S = 10.0  # a gateway that is older knows its workers


class HeldAnswer(NamedTuple):
    """One output that a worker holds."""

    worker_id: str
    request_id: str  # on that worker
    repeatable: Repeatable
    num_tokens: int
    is_settled: bool  # it is in the ledger


class HeldAnswers:
    """Asks the workers, unless only this gateway can have begun the answer and it knows that it has not."""

    def __init__(self, cluster: Cluster, join_wait_s: float, longest_s: float, seen: SeenIds | None = None) -> None:
        """A gateway that has just started first waits until none has joined for `join_wait_s`.

        `longest_s`: how long a request may take.
        """
        self._cluster = cluster
        self._join_wait_s = join_wait_s
        self._longest_s = longest_s
        self._seen = seen or SeenIds(cluster.started_s)

    async def find(self, key: bytes, *, is_meant: bool) -> list[HeldAnswer]:
        """What the members hold under `key`. Those that do not answer in time count as holding nothing.

        `is_meant`: the client asks for repeats; else the id may be that which a proxy gives to each request. Raises
        GatewayStopping.
        """
        was_seen = self._seen.note(key, self._cluster.clock())
        if not was_seen and self._would_know():
            return []
        await self._until_joined()
        most_s = _ASK_S if was_seen or is_meant else _FIRST_LOOK_S
        answers = await asyncio.gather(*(self._ask(worker, key, most_s) for worker in self._cluster.workers()))
        return [answer for of_worker in answers for answer in of_worker]

    def _would_know(self) -> bool:
        """Whether this is the only gateway, and has been since before anything that is kept was begun."""
        members = self._cluster.membership.members()
        if not members or any(max(one.identity.num_gateways, one.load.num_gateways) != 1 for one in members):
            return False
        keep_s = max(member.identity.keep_answers_s for member in members)
        return self._seen.has_all_since(self._cluster.clock() - max(self._longest_s, keep_s) - keep_s)

    async def _ask(self, worker: Worker, key: bytes, most_s: float) -> list[HeldAnswer]:
        settling = self._cluster.ends.settling  # before the worker is asked: it may learn of them meanwhile
        try:
            response: FindResponse = await worker.peer.call(worker.decode.Find, FindRequest(key=key), deadline_s=most_s)
        except HalfmoonError as error:
            fields = {"worker_id": worker.member.worker_id, "reason": error.message}
            log.warning("find.failed", extra=fields)
            return []
        worker_id = worker.member.worker_id
        return [
            HeldAnswer(
                worker_id,
                held.request_id,
                held.repeatable,
                held.num_tokens,
                held.is_settled or held.request_id in settling,
            )
            for held in response.answers
        ]

    async def _until_joined(self) -> None:
        cluster = self._cluster
        while True:
            now_s = cluster.clock()
            left_s = cluster.started_s + _NEW_S - now_s
            if left_s <= 0 or not self._join_wait_s:
                return
            members = cluster.membership.members()
            if members and all(member.listening or member.role == "prefill" for member in members):
                left_s = min(left_s, cluster.changed_s + self._join_wait_s - now_s)
                if left_s <= 0:
                    return
            await cluster.router.pause(left_s, until=cluster.until_changed())


def newest(answers: Iterable[HeldAnswer]) -> dict[int, HeldAnswer]:
    """By output, the answer of the latest attempt; among equals the longest."""
    found: dict[int, HeldAnswer] = {}
    for answer in answers:
        index = answer.repeatable.index
        if index not in found or _age(answer) > _age(found[index]):
            found[index] = answer
    return found


def _age(answer: HeldAnswer) -> tuple[int, int]:
    return (answer.repeatable.attempt, answer.num_tokens)
