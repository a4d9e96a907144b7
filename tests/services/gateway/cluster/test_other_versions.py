"""Workers of an earlier and of a later release beside those of this one: protobuf fields that they lack or add."""

from __future__ import annotations

import asyncio
from pathlib import Path

from google.protobuf.message import Message

from halfmoon.pb.gateway_pb2 import WorkerIdentity, WorkerLoad, WorkerMessage
from tests.services.gateway.fakes import MODEL, Script, running_fleet

FIRST_FIELDS = (
    *("worker_id", "role", "address", "model", "model_fingerprint", "layout", "context_tokens", "total_blocks"),
    *("version", "device", "pid"),
)  # of the first release
LATER = bytes([0x82, 0x7D, 0x03, *b"new"])  # field 2000, a text


def with_later_field(message: Message) -> bytes:
    return message.SerializeToString() + LATER


async def test_workers_of_an_earlier_and_of_a_later_release_serve_together(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        old = await fleet.add("old", "prefill", Script("hello"), can_change_role=False)
        assert {field.name for field, _ in old.identity().ListFields()} <= set(FIRST_FIELDS)
        new = await fleet.add("new", "decode", Script("hello"), host="h", num_gateways=1, keep_answers_s=60.0)
        new.loads.put_nowait(WorkerMessage.FromString(LATER))  # a kind of message that is unknown here
        new.loads.put_nowait(WorkerLoad.FromString(with_later_field(WorkerLoad(sequence=3, free_blocks=40))))
        async with asyncio.timeout(60):
            while fleet.cluster.worker("new").member.load.sequence != 3:  # noqa: ASYNC110 (a report is no event)
                await asyncio.sleep(0)
        completion = await fleet.client.completions.create(model=MODEL, prompt="Once")
        assert completion.choices[0].text == "hello"
        assert len(old.calls.prefills) == 1
        assert fleet.placeable() == {"old", "new"}


def test_fields_of_a_later_release_are_passed_over() -> None:
    identity = WorkerIdentity.FromString(with_later_field(WorkerIdentity(worker_id="w", pid=7)))
    assert (identity.worker_id, identity.pid) == ("w", 7)
    assert WorkerMessage.FromString(LATER).WhichOneof("message") is None
