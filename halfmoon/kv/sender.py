"""The sending end of a KV transfer as a state machine, the mirror of `kv.receiver`. No I/O, no clock.


Its methods return the frames to send, in order; `handle` takes the receiver's answers. An answer that the table does
not allow is the receiver's error and ends the transfer.

    state       ACCEPT  CREDIT                       DONE                       the sender may
    fresh       -       -                            -                          open
    opening     opened  -                            -                          renew
    opened      -       opened, of uncredited ones   -                          renew, data of what is not held, commit
    committing  -       committing, as above         done, if all is credited   -
    done        -       -                            -                          -
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from halfmoon.errors import DataLoss, Incompatible, InvalidRequest
from halfmoon.kv.codec import Codec
from halfmoon.kv.device_bytes import DeviceBytes, KVSource
from halfmoon.kv.frame import Frame, FrameKind, KVRange
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from halfmoon.kv.negotiation import Acceptance, decode_accept

State = Literal["fresh", "opening", "opened", "committing", "done"]

_CREDITED = struct.Struct("<I")  # a CREDIT's body: the sequence numbers of the frames that were consumed

_ANSWERS: dict[State, frozenset[FrameKind]] = {
    "fresh": frozenset(),
    "opening": frozenset({FrameKind.ACCEPT}),
    "opened": frozenset({FrameKind.CREDIT}),
    "committing": frozenset({FrameKind.CREDIT, FrameKind.DONE}),
    "done": frozenset(),
}


def credit_body(sequences: Iterable[int]) -> bytes:
    """The payload of CREDIT."""
    return b"".join(_CREDITED.pack(sequence) for sequence in sequences)


class TransferSending:
    """Owns the protocol state of one outgoing transfer: its numbering, and which frames are not credited yet.

    `acceptance` is the receiver's, once ACCEPT has arrived.
    """

    def __init__(self, layout: KVLayout, transfer_id: bytes) -> None:
        self.state: State = "fresh"
        self.transfer_id = transfer_id
        self.acceptance: Acceptance | None = None
        self._whole, self._most_held = KVRange(), 0
        self._fingerprint = layout.fingerprint()
        self._sequence = 0
        self._next_answer = 0
        self._uncredited: set[int] = set()

    @property
    def held_tokens(self) -> int:
        """Leading tokens that the receiver holds, so that they must not be sent; 0 before ACCEPT."""
        return 0 if self.acceptance is None else self.acceptance.held_tokens

    def open(self, whole: KVRange, payload: bytes, *, skips_held: bool = False) -> Frame:
        """The OPEN frame: reserves room for `whole`. `skips_held`: the receiver may hold leading tokens of it."""
        assert self.state == "fresh"
        self.state, self._whole, self._most_held = "opening", whole, whole.num_tokens if skips_held else 0
        return self._frame(FrameKind.OPEN, whole, payload)

    def renew(self) -> Frame:
        """A RENEW frame: keeps the reservation from expiring."""
        assert self.state in ("opening", "opened")
        return self._frame(FrameKind.RENEW)

    def data(self, part: KVRange, payload: KVSource, codec: Codec = Codec.RAW) -> Frame:
        """A DATA frame with the KV of `part`, none of which the receiver holds."""
        assert self.state == "opened", "nothing may be sent before ACCEPT or after COMMIT"
        assert part.token_start >= self._whole.token_start + self.held_tokens, "the receiver holds these tokens"
        self._uncredited.add(self._sequence)
        if isinstance(payload, DeviceBytes):
            return replace(self._frame(FrameKind.DATA, part, codec=codec), device=payload)
        return self._frame(FrameKind.DATA, part, payload, codec)

    def commit(self, body: bytes) -> Frame:
        """The COMMIT frame: `body` says what to do with the KV."""
        assert self.state == "opened"
        self.state = "committing"
        return self._frame(FrameKind.COMMIT, payload=body)

    def handle(self, answer: Frame) -> list[int]:
        """Takes an answer; returns the numbers of the frames that it credits.

        Raises Incompatible against the table, InvalidRequest for another transfer or an unknown frame, DataLoss when an
        answer is missing.
        """
        if answer.transfer_id != self.transfer_id:
            raise InvalidRequest("the receiver answered to another transfer")
        if answer.kind not in _ANSWERS[self.state]:
            raise Incompatible(f"the receiver answered {answer.kind.name} while the transfer was {self.state}")
        if answer.sequence != self._next_answer:
            raise DataLoss(f"answer {answer.sequence} came where {self._next_answer} was due")
        self._next_answer += 1
        match answer.kind:
            case FrameKind.ACCEPT:
                self._accept(decode_accept(answer.payload))
            case FrameKind.CREDIT:
                return self._credited(answer.payload)
            case _:
                if self._uncredited:
                    raise Incompatible(f"the receiver is done without having taken {len(self._uncredited)} frames")
                self.state = "done"
        return []

    def _accept(self, acceptance: Acceptance) -> None:
        if acceptance.held_tokens > self._most_held:
            raise Incompatible(
                f"the receiver holds {acceptance.held_tokens} tokens, and at most {self._most_held} may be"
            )
        self.state, self.acceptance = "opened", acceptance

    def _credited(self, body: KVBytes) -> list[int]:
        if not body or memoryview(body).nbytes % _CREDITED.size:
            raise InvalidRequest("the body of a CREDIT frame is not a list of frames")
        sequences = [sequence for (sequence,) in _CREDITED.iter_unpack(body)]
        for sequence in sequences:
            if sequence not in self._uncredited:
                raise InvalidRequest(f"credit for frame {sequence}, which is not under way")
            self._uncredited.remove(sequence)
        return sequences

    def _frame(
        self, kind: FrameKind, part: KVRange | None = None, payload: KVBytes = b"", codec: Codec = Codec.RAW
    ) -> Frame:
        frame = Frame(
            kind, self.transfer_id, self._fingerprint, self._sequence, part or KVRange(), codec, payload=payload
        )
        self._sequence += 1
        return frame
