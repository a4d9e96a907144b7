"""KV frames on the wire: a 64-byte header and a payload. Sans-IO: bytes in, values out.


Every message of a KV transfer is one frame. A DATA payload holds the KV bytes of the ranges that the header names, in
the layout's canonical order `[layers, 2, heads, tokens, head_dim]`; the body of a control frame (OPEN, COMMIT, ...) is
opaque here. A DATA payload follows its header, or lies elsewhere (in memory that both ends share) and a short reference
takes its place; what the reference means is up to the transport. The digest covers the header and the payload wherever
it lies, so a frame is whole or rejected. A payload in device memory is the exception, since no CPU reads it: there the
digest covers the header and the reference.

    offset  size  field                         offset  size  field
    0       4     magic "HMKV"                  36      2x4   layer_start, layer_end, head_start, head_end
    4       1     version                       44      4     token_start
    5       1     kind                          48      4     num_tokens
    6       1     codec                         52      4     payload_bytes
    7       1     reference_bytes, 0: inline    56      8     xxh3-64 of bytes 0..55 and the payload
    8       8     layout fingerprint
    16      16    transfer id                   all integers little-endian
    32      4     sequence number
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

import xxhash

from halfmoon.errors import DataLoss, Incompatible, InvalidRequest
from halfmoon.kv.codec import Codec, Shape
from halfmoon.kv.device_bytes import DeviceBytes, KVSource
from halfmoon.kv.kv_layout import KVBytes, KVLayout, KVSlice, Shard

VERSION = 4
HEADER_BYTES = 64
TRANSFER_ID_BYTES = 16
MAX_PAYLOAD_BYTES = 2 << 20  # a raw gRPC stream is fastest at 1 MiB and above; control bodies obey the limit, too

_MAGIC = b"HMKV"
_FIELDS = struct.Struct("<4sBBBBQ16sIHHHHIII")
_DIGEST = struct.Struct("<Q")


class FrameKind(IntEnum):
    """Meaning of a frame. Sender to receiver: OPEN to ABORT; receiver to sender: ACCEPT, DONE, CREDIT."""

    OPEN = 1  # reserve room for this transfer; the ranges name all that will be sent; body: see kv.negotiation
    RENEW = 2  # nothing to send yet; the reservation must not expire
    DATA = 3  # KV bytes of the ranges
    COMMIT = 4  # everything has been sent; body: what to do with it
    ABORT = 5  # the sender gives up
    ACCEPT = 6  # the reservation stands; body: see kv.negotiation
    DONE = 7  # the commit took effect
    CREDIT = 8  # DATA frames were consumed, their room can be reused; body: their sequence numbers


@dataclass(frozen=True, slots=True)
class KVRange:
    """The part of a KV cache that a frame covers: half-open layer and head ranges, and a run of tokens."""

    layer_start: int = 0
    layer_end: int = 0
    head_start: int = 0
    head_end: int = 0
    token_start: int = 0
    num_tokens: int = 0

    def shape(self, layout: KVLayout) -> Shape:
        """`[layers, 2, heads, tokens, head_dim]` of this range."""
        layers, heads = self.layer_end - self.layer_start, self.head_end - self.head_start
        return layers, 2, heads, self.num_tokens, layout.head_dim

    def num_bytes(self, layout: KVLayout) -> int:
        """Size of the raw payload of this range."""
        return math.prod(self.shape(layout)[:-1]) * layout.row_bytes

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this range in an array of the canonical order."""
        layers, heads = slice(self.layer_start, self.layer_end), slice(self.head_start, self.head_end)
        return layers, slice(None), heads, slice(self.token_start, self.token_start + self.num_tokens)

    @property
    def all_heads(self) -> KVSlice:
        """The layers and tokens of this range."""
        return KVSlice(self.layer_start, self.layer_end, self.token_start, self.num_tokens)

    def moved(self, num_tokens: int) -> KVRange:
        """This range, so many tokens further on."""
        return replace(self, token_start=self.token_start + num_tokens)

    def within(self, outer: KVRange) -> KVRange:
        """This range, counted from the start of `outer` in every dimension."""
        layer, head, token = outer.layer_start, outer.head_start, outer.token_start
        return KVRange(
            self.layer_start - layer, self.layer_end - layer, self.head_start - head, self.head_end - head,
            self.token_start - token, self.num_tokens,
        )  # fmt: skip

    def check_within(self, outer: KVRange) -> None:
        """Raises InvalidRequest unless this range is well-formed and lies inside `outer`."""
        inside = (
            outer.layer_start <= self.layer_start < self.layer_end <= outer.layer_end
            and outer.head_start <= self.head_start < self.head_end <= outer.head_end
            and outer.token_start <= self.token_start
            and self.num_tokens > 0
            and self.token_start + self.num_tokens <= outer.token_start + outer.num_tokens
        )
        if not inside:
            raise InvalidRequest(f"frame range {self} is outside the transfer's {outer}")


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame; `payload` is a view into the received message, or into the memory that the reference names.

    If that is device memory, it is `device`, and `payload` is empty.
    """

    kind: FrameKind
    transfer_id: bytes  # 16 bytes
    layout_fingerprint: int
    sequence: int
    range: KVRange = field(default_factory=KVRange)
    codec: Codec = Codec.RAW
    payload: KVBytes = b""
    device: DeviceBytes | None = None

    @property
    def payload_bytes(self) -> int:
        """Size of the payload, wherever it is."""
        return memoryview(self.payload).nbytes if self.device is None else self.device.num_bytes


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A frame whose payload has to be fetched first. Nothing in it can be trusted before `with_payload`."""

    header: memoryview  # 64 bytes, a view into the received message
    reference: bytes
    payload_bytes: int  # at most MAX_PAYLOAD_BYTES

    def with_payload(self, payload: KVSource) -> Frame:
        """The frame with the bytes that its reference led to. Raises DataLoss if they are not the sender's.

        For bytes in device memory only their number and the reference are checked.
        """
        if isinstance(payload, DeviceBytes):
            frame = _checked(self.header, memoryview(self.reference), payload.num_bytes)
            return replace(frame, payload=b"", device=payload)
        return _checked(self.header, memoryview(payload).cast("B"))


def encode_frame(frame: Frame, reference: bytes = b"") -> bytes:
    """Encodes the frame as one message; a `reference` takes the place of the payload.

    Raises InvalidRequest if the payload is over MAX_PAYLOAD_BYTES.
    """
    assert len(frame.transfer_id) == TRANSFER_ID_BYTES, "struct would pad or cut it silently"
    payload = memoryview(frame.payload).cast("B")
    num_bytes = frame.payload_bytes
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidRequest(f"a frame's payload of {num_bytes} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
    assert frame.device is None or reference, "a payload in device memory needs a reference"
    r = frame.range
    head = _FIELDS.pack(
        _MAGIC, VERSION, frame.kind, frame.codec, len(reference), frame.layout_fingerprint, frame.transfer_id,
        frame.sequence, r.layer_start, r.layer_end, r.head_start, r.head_end, r.token_start, r.num_tokens,
        num_bytes,
    )  # fmt: skip
    digest = _digest(head, payload if frame.device is None else reference)
    return b"".join((head, _DIGEST.pack(digest), reference or payload))


def decode_message(message: KVBytes) -> Frame | Elsewhere:
    """Parses one message without copying its payload.

    Raises Incompatible for another protocol or version, DataLoss for a digest or length that does not match.
    """
    view = memoryview(message).cast("B")
    if view.nbytes < HEADER_BYTES or bytes(view[:4]) != _MAGIC:
        raise Incompatible("not a Halfmoon KV frame: wrong magic or shorter than its header")
    header, rest = view[:HEADER_BYTES], view[HEADER_BYTES:]
    _, version, _, _, reference_bytes, *_, size = _FIELDS.unpack_from(header)
    if version != VERSION:
        raise Incompatible(f"KV frame version {version}, expected {VERSION}: run the same release on both ends")
    if size > MAX_PAYLOAD_BYTES:
        raise DataLoss(f"a KV frame's header speaks of {size} payload bytes, over the limit of {MAX_PAYLOAD_BYTES}")
    if not reference_bytes:
        return _checked(header, rest)
    if rest.nbytes != reference_bytes:
        raise DataLoss(f"a KV frame with {rest.nbytes} bytes of reference, its header says {reference_bytes}")
    return Elsewhere(header, bytes(rest), size)


def decode_frame(message: KVBytes) -> Frame:
    """`decode_message` for links whose payloads are always inline. Raises Incompatible for one that is not."""
    frame = decode_message(message)
    if isinstance(frame, Elsewhere):
        raise Incompatible("a KV frame whose payload lies elsewhere came where that was not agreed")
    return frame


def _checked(header: memoryview, payload: memoryview, num_bytes: int | None = None) -> Frame:
    """The frame, once its digest is checked over `payload`, which stands for `num_bytes` bytes or for itself."""
    num_bytes = payload.nbytes if num_bytes is None else num_bytes
    _, _, kind, codec, _, fingerprint, transfer_id, sequence, l0, l1, h0, h1, t0, tokens, size = _FIELDS.unpack_from(
        header
    )
    if num_bytes != size:
        raise DataLoss(f"KV frame {sequence}: {num_bytes} payload bytes arrived, the header says {size}")
    if _DIGEST.unpack_from(header, _FIELDS.size)[0] != _digest(header[: _FIELDS.size], payload):
        raise DataLoss(f"KV frame {sequence}: its digest does not match its bytes")
    try:
        frame_kind, frame_codec = FrameKind(kind), Codec(codec)
    except ValueError as err:
        raise Incompatible(f"KV frame {sequence}: {err}") from err
    return Frame(
        frame_kind, transfer_id, fingerprint, sequence, KVRange(l0, l1, h0, h1, t0, tokens), frame_codec, payload
    )


def plan_frames(
    layout: KVLayout, shard: Shard, token_start: int, num_tokens: int, max_payload_bytes: int = MAX_PAYLOAD_BYTES
) -> Iterator[KVRange]:
    """Cuts a run of tokens into DATA ranges, layer by layer from the first.

    A frame takes as many whole layers as fit; a layer that does not fit is cut along tokens, at block boundaries where
    a block fits. Together the ranges cover `shard` x tokens exactly once.
    """
    if num_tokens == 0:
        return
    token_layer_bytes = 2 * (shard.head_end - shard.head_start) * layout.row_bytes
    step_layers = max(1, max_payload_bytes // (token_layer_bytes * num_tokens))
    fitting_tokens = max(1, max_payload_bytes // token_layer_bytes)
    for layer in range(shard.layer_start, shard.layer_end, step_layers):
        layer_end = min(layer + step_layers, shard.layer_end)
        for token, tokens in _token_runs(layout.block_tokens, token_start, num_tokens, fitting_tokens):
            yield KVRange(layer, layer_end, shard.head_start, shard.head_end, token, tokens)


def _token_runs(block_tokens: int, start: int, num_tokens: int, fitting_tokens: int) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of runs of at most `fitting_tokens`, cut at block boundaries where a block fits."""
    unit = block_tokens if fitting_tokens >= block_tokens else 1
    step, end = fitting_tokens - fitting_tokens % unit, start + num_tokens
    while end - start > fitting_tokens:
        tokens = step - start % unit
        yield start, tokens
        start += tokens
    yield start, end - start


def _digest(head: KVBytes, payload: KVBytes) -> int:
    hasher = xxhash.xxh3_64(bytes(head))
    hasher.update(payload)
    return hasher.intdigest()
