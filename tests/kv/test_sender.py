"""The sender's table: which answers it takes, and that both machines agree on whole transfers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.errors import DataLoss, HalfmoonError, Incompatible, InvalidRequest
from halfmoon.kv.frame import Frame, FrameKind, KVRange
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.negotiation import Acceptance, encode_accept, encode_open
from halfmoon.kv.receiver import Commit, TransferReceiver, Write
from halfmoon.kv.sender import TransferSending, credit_body

LAYOUT = KVLayout(4, 2, 2, "float16", 4)
WHOLE = KVRange(0, 4, 0, 2, 0, 4)
ID = b"transfer-id-0123"


class Ends:
    """Both machines, every frame handed over as soon as it is made."""

    def __init__(self) -> None:
        self.sending = TransferSending(LAYOUT, ID)
        self.receiver = TransferReceiver(LAYOUT)

    def send(self, frame: Frame) -> Frame:
        self.receiver.handle(frame)
        return frame

    def open(self) -> None:
        self.send(self.sending.open(WHOLE, encode_open((), b"")))
        assert self.sending.handle(self.receiver.accept(Acceptance("grpc"))) == []

    def layer(self, layer: int) -> Frame:
        part = KVRange(layer, layer + 1, 0, 2, 0, 4)
        return self.send(self.sending.data(part, bytes(part.num_bytes(LAYOUT))))

    def answer(self, kind: FrameKind, sequence: int, payload: bytes = b"") -> Frame:
        return Frame(kind, ID, LAYOUT.fingerprint(), sequence, payload=payload)


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_credits_may_come_in_any_order(sent: list[int], credited: list[int]) -> None:
    ends = Ends()
    ends.open()
    numbers = [ends.layer(layer).sequence for layer in sent]
    for index in credited[:2]:
        assert ends.sending.handle(ends.receiver.credit(numbers[index])) == [numbers[index]]
    ends.send(ends.sending.commit(b"act"))
    rest = [numbers[index] for index in credited[2:]]
    assert ends.sending.handle(ends.receiver.credit(*rest)) == rest
    assert ends.sending.handle(ends.receiver.done()) == []
    assert ends.sending.state == "done"


def test_done_needs_every_credit() -> None:
    ends = Ends()
    ends.open()
    for layer in range(4):
        ends.layer(layer)
    ends.send(ends.sending.commit(b""))
    with pytest.raises(Incompatible, match="without having taken 4 frames"):
        ends.sending.handle(ends.receiver.done())


@pytest.mark.parametrize(
    ("kind", "sequence", "payload", "error"),
    [
        (FrameKind.ACCEPT, 1, b"", Incompatible),
        (FrameKind.DONE, 1, b"", Incompatible),
        (FrameKind.DATA, 1, b"", Incompatible),
        (FrameKind.CREDIT, 1, b"", InvalidRequest),
        (FrameKind.CREDIT, 1, b"12345", InvalidRequest),
        (FrameKind.CREDIT, 1, credit_body([1, 1]), InvalidRequest),
        (FrameKind.CREDIT, 1, credit_body([9]), InvalidRequest),
        (FrameKind.CREDIT, 2, credit_body([1]), DataLoss),
    ],
)
def test_bad_answers(kind: FrameKind, sequence: int, payload: bytes, error: type[HalfmoonError]) -> None:
    ends = Ends()
    ends.open()
    ends.layer(0)
    with pytest.raises(error):
        ends.sending.handle(ends.answer(kind, sequence, payload))


def test_one_frame_is_credited_once() -> None:
    ends = Ends()
    ends.open()
    number = ends.layer(0).sequence
    ends.sending.handle(ends.receiver.credit(number))
    with pytest.raises(InvalidRequest, match="not under way"):
        ends.sending.handle(ends.receiver.credit(number))


@pytest.mark.parametrize("kind", FrameKind)
def test_nothing_is_heard_before_open_or_after_done(kind: FrameKind) -> None:
    ends = Ends()
    with pytest.raises(Incompatible):
        ends.sending.handle(ends.answer(kind, 0))
    ends.open()
    for layer in range(4):
        ends.sending.handle(ends.receiver.credit(ends.layer(layer).sequence))
    ends.send(ends.sending.commit(b""))
    ends.sending.handle(ends.receiver.done())
    with pytest.raises(Incompatible):
        ends.sending.handle(ends.answer(kind, 6))


def test_no_more_is_held_than_was_offered() -> None:
    ends = Ends()
    ends.send(ends.sending.open(WHOLE, encode_open((), b""), skips_held=True))
    with pytest.raises(Incompatible, match="holds 5 tokens, and at most 4"):
        ends.sending.handle(ends.answer(FrameKind.ACCEPT, 0, encode_accept(Acceptance("grpc", held_tokens=5))))


def test_nothing_is_held_by_the_receiver_of_a_sender_that_sends_everything() -> None:
    ends = Ends()
    ends.send(ends.sending.open(WHOLE, encode_open((), b"")))
    with pytest.raises(Incompatible, match="holds 1 tokens, and at most 0"):
        ends.sending.handle(ends.answer(FrameKind.ACCEPT, 0, encode_accept(Acceptance("grpc", held_tokens=1))))


_KINDS = st.sampled_from(["data", "data", "data", "renew", "credit", "commit", "lose", "repeat", "swap"])


@settings(max_examples=400)
@given(st.integers(0, WHOLE.num_tokens), st.lists(st.tuples(_KINDS, st.integers(0, 99)), max_size=40))
def test_whatever_happens_on_the_way_nothing_wrong_is_committed(held: int, steps: list[tuple[str, int]]) -> None:
    """Frames are sent in any order, lost, repeated or exchanged; the receiver's memory is right when it commits.

    It holds the first tokens and never writes them, since others read them.
    """
    sending, receiver = TransferSending(LAYOUT, ID), TransferReceiver(LAYOUT)
    receiver.handle(sending.open(WHOLE, encode_open((), b""), skips_held=True))
    sending.handle(receiver.accept(Acceptance("grpc", held_tokens=held)))
    due = [(layer, head, token) for layer in range(4) for head in range(2) for token in range(held, 4)]
    memory = {(layer, head, token): _value(layer, head, token) for layer, head, token in _CELLS if token < held}
    on_the_way: list[Frame] = []
    uncredited: list[int] = []
    committed = False

    def arrive(frame: Frame) -> None:
        nonlocal committed
        match receiver.handle(frame):
            case Write(part, payload):
                cell = part.layer_start, part.head_start, part.token_start
                assert cell[2] >= held
                memory[cell] = bytes(payload)
                uncredited.append(frame.sequence)
            case Commit():
                committed = True

    try:
        for kind, number in [*steps, ("commit", 0)]:
            match kind:
                case "data" if due and sending.state == "opened":
                    layer, head, token = due.pop(number % len(due))
                    part = KVRange(layer, layer + 1, head, head + 1, token, 1)
                    on_the_way.append(sending.data(part, _value(layer, head, token)))
                case "renew" if sending.state == "opened":
                    on_the_way.append(sending.renew())
                case "credit" if uncredited:
                    sending.handle(receiver.credit(uncredited.pop(number % len(uncredited))))
                case "commit" if sending.state == "opened" and (not due or number % 7 == 0):
                    on_the_way.append(sending.commit(b""))
                case "lose" if on_the_way:
                    on_the_way.pop(number % len(on_the_way))
                case "repeat" if on_the_way:
                    on_the_way.append(on_the_way[number % len(on_the_way)])
                case "swap" if len(on_the_way) > 1:
                    at = number % (len(on_the_way) - 1)
                    on_the_way[at : at + 2] = reversed(on_the_way[at : at + 2])
            while on_the_way and number % 3:
                arrive(on_the_way.pop(0))
        while on_the_way:
            arrive(on_the_way.pop(0))
    except HalfmoonError:
        pass
    if committed:
        assert memory == {cell: _value(*cell) for cell in _CELLS}


_CELLS = [(layer, head, token) for layer in range(4) for head in range(2) for token in range(4)]


def _value(layer: int, head: int, token: int) -> bytes:
    """K and V of one cell, unlike those of any other."""
    return bytes([layer, head, token, 0]) * 2


def test_an_answer_to_another_transfer_is_refused() -> None:
    ends = Ends()
    ends.send(ends.sending.open(WHOLE, encode_open((), b"")))
    with pytest.raises(InvalidRequest, match="another transfer"):
        ends.sending.handle(replace(ends.receiver.accept(Acceptance("grpc")), transfer_id=b"x" * 16))
