"""Frames survive the wire whole or are refused; a plan covers every cell exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import DataLoss, Incompatible, InvalidRequest
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    VERSION,
    Elsewhere,
    Frame,
    FrameKind,
    KVRange,
    decode_frame,
    decode_message,
    encode_frame,
    plan_frames,
)
from halfmoon.kv.kv_layout import KVLayout, Shard

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
ranges = st.builds(KVRange, u16, u16, u16, u16, u32, u32)
frames = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    transfer_id=st.binary(min_size=16, max_size=16),
    layout_fingerprint=u64,
    sequence=u32,
    range=ranges,
    codec=st.sampled_from(Codec),
    payload=st.binary(max_size=200),
)
layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 5),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    block_tokens=st.integers(1, 8),
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[KVLayout, Shard, int, int, int]:
    """A layout, a shard of it, a run of tokens, and a limit that at least one token of one layer fits in."""
    layout = draw(layouts)
    layer_start = draw(st.integers(0, layout.num_layers - 1))
    head_start = draw(st.integers(0, layout.num_kv_heads - 1))
    layer_end = draw(st.integers(layer_start + 1, layout.num_layers))
    head_end = draw(st.integers(head_start + 1, layout.num_kv_heads))
    shard = Shard(layer_start, layer_end, head_start, head_end)
    limit = draw(st.integers(layout.token_layer_bytes, 40 * layout.token_layer_bytes))
    return layout, shard, draw(st.integers(0, 9)), draw(st.integers(0, 30)), limit


@given(frames)
def test_round_trip(frame: Frame) -> None:
    message = encode_frame(frame)
    got = decode_frame(message)
    assert len(message) == HEADER_BYTES + len(bytes(frame.payload))
    assert Frame(**{**{name: getattr(got, name) for name in Frame.__slots__}, "payload": bytes(got.payload)}) == frame


@given(frames, st.data())
def test_every_corrupted_byte_is_detected(frame: Frame, data: st.DataObject) -> None:
    message = bytearray(encode_frame(frame))
    position = data.draw(st.integers(0, len(message) - 1))
    message[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises((DataLoss, Incompatible)):
        decode_frame(message)


def test_each_byte_of_one_frame_is_guarded() -> None:
    message = encode_frame(Frame(FrameKind.DATA, b"t" * 16, 5, 6, KVRange(0, 1, 0, 1, 0, 1), payload=b"payload"))
    for position in range(len(message)):
        broken = bytearray(message)
        broken[position] ^= 0xFF
        with pytest.raises((DataLoss, Incompatible)):
            decode_frame(broken)


@given(frames, st.data())
def test_every_truncation_and_extension_is_detected(frame: Frame, data: st.DataObject) -> None:
    message = encode_frame(frame)
    cut = message[: data.draw(st.integers(0, len(message) - 1))]
    for wrong in (cut, message + b"\0"):
        with pytest.raises((DataLoss, Incompatible)):
            decode_frame(wrong)


def test_pinned_bytes() -> None:
    """The wire format is a contract between releases: these bytes change only with VERSION."""
    frame = Frame(FrameKind.DATA, bytes(range(16)), 0x0123456789ABCDEF, 7, KVRange(0, 1, 0, 3, 64, 2), payload=b"abc")
    assert encode_frame(frame).hex() == (
        "484d4b5604030000efcdab8967452301000102030405060708090a0b0c0d0e0f"
        "070000000000010000000300400000000200000003000000271e62bafa5e2568"
        "616263"
    )


def test_the_payload_is_not_copied() -> None:
    message = bytearray(encode_frame(Frame(FrameKind.DATA, b"t" * 16, 0, 0, payload=b"abc")))
    payload = memoryview(decode_frame(message).payload)
    message[-1] = ord("z")
    assert bytes(payload) == b"abz"


def test_another_version_says_so() -> None:
    message = bytearray(encode_frame(Frame(FrameKind.RENEW, b"t" * 16, 0, 0)))
    message[4] = 1
    with pytest.raises(Incompatible, match="version 1, expected 4"):
        decode_frame(message)


@given(frames, st.binary(min_size=1, max_size=255))
def test_a_payload_that_lies_elsewhere_comes_back(frame: Frame, reference: bytes) -> None:
    message = encode_frame(frame, reference)
    assert len(message) == HEADER_BYTES + len(reference)
    found = decode_message(message)
    assert isinstance(found, Elsewhere)
    assert (found.reference, found.payload_bytes) == (reference, len(frame.payload))
    assert bytes(found.with_payload(frame.payload).payload) == frame.payload


@given(frames, st.data())
def test_a_torn_payload_elsewhere_is_detected(frame: Frame, data: st.DataObject) -> None:
    found = decode_message(encode_frame(frame, b"where"))
    assert isinstance(found, Elsewhere)
    torn = bytearray(frame.payload) or bytearray(1)
    torn[data.draw(st.integers(0, len(torn) - 1))] ^= data.draw(st.integers(1, 255))
    for wrong in (torn, bytes(frame.payload) + b"\0"):
        with pytest.raises(DataLoss):
            found.with_payload(wrong)


def test_a_reference_needs_an_agreement_and_its_length() -> None:
    message = encode_frame(Frame(FrameKind.DATA, b"t" * 16, 0, 0, payload=b"abc"), b"where")
    with pytest.raises(Incompatible, match="not agreed"):
        decode_frame(message)
    with pytest.raises(DataLoss, match="4 bytes of reference, its header says 5"):
        decode_message(message[:-1])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_frame(message: bytes) -> None:
    for start in (b"", b"HMKV", b"HMKV" + bytes([VERSION])):
        with pytest.raises((DataLoss, Incompatible)):
            decode_message(start + message)


@given(st.binary(min_size=59, max_size=120))
def test_a_header_cannot_name_more_than_the_limit(rest: bytes) -> None:
    message = bytearray(b"HMKV" + bytes([VERSION]) + rest)
    message[7] = len(message) - HEADER_BYTES
    message[52:56] = (MAX_PAYLOAD_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(DataLoss, match="over the limit"):
        decode_message(message)


def test_oversized_payload_is_refused() -> None:
    encode_frame(Frame(FrameKind.DATA, b"t" * 16, 0, 0, payload=bytes(MAX_PAYLOAD_BYTES)))
    with pytest.raises(InvalidRequest, match="limit"):
        encode_frame(Frame(FrameKind.DATA, b"t" * 16, 0, 0, payload=bytes(MAX_PAYLOAD_BYTES + 1)))


def test_a_transfer_id_is_never_padded_or_cut() -> None:
    for wrong in (b"t" * 15, b"t" * 17):
        with pytest.raises(AssertionError):
            encode_frame(Frame(FrameKind.OPEN, wrong, 0, 0))


def _cells(part: KVRange) -> list[tuple[int, int, int]]:
    return [
        (layer, head, token)
        for layer in range(part.layer_start, part.layer_end)
        for head in range(part.head_start, part.head_end)
        for token in range(part.token_start, part.token_start + part.num_tokens)
    ]


@given(plans())
def test_a_plan_covers_each_cell_once_and_respects_the_limit(plan: tuple[KVLayout, Shard, int, int, int]) -> None:
    layout, shard, token_start, num_tokens, limit = plan
    parts = list(plan_frames(layout, shard, token_start, num_tokens, limit))
    whole = KVRange(shard.layer_start, shard.layer_end, shard.head_start, shard.head_end, token_start, num_tokens)
    assert Counter(cell for part in parts for cell in _cells(part)) == Counter(_cells(whole))
    assert all(part.num_bytes(layout) <= limit for part in parts)
    assert [part.layer_start for part in parts] == sorted(part.layer_start for part in parts)


@given(plans())
def test_cuts_within_a_layer_fall_on_block_boundaries(plan: tuple[KVLayout, Shard, int, int, int]) -> None:
    layout, shard, token_start, num_tokens, limit = plan
    head_bytes = 2 * (shard.head_end - shard.head_start) * layout.head_dim * layout.item_bytes
    if limit < head_bytes * layout.block_tokens:
        return  # not even one block fits
    end = token_start + num_tokens
    for part in plan_frames(layout, shard, token_start, num_tokens, limit):
        assert part.token_start == token_start or part.token_start % layout.block_tokens == 0
        assert (
            part.token_start + part.num_tokens == end or (part.token_start + part.num_tokens) % layout.block_tokens == 0
        )


def test_no_tokens_need_no_frames() -> None:
    layout = KVLayout(1, 1, 1, "float32")
    assert list(plan_frames(layout, layout.whole(), 5, 0)) == []


@pytest.mark.parametrize(
    "inner",
    [
        KVRange(0, 3, 0, 2, 4, 4),
        KVRange(0, 2, 0, 3, 4, 4),
        KVRange(0, 2, 0, 2, 3, 4),
        KVRange(0, 2, 0, 2, 4, 5),
        KVRange(1, 1, 0, 2, 4, 4),
        KVRange(0, 2, 1, 0, 4, 4),
        KVRange(0, 2, 0, 2, 4, 0),
    ],
)
def test_ranges_outside_or_empty_are_refused(inner: KVRange) -> None:
    outer = KVRange(0, 2, 0, 2, 4, 4)
    outer.check_within(outer)
    with pytest.raises(InvalidRequest):
        inner.check_within(outer)
