"""The receiving end of a KV transfer as a state machine: frames in, effects out. No I/O, no clock of its own.


Carrying out an effect (reserving memory, copying bytes, starting to decode) is up to the shell. The law is the table
below; a frame that it does not allow is the sender's error and ends the transfer.

    state      OPEN      RENEW    DATA    COMMIT                 ABORT   what it answers
    fresh      opening   -        -       -                      -
    opening    -         opening  -       -                      closed  ACCEPT, once: opened
    opened     -         opened   opened  committed, if covered  closed  CREDIT, for each DATA once
    committed  -         -        -       -                      -       DONE, once

ACCEPT says how many leading tokens are held already. Only the others may arrive, and all of them must.
The sender's side of the same law is `kv.sender`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from halfmoon.errors import Cancelled, DataLoss, Incompatible, InvalidRequest
from halfmoon.kv.codec import Codec, check_size
from halfmoon.kv.device_bytes import DeviceBytes
from halfmoon.kv.frame import Frame, FrameKind, KVRange
from halfmoon.kv.kv_layout import KVBytes, KVDtype, KVLayout
from halfmoon.kv.negotiation import Acceptance, Offer, decode_open, encode_accept
from halfmoon.kv.sender import credit_body

State = Literal["fresh", "opening", "opened", "committed", "closed"]

_ALLOWED: dict[State, frozenset[FrameKind]] = {
    "fresh": frozenset({FrameKind.OPEN}),
    "opening": frozenset({FrameKind.RENEW, FrameKind.ABORT}),
    "opened": frozenset({FrameKind.RENEW, FrameKind.DATA, FrameKind.COMMIT, FrameKind.ABORT}),
    "committed": frozenset(),
    "closed": frozenset(),
}


@dataclass(frozen=True, slots=True)
class Reserve:
    """Make room for `range`; `body` says what for. Answer `accept`, with the tokens already here, or fail the call."""

    range: KVRange
    body: bytes
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """Put the values that `payload` encodes (canonical order, of exactly the size that is due) at `range`."""

    range: KVRange
    payload: KVBytes
    codec: Codec
    dtype: KVDtype  # the sender's


@dataclass(frozen=True, slots=True)
class WriteFromDevice:
    """`Write` for raw values in device memory; only after joining a transport that carries them."""

    range: KVRange
    source: DeviceBytes
    dtype: KVDtype  # the sender's


@dataclass(frozen=True, slots=True)
class Commit:
    """Every byte is in place; act on `body`, then answer `done`."""

    body: bytes


Effect = Reserve | Write | WriteFromDevice | Commit


class Coverage:
    """Owns which (layer, head, token) cells have arrived. Each may arrive once. `whole` may have no tokens.

    Memory grows with the number of frames that arrived, never with the number of cells, which the sender chooses.
    """

    def __init__(self, whole: KVRange) -> None:
        self.whole = whole
        self._runs: dict[_Plane, list[tuple[int, int]]] = {}  # disjoint sorted token runs of each plane
        self._num_cells = 0

    def add(self, part: KVRange) -> None:
        """Raises InvalidRequest if `part` is outside the transfer or overlaps what arrived before."""
        part.check_within(self.whole)
        start, end = part.token_start, part.token_start + part.num_tokens
        plane: _Plane = (part.layer_start, part.layer_end, part.head_start, part.head_end)
        for other, runs in self._runs.items():
            if _intersect(plane, other) and any(start < run_end and run_start < end for run_start, run_end in runs):
                raise InvalidRequest(f"a part of {part} was sent twice")
        self._runs[plane] = _merged([*self._runs.get(plane, []), (start, end)])
        self._num_cells += _num_cells(part)

    def is_whole(self) -> bool:
        """Whether every cell has arrived: parts lie inside the transfer and are disjoint, so counting suffices."""
        return self._num_cells == _num_cells(self.whole)


_Plane = tuple[int, int, int, int]  # layer_start, layer_end, head_start, head_end


def _intersect(a: _Plane, b: _Plane) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


def _num_cells(part: KVRange) -> int:
    return (part.layer_end - part.layer_start) * (part.head_end - part.head_start) * part.num_tokens


class TransferReceiver:
    """Owns the protocol state of one transfer. Knows nothing of memory, engines or gRPC.

    Frames carry the fingerprint of the sender's layout, whose dtype may differ from the receiver's.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._dtypes = layout.dtype_by_fingerprint()
        self._fingerprint = layout.fingerprint()  # the sender's, once OPEN has arrived
        self.state: State = "fresh"
        self.transfer_id = b""
        self._next_sequence = 0
        self._next_answer = 0
        self._coverage = Coverage(KVRange())

    def accept(self, acceptance: Acceptance) -> Frame:
        """The answer to OPEN, once there is room. Frames of the tokens that are held will be refused."""
        assert self.state == "opening"
        whole, held = self._coverage.whole, acceptance.held_tokens
        assert 0 <= held <= whole.num_tokens, "more tokens are held than were offered"
        rest = replace(whole, token_start=whole.token_start + held, num_tokens=whole.num_tokens - held)
        self.state, self._coverage = "opened", Coverage(rest)
        return self._answer(FrameKind.ACCEPT, encode_accept(acceptance))

    def credit(self, *sequences: int) -> Frame:
        """The answer to the DATA frames with these numbers: their payloads are no longer read."""
        assert self.state in ("opened", "committed")
        return self._answer(FrameKind.CREDIT, credit_body(sequences))

    def done(self) -> Frame:
        """The answer to COMMIT, once it has taken effect."""
        assert self.state == "committed"
        return self._answer(FrameKind.DONE)

    def _answer(self, kind: FrameKind, payload: bytes = b"") -> Frame:
        frame = Frame(kind, self.transfer_id, self._layout.fingerprint(), self._next_answer, payload=payload)
        self._next_answer += 1
        return frame

    def handle(self, frame: Frame) -> Effect | None:
        """Advances by one frame and returns the effect to carry out, if any.

        Raises Incompatible (other layout), InvalidRequest (against the table, wrong range or size), DataLoss (a frame
        is missing, or COMMIT came before every byte), Cancelled (ABORT).
        """
        self._check(frame)
        self._next_sequence += 1
        match frame.kind:
            case FrameKind.OPEN:
                return self._open(frame)
            case FrameKind.DATA:
                return self._write(frame)
            case FrameKind.COMMIT:
                if not self._coverage.is_whole():
                    raise DataLoss("the sender committed a KV transfer of which parts never arrived")
                self.state = "committed"
                return Commit(bytes(frame.payload))
            case FrameKind.ABORT:
                self.state = "closed"
                raise Cancelled("the sender gave the KV transfer up")
            case _:
                return None

    def _check(self, frame: Frame) -> None:
        if frame.kind not in _ALLOWED[self.state]:
            raise InvalidRequest(f"a {frame.kind.name} frame cannot come while the transfer is {self.state}")
        if frame.layout_fingerprint not in self._dtypes:
            raise Incompatible("the two workers' KV layouts differ: serve the same model and block size on both")
        if frame.sequence != self._next_sequence:
            raise DataLoss(f"KV frame {frame.sequence} came where {self._next_sequence} was due")
        opened_as = (self.transfer_id, self._fingerprint)
        if self.state != "fresh" and (frame.transfer_id, frame.layout_fingerprint) != opened_as:
            raise InvalidRequest("a frame of another transfer or dtype came on this stream")

    def _open(self, frame: Frame) -> Reserve:
        layout = self._layout
        everything = KVRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, 1 << 32)
        frame.range.check_within(everything)
        offers, body = decode_open(frame.payload)
        self.state, self.transfer_id, self._fingerprint = "opening", frame.transfer_id, frame.layout_fingerprint
        self._coverage = Coverage(frame.range)
        return Reserve(frame.range, body, offers)

    def _write(self, frame: Frame) -> Write | WriteFromDevice:
        frame.range.check_within(self._coverage.whole)
        dtype = self._dtypes[self._fingerprint]
        check_size(frame.codec, frame.payload_bytes, frame.range.shape(self._layout), dtype)
        if frame.device is not None and frame.codec is not Codec.RAW:
            raise InvalidRequest(f"a DATA frame in device memory must be raw, not {frame.codec.name}")
        self._coverage.add(frame.range)
        if frame.device is not None:
            return WriteFromDevice(frame.range, frame.device, dtype)
        return Write(frame.range, frame.payload, frame.codec, dtype)


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(runs):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
