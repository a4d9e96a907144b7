"""Ids of a stream's events, by which a client says how far it has read. A pure core."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.errors import InvalidRequest

MAX_OUTPUTS = 16  # a stream of more has no ids: each id counts the events of every output
_MAX_DIGITS = 9


class EventIds:
    """Owns how many events of each output the client has.

    An id has one number for each output, separated by dots: the events of that output up to this one. Outputs are
    interleaved differently in each stream, but the events of one output are always the same.
    """

    def __init__(self, num_outputs: int, last_event_id: str | None = None) -> None:
        """Continues after `last_event_id`. Raises InvalidRequest if it is no id of such a stream."""
        self._num_had = [0] * num_outputs if not last_event_id else _counts(last_event_id, num_outputs)
        self._num_made = [0] * num_outputs

    def new(self, index: int, events: Sequence[bytes]) -> list[bytes]:
        """The next events of an output, with their ids, without those that the client has."""
        found = []
        for event in events:
            self._num_made[index] += 1
            if self._num_made[index] > self._num_had[index]:
                self._num_had[index] += 1
                found.append(b"id: %b\n%b" % (".".join(map(str, self._num_had)).encode(), event))
        return found


def _counts(last_event_id: str, num_outputs: int) -> list[int]:
    parts = last_event_id.strip().split(".")
    are_numbers = all(part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS for part in parts)
    if not are_numbers or len(parts) != num_outputs:
        raise InvalidRequest(
            "Last-Event-ID is no id of this stream's events; send the last one that you have read, or none",
            param="Last-Event-ID",
        )
    return [int(part) for part in parts]
