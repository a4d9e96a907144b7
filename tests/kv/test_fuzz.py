"""Whatever bytes come, both machines raise an error of our tree or go on, and allocate no more than came."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.errors import HalfmoonError
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame import Elsewhere, Frame, FrameKind, KVRange, decode_message, encode_frame
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.negotiation import Acceptance, decode_accept, encode_open
from halfmoon.kv.receiver import TransferReceiver
from halfmoon.kv.sender import TransferSending

LAYOUT = KVLayout(2, 2, 2, "float16", 4)
ID = b"transfer-id-0123"

u16, u32 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
small = st.integers(0, 4)
ranges = st.builds(KVRange, small, small, small, small, small, small) | st.builds(KVRange, u16, u16, u16, u16, u32, u32)
frames = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    transfer_id=st.just(ID) | st.binary(min_size=16, max_size=16),
    layout_fingerprint=st.just(LAYOUT.fingerprint()) | u32,
    sequence=small | u32,
    range=ranges,
    codec=st.sampled_from(Codec),
    payload=st.binary(max_size=100) | small.map(bytes) | st.integers(0, 20).map(lambda n: bytes(16 * n)),
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A frame, a frame with bytes changed, cut or added, or anything."""
    if draw(st.booleans()):
        return encode_frame(draw(frames), draw(st.just(b"") | st.binary(max_size=20)))
    message = bytearray(encode_frame(draw(frames)) if draw(st.booleans()) else draw(st.binary(max_size=200)))
    for position, value in draw(st.lists(st.tuples(small | st.integers(0, 160), st.integers(0, 255)), max_size=4)):
        if position < len(message):
            message[position] = value
    return bytes(message[: draw(st.integers(0, len(message)))] if draw(st.booleans()) else message)


def feed(message: bytes, handle: Callable[[Frame], object], elsewhere: bytes) -> bool:
    """Whether the machine goes on."""
    try:
        frame = decode_message(message)
        handle(frame.with_payload(elsewhere[: frame.payload_bytes]) if isinstance(frame, Elsewhere) else frame)
    except HalfmoonError:
        return False
    return True


def opened_receiver() -> TransferReceiver:
    receiver = TransferReceiver(LAYOUT)
    whole = KVRange(0, 2, 0, 2, 0, 4)
    receiver.handle(Frame(FrameKind.OPEN, ID, LAYOUT.fingerprint(), 0, whole, payload=encode_open((), b"")))
    receiver.accept(Acceptance("grpc"))
    return receiver


@given(st.lists(messages(), max_size=5), st.booleans(), st.binary(max_size=100))
def test_the_receiver_never_fails_in_another_way(stream: list[bytes], is_open: bool, elsewhere: bytes) -> None:
    receiver = opened_receiver() if is_open else TransferReceiver(LAYOUT)
    for message in stream:
        if not feed(message, receiver.handle, elsewhere):
            return


@given(st.lists(messages(), max_size=5), st.sampled_from(["fresh", "opening", "opened"]))
def test_the_sender_never_fails_in_another_way(answers: list[bytes], state: str) -> None:
    sending = TransferSending(LAYOUT, ID)
    if state != "fresh":
        sending.open(KVRange(0, 2, 0, 2, 0, 4), b"")

    def handle(frame: Frame) -> None:
        sending.handle(frame)
        if frame.kind is FrameKind.ACCEPT:
            decode_accept(frame.payload)

    for message in answers:
        if not feed(message, handle, b""):
            return


@settings(max_examples=50)
@given(st.lists(messages(), max_size=5))
def test_nothing_is_allocated_for_what_only_a_header_claims(stream: list[bytes]) -> None:
    receiver = opened_receiver()
    tracemalloc.start()
    try:
        for message in stream:
            if not feed(message, receiver.handle, b""):
                break
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 256 << 10  # of objects and error texts: the headers claim up to gigabytes
