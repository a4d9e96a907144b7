"""The receiver's table: what commits, and what each kind of bad frame raises."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import Cancelled, DataLoss, HalfmoonError, Incompatible, InvalidRequest
from halfmoon.kv.codec import LOSSLESS, Codec, encoded_bytes
from halfmoon.kv.frame import Frame, FrameKind, KVRange, plan_frames
from halfmoon.kv.kv_layout import KVDtype, KVLayout
from halfmoon.kv.negotiation import Acceptance, Offer, decode_accept, encode_open
from halfmoon.kv.receiver import Commit, Coverage, Effect, Reserve, TransferReceiver, Write

LAYOUT = KVLayout(3, 2, 2, "float16", 4)
WHOLE = KVRange(0, 3, 0, 2, 4, 10)
ID = b"transfer-id-0123"


class Sender:
    """Numbers frames as a sender would and feeds them to a receiver."""

    def __init__(self, layout: KVLayout = LAYOUT) -> None:
        self.receiver = TransferReceiver(layout)
        self.sequence = 0

    def send(self, kind: FrameKind, part: KVRange | None = None, **fields: object) -> Effect | None:
        part = part or KVRange()
        payload = bytes(part.num_bytes(LAYOUT)) if kind is FrameKind.DATA else b""
        frame: dict[str, object] = {
            "kind": kind,
            "transfer_id": ID,
            "layout_fingerprint": LAYOUT.fingerprint(),
            "sequence": self.sequence,
            "range": part,
            "payload": payload,
            **fields,
        }
        self.sequence += 1
        return self.receiver.handle(Frame(**frame))  # type: ignore[arg-type]


def opening(whole: KVRange = WHOLE, **fields: object) -> Sender:
    sender = Sender()
    body = encode_open([Offer("shm", b"where")], b"why")
    reserve = Reserve(whole, b"why", (Offer("shm", b"where"),))
    assert sender.send(FrameKind.OPEN, whole, payload=body, **fields) == reserve
    return sender


def opened(whole: KVRange = WHOLE, held_tokens: int = 0, **fields: object) -> Sender:
    sender = opening(whole, **fields)
    sender.receiver.accept(Acceptance("grpc", held_tokens=held_tokens))
    return sender


def plan(limit: int, held_tokens: int = 0) -> list[KVRange]:
    start, num_tokens = WHOLE.token_start + held_tokens, WHOLE.num_tokens - held_tokens
    return list(plan_frames(LAYOUT, LAYOUT.whole(), start, num_tokens, limit))


@st.composite
def shuffled_plans(draw: st.DrawFn, held_tokens: int = 0) -> list[KVRange]:
    return draw(st.permutations(plan(draw(st.integers(LAYOUT.token_layer_bytes, 2000)), held_tokens)))


@given(st.integers(0, WHOLE.num_tokens), st.data())
def test_any_order_of_the_planned_frames_commits(held_tokens: int, data: st.DataObject) -> None:
    sender = opened(held_tokens=held_tokens)
    for part in data.draw(shuffled_plans(held_tokens)):
        if data.draw(st.booleans()):
            assert sender.send(FrameKind.RENEW) is None
        assert sender.send(FrameKind.DATA, part) == Write(part, bytes(part.num_bytes(LAYOUT)), Codec.RAW, "float16")
    assert sender.send(FrameKind.COMMIT, payload=b"act") == Commit(b"act")
    assert sender.receiver.state == "committed"


@given(st.integers(0, WHOLE.num_tokens - 1), st.data())
def test_a_missing_part_never_commits(held_tokens: int, data: st.DataObject) -> None:
    sender = opened(held_tokens=held_tokens)
    for part in data.draw(shuffled_plans(held_tokens))[1:]:
        sender.send(FrameKind.DATA, part)
    with pytest.raises(DataLoss, match="never arrived"):
        sender.send(FrameKind.COMMIT)
    assert sender.receiver.state == "opened"


@given(shuffled_plans(), st.data())
def test_a_part_sent_twice_is_refused(parts: list[KVRange], data: st.DataObject) -> None:
    sender = opened()
    sent = parts[: data.draw(st.integers(1, len(parts)))]
    for part in sent:
        sender.send(FrameKind.DATA, part)
    with pytest.raises(InvalidRequest, match="sent twice"):
        sender.send(FrameKind.DATA, data.draw(st.sampled_from(sent)))


@given(st.integers(1, WHOLE.num_tokens), shuffled_plans())
def test_what_the_receiver_holds_is_refused(held_tokens: int, parts: list[KVRange]) -> None:
    """Others share the blocks in which these tokens lie."""
    sender = opened(held_tokens=held_tokens)
    first = next(part for part in parts if part.token_start < WHOLE.token_start + held_tokens)
    with pytest.raises(InvalidRequest, match="outside"):
        sender.send(FrameKind.DATA, first)


def test_nothing_is_taken_before_it_is_known_what_is_held() -> None:
    sender = opening()
    assert sender.send(FrameKind.RENEW) is None
    with pytest.raises(InvalidRequest, match="DATA frame cannot come while the transfer is opening"):
        sender.send(FrameKind.DATA, WHOLE)


@given(
    st.lists(
        st.builds(
            KVRange, *(st.integers(0, 3) for _ in range(4)), token_start=st.integers(3, 9), num_tokens=st.integers(0, 6)
        ),
        max_size=8,
    )
)
def test_coverage_agrees_with_a_set_of_cells(parts: list[KVRange]) -> None:
    whole = KVRange(0, 2, 0, 2, 4, 5)
    coverage, model = Coverage(whole), set[tuple[int, int, int]]()
    everything = _cells(whole)
    for part in parts:
        cells = _cells(part)
        fine = bool(cells) and cells <= everything and not cells & model
        try:
            coverage.add(part)
        except InvalidRequest:
            assert not fine
            return
        assert fine
        model |= cells
        assert coverage.is_whole() == (model == everything)


def _cells(part: KVRange) -> set[tuple[int, int, int]]:
    return {
        (layer, head, token)
        for layer in range(part.layer_start, part.layer_end)
        for head in range(part.head_start, part.head_end)
        for token in range(part.token_start, part.token_start + part.num_tokens)
    }


@pytest.mark.parametrize("kind", [kind for kind in FrameKind if kind is not FrameKind.OPEN])
def test_a_transfer_begins_with_open(kind: FrameKind) -> None:
    with pytest.raises(InvalidRequest, match=f"{kind.name} frame cannot come while the transfer is fresh"):
        Sender().send(kind, KVRange(0, 1, 0, 1, 4, 1))


@pytest.mark.parametrize("kind", [FrameKind.OPEN, FrameKind.ACCEPT, FrameKind.DONE, FrameKind.CREDIT])
def test_what_an_opened_transfer_does_not_take(kind: FrameKind) -> None:
    with pytest.raises(InvalidRequest, match="while the transfer is opened"):
        opened().send(kind, WHOLE)


@pytest.mark.parametrize("last", [FrameKind.COMMIT, FrameKind.ABORT])
@pytest.mark.parametrize("kind", FrameKind)
def test_nothing_comes_after_the_end(kind: FrameKind, last: FrameKind) -> None:
    sender = opened()
    sender.send(FrameKind.DATA, WHOLE)
    if last is FrameKind.ABORT:
        with pytest.raises(Cancelled):
            sender.send(last)
    else:
        sender.send(last)
    with pytest.raises(InvalidRequest, match=r"while the transfer is (committed|closed)"):
        sender.send(kind, WHOLE)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"layout_fingerprint": 1}, Incompatible),
        ({"sequence": 2}, DataLoss),
        ({"sequence": 0}, DataLoss),
        ({"transfer_id": b"x" * 16}, InvalidRequest),
        ({"payload": b"short"}, InvalidRequest),
        ({"range": KVRange(0, 3, 0, 2, 3, 11)}, InvalidRequest),
        ({"range": KVRange(0, 4, 0, 2, 4, 10)}, InvalidRequest),
        ({"range": KVRange(3, 0, 2, 0, 4, 10)}, InvalidRequest),
        ({"layout_fingerprint": replace(LAYOUT, dtype="bfloat16").fingerprint()}, InvalidRequest),
    ],
)
def test_bad_data_frames(fields: dict[str, object], error: type[HalfmoonError]) -> None:
    part = fields.get("range", WHOLE)
    assert isinstance(part, KVRange)
    with pytest.raises(error) as caught:
        opened().send(FrameKind.DATA, **{"part": part, **{k: v for k, v in fields.items() if k != "range"}})  # type: ignore[arg-type]
    assert type(caught.value) is error


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec not in LOSSLESS])
@pytest.mark.parametrize("dtype", get_args(KVDtype))
def test_any_codec_and_dtype_is_written_if_the_size_is_exact(codec: Codec, dtype: KVDtype) -> None:
    fingerprint = replace(LAYOUT, dtype=dtype).fingerprint()
    part = KVRange(1, 3, 0, 1, 5, 7)
    size = encoded_bytes(codec, part.shape(LAYOUT), dtype)
    for wrong in (size - 1, size + 1):
        sender = opened(layout_fingerprint=fingerprint)
        with pytest.raises(InvalidRequest, match=f"in {codec.name} has {size} bytes, this one {wrong}"):
            sender.send(FrameKind.DATA, part, payload=bytes(wrong), codec=codec, layout_fingerprint=fingerprint)
    sender = opened(layout_fingerprint=fingerprint)
    effect = sender.send(FrameKind.DATA, part, payload=bytes(size), codec=codec, layout_fingerprint=fingerprint)
    assert effect == Write(part, bytes(size), codec, dtype)


@pytest.mark.parametrize(
    "whole", [KVRange(), KVRange(0, 4, 0, 2, 0, 4), KVRange(0, 3, 0, 3, 0, 4), KVRange(0, 3, 0, 2, 0, 0)]
)
def test_an_open_outside_the_layout_is_refused(whole: KVRange) -> None:
    sender = Sender()
    with pytest.raises(InvalidRequest):
        sender.send(FrameKind.OPEN, whole)
    assert sender.receiver.state == "fresh"


def test_an_open_without_its_list_of_transports_is_refused() -> None:
    sender = Sender()
    with pytest.raises(InvalidRequest, match="list of transports"):
        sender.send(FrameKind.OPEN, WHOLE)
    assert sender.receiver.state == "fresh"


def test_answers_are_numbered_and_carry_the_transfers_name() -> None:
    sender = opening()
    receiver = sender.receiver
    answers = [receiver.accept(Acceptance("shm", (("nixl", "not here"),), held_tokens=3))]
    sender.send(FrameKind.DATA, KVRange(0, 3, 0, 2, 7, 7))
    answers.append(receiver.credit(1))
    sender.send(FrameKind.COMMIT)
    answers.append(receiver.done())
    assert [(answer.kind, answer.sequence) for answer in answers] == [
        (FrameKind.ACCEPT, 0),
        (FrameKind.CREDIT, 1),
        (FrameKind.DONE, 2),
    ]
    assert all(answer.transfer_id == ID for answer in answers)
    assert decode_accept(answers[0].payload) == Acceptance("shm", (("nixl", "not here"),), held_tokens=3)


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout(4, 2, 2, "float16", 4),
        KVLayout(3, 3, 2, "float16", 4),
        KVLayout(3, 2, 3, "float16", 4),
        KVLayout(3, 2, 2, "float16", 5),
    ],
)
def test_an_open_for_another_layout_is_incompatible(layout: KVLayout) -> None:
    with pytest.raises(Incompatible, match="layouts differ"):
        Sender(layout).send(FrameKind.OPEN, WHOLE)


def test_a_shard_is_a_whole_transfer() -> None:
    part = KVRange(1, 2, 1, 2, 0, 3)
    sender = opened(part)
    sender.send(FrameKind.DATA, part)
    assert sender.send(FrameKind.COMMIT) == Commit(b"")


def test_codecs_known_today() -> None:
    assert [(codec.name, int(codec)) for codec in Codec] == [
        ("RAW", 0),
        ("INT8", 1),
        ("INT4", 2),
        ("INT2", 4),
        ("LZ4", 5),
        ("ZSTD", 6),
        ("FP8", 7),
    ]
