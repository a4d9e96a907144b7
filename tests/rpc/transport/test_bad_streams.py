"""What is wrong on the stream ends the call with one clear error, and nothing stays reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest

from halfmoon.errors import Cancelled, DataLoss, HalfmoonError, Incompatible, InvalidRequest
from halfmoon.kv.frame import Frame, FrameKind, KVRange, encode_frame
from halfmoon.kv.negotiation import encode_open
from halfmoon.rpc.status import error_from
from halfmoon.rpc.transfer import transfer_to
from halfmoon.rpc.transport.sending import PUSH_METHOD
from halfmoon.rpc.transport.slots import Reference
from tests.rpc.transport.conftest import LAYERS, LAYOUT, WHOLE, Ends, ends, kv_of, raising, until

ID = b"transfer-id-0123"
OPEN = Frame(FrameKind.OPEN, ID, LAYOUT.fingerprint(), 0, WHOLE, payload=encode_open((), b"raw"))
DATA = Frame(FrameKind.DATA, ID, LAYOUT.fingerprint(), 1, LAYERS[0], payload=kv_of(1)[0].tobytes())
OTHER_VERSION = bytes([*b"HMKV", 1]) + encode_frame(OPEN)[5:]
TORN = bytearray(encode_frame(DATA))
TORN[1000] ^= 1


async def exchange(it: Ends, messages: Sequence[bytes]) -> None:
    """Sends the messages and reads until the receiver ends the call. Raises what it ends with."""
    call = it.link.peer.raw_stream(PUSH_METHOD, deadline_s=20)
    try:
        for message in messages:
            await call.write(message)
        while await call.read() is not grpc.aio.EOF:
            pass
        code = await call.code()
        raise error_from(
            grpc.aio.AioRpcError(
                code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
        )
    except grpc.aio.AioRpcError as failure:
        raise error_from(failure) from failure
    finally:
        call.cancel()


@pytest.mark.parametrize(
    ("messages", "error", "match"),
    [
        ([b"hello"], Incompatible, "not a Halfmoon KV frame"),
        ([OTHER_VERSION], Incompatible, "version 1, expected 4"),
        ([encode_frame(replace(OPEN, layout_fingerprint=1))], Incompatible, "layouts differ"),
        ([encode_frame(OPEN)[:-3]], DataLoss, "payload bytes arrived"),
        ([encode_frame(OPEN)[:40]], Incompatible, "shorter than its header"),
        ([encode_frame(OPEN), encode_frame(DATA)[:-3]], DataLoss, "payload bytes arrived"),
        ([encode_frame(OPEN), bytes(TORN)], DataLoss, "digest"),
        ([encode_frame(OPEN), encode_frame(replace(DATA, sequence=2))], DataLoss, "was due"),
        ([encode_frame(OPEN), encode_frame(replace(DATA, transfer_id=b"x" * 16))], InvalidRequest, "another transfer"),
        ([encode_frame(OPEN), encode_frame(DATA, b"elsewhere")], Incompatible, "not agreed"),
        ([encode_frame(DATA)], InvalidRequest, "cannot come while the transfer is fresh"),
        ([encode_frame(OPEN), encode_frame(replace(OPEN, sequence=1))], InvalidRequest, "OPEN frame cannot come"),
        ([encode_frame(OPEN), encode_frame(Frame(FrameKind.ABORT, ID, LAYOUT.fingerprint(), 1))], Cancelled, "gave"),
    ],
)
async def test_bad_messages(messages: list[bytes], error: type[HalfmoonError], match: str) -> None:
    async with ends() as it:
        with raising(error, match):
            await exchange(it, messages)
        await until(lambda: not it.sink.running)
        assert [type(found) for found in it.sink.errors] == [error]


async def test_a_transfer_that_is_on_its_way_already_is_refused() -> None:
    async with ends() as it, transfer_to(it.link, LAYOUT, deadline_s=20) as transfer:
        await transfer.open(WHOLE, b"first")
        twin = replace(OPEN, transfer_id=transfer.transfer_id)
        with raising(InvalidRequest, "already on its way"):
            await exchange(it, [encode_frame(twin)])
        assert it.sink.running == {b"first"}
        for layer, part in enumerate(LAYERS):
            await transfer.data(part, kv_of(1)[layer].tobytes())
        await transfer.commit(b"")


@pytest.mark.parametrize(
    "reference",
    [
        b"short",
        bytes(8),  # that of version 2
        Reference(1 << 40).encoded(),
        Reference(2**64 - 1).encoded(),
        Reference(0, 1 << 40).encoded(),
        Reference(0, 2**64 - 1).encoded(),
    ],
)
async def test_references_outside_the_shared_memory(reference: bytes) -> None:
    async with ends() as it:
        part = KVRange(0, 1, 0, 2, 0, 64)
        opened = replace(OPEN, payload=encode_open(await it.link.offers(), b"raw"))
        data = Frame(FrameKind.DATA, ID, LAYOUT.fingerprint(), 1, part, payload=bytes(part.num_bytes(LAYOUT)))
        with raising(InvalidRequest, "shared memory"):
            await exchange(it, [encode_frame(opened), encode_frame(data, reference)])
        await until(lambda: not it.sink.running)
