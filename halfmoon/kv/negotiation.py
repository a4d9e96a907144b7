"""The bodies of OPEN and ACCEPT: the transports that the sender offers, the one that the receiver chooses, and what it
already holds. Sans-IO.

    OPEN    the offers, best first: name and parameters of each; then what the transfer is for
    ACCEPT  the chosen transport; then the offers that were declined, each with the reason; then how long OPEN took at
            the receiver, in microseconds (4 bytes); then how many leading tokens of OPEN's range it holds (4 bytes)
            and which codecs it decodes (4 bytes, a bit for each number)

`grpc`, with payloads inside the messages, is never offered: it is the fallback.

    offset  size  field
    0       1     number of entries
    1       1, 2  bytes of the first entry's name, of its value; then name and value; then the next entry
    ...           the rest: the body proper
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.errors import InvalidRequest
from halfmoon.kv.codec import Codec
from halfmoon.kv.kv_layout import KVBytes

INLINE = "grpc"  # the transport that always works
MAX_OFFERS = 8

_LENGTHS = struct.Struct("<BH")
_COUNTS = struct.Struct("<III")
_MAX_TAKEN_US = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Offer:
    """One transport by name, with what the receiver needs to join it."""

    name: str
    parameters: bytes = b""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The receiver's answer to OPEN: the transport's name, and why the offers before it were declined."""

    name: str
    declined: tuple[tuple[str, str], ...] = ()  # (transport, reason)
    taken_us: int = 0  # from OPEN's arrival to this answer; the rest of the sender's wait is the round trip
    held_tokens: int = 0  # leading tokens of the range that the receiver has: all but these are sent
    codecs: frozenset[Codec] = frozenset({Codec.RAW})  # that it decodes


def encode_open(offers: Sequence[Offer], body: bytes) -> bytes:
    """The payload of OPEN."""
    return _encode([(offer.name, offer.parameters) for offer in offers]) + body


def decode_open(payload: KVBytes) -> tuple[tuple[Offer, ...], bytes]:
    """Returns (offers, body). Raises InvalidRequest for a malformed payload."""
    entries, body = _decode(payload)
    return tuple(Offer(name, value) for name, value in entries), body


def encode_accept(acceptance: Acceptance) -> bytes:
    """The payload of ACCEPT."""
    entries = [(acceptance.name, b""), *((name, reason.encode()[:500]) for name, reason in acceptance.declined)]
    codecs = sum(1 << codec for codec in acceptance.codecs)
    return _encode(entries) + _COUNTS.pack(min(acceptance.taken_us, _MAX_TAKEN_US), acceptance.held_tokens, codecs)


def decode_accept(payload: KVBytes) -> Acceptance:
    """Parses an ACCEPT payload. Raises InvalidRequest if it is malformed."""
    entries, rest = _decode(payload)
    if not entries:
        raise InvalidRequest("an ACCEPT frame must name the transport")
    if len(rest) != _COUNTS.size:
        raise InvalidRequest("an ACCEPT frame must say how long its OPEN took, what is held and which codecs are known")
    declined = tuple((name, value.decode(errors="replace")) for name, value in entries[1:])
    taken_us, held_tokens, codecs = _COUNTS.unpack(rest)
    known = frozenset(codec for codec in Codec if codecs >> codec & 1)
    return Acceptance(entries[0][0], declined, taken_us, held_tokens, known)


def _encode(entries: Sequence[tuple[str, bytes]]) -> bytes:
    assert len(entries) <= MAX_OFFERS + 1
    packed = [bytes([len(entries)])]
    for name, value in entries:
        packed += [_LENGTHS.pack(len(name.encode()), len(value)), name.encode(), value]
    return b"".join(packed)


def _decode(payload: KVBytes) -> tuple[list[tuple[str, bytes]], bytes]:
    data = bytes(payload)
    if not data or data[0] > MAX_OFFERS + 1:
        raise InvalidRequest("the list of transports in a KV frame is missing or too long")
    entries, at = [], 1
    for _ in range(data[0]):
        if len(data) < at + _LENGTHS.size:
            raise InvalidRequest("the list of transports in a KV frame is cut short")
        name_bytes, value_bytes = _LENGTHS.unpack_from(data, at)
        name_at = at + _LENGTHS.size
        value_at, at = name_at + name_bytes, name_at + name_bytes + value_bytes
        if len(data) < at:
            raise InvalidRequest("the list of transports in a KV frame is cut short")
        entries.append((data[name_at:value_at].decode(errors="replace"), data[value_at:at]))
    return entries, data[at:]
