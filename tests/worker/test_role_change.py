"""A worker whose role is changed while it works: what it has begun finishes, and it serves the new role at once."""

from __future__ import annotations

import asyncio

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.errors import StalePlacement
from halfmoon.pb import prefill_pb2
from halfmoon.pb.gateway_pb2 import RoleChange
from halfmoon.pb.types_pb2 import DECODE, PREFILL, Role
from tests.worker.conftest import RunningWorker
from tests.worker.test_aborts import Gate, stop_before
from tests.worker.test_handover import Start, generation, listening, prefilled, reference, tokens_of

PROMPT = [(7 * i + 3) % 125 + 3 for i in range(60)]
OTHER = [(5 * i + 4) % 125 + 3 for i in range(50)]


def change(worker: RunningWorker, role: Role.ValueType) -> None:
    assert worker.state.role.change(RoleChange(role=role, epoch=worker.state.role.epoch), 0.0)


def handed_to(decode: RunningWorker, made: object, epoch: int = 0, decode_epoch: int = 0) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        generation=made,  # type: ignore[arg-type]
        decode_address=decode.peer.address,
        role_epoch=epoch,
        decode_role_epoch=decode_epoch,
    )


async def test_a_decode_worker_prefills_while_its_answers_finish(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, changed, decode = [await start_worker(role) for role in ("prefill", "decode", "decode")]
    async with listening(changed) as old_steps, listening(decode) as steps:
        first, _ = await prefilled(prefill, handed_to(changed, generation(tiny, PROMPT, 100, "old")))
        change(changed, PREFILL)
        fresh = handed_to(decode, generation(tiny, OTHER, 12, "new"), epoch=1)
        second, _ = await prefilled(changed, fresh)
        new = [second.first_token.token.token_id, *await tokens_of(steps, "new")]
        old = [first.first_token.token.token_id, *await tokens_of(old_steps, "old")]
        with pytest.raises(StalePlacement):
            await prefilled(prefill, handed_to(changed, generation(tiny, PROMPT, 12, "late")))
    assert old == reference(tiny, PROMPT, 100)
    assert new == reference(tiny, OTHER, 12)


@pytest.mark.parametrize("method", ["reserve", "start"])
async def test_a_hand_over_to_it_finishes(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    prefill, changed = await start_worker("prefill"), await start_worker("decode")
    gate = Gate()
    stop_before(changed, method, gate, monkeypatch)
    async with listening(changed) as steps:
        call = asyncio.create_task(prefilled(prefill, handed_to(changed, generation(tiny, PROMPT, 12))))
        await gate.reached.wait()
        change(changed, PREFILL)
        gate.open.set()
        first, _ = await call
        tokens = [first.first_token.token.token_id, *await tokens_of(steps)]
    assert tokens == reference(tiny, PROMPT, 12)


async def test_a_prefill_worker_decodes_and_prefills_again(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, changed = await start_worker("prefill"), await start_worker("prefill")
    async with listening(changed) as steps:
        change(changed, DECODE)
        first, _ = await prefilled(prefill, handed_to(changed, generation(tiny, PROMPT, 12), decode_epoch=1))
        assert [first.first_token.token.token_id, *await tokens_of(steps)] == reference(tiny, PROMPT, 12)
        with pytest.raises(StalePlacement, match="decode"):
            await prefilled(changed, handed_to(prefill, generation(tiny, OTHER, 12, "x")))
    change(changed, PREFILL)
    change(prefill, DECODE)
    async with listening(prefill) as steps:
        first, _ = await prefilled(changed, handed_to(prefill, generation(tiny, OTHER, 12, "y"), 2, 1))
        assert [first.first_token.token.token_id, *await tokens_of(steps, "y")] == reference(tiny, OTHER, 12)
