"""Which blocks of a shared prompt each of its workers computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from halfmoon.errors import InvalidRequest
from halfmoon.pb import prefill_pb2


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of blocks that one worker computes in one step, if it fits."""

    owner: int
    blocks: range


@dataclass(frozen=True, slots=True)
class Segments:
    """A prompt's segments in order. `own` is this worker; the last segment's owner serves the request."""

    addresses: tuple[str, ...]  # of the workers, by owner
    own: int
    segments: tuple[Segment, ...]
    round_s: float = 0.0  # predicted for the longest segment; 0: unknown
    queue_s: float = 0.0  # predicted until the last segment's owner begins

    @property
    def of_own(self) -> tuple[range, ...]:
        """The blocks that this worker computes."""
        return tuple(segment.blocks for segment in self.segments if segment.owner == self.own)

    @property
    def of_others(self) -> list[list[Segment]]:
        """What others compute before each segment of this worker that comes behind some: runs of segments."""
        runs: list[list[Segment]] = [[]]
        for segment in self.segments:
            if segment.owner != self.own:
                runs[-1].append(segment)
            elif runs[-1]:
                runs.append([])
        return runs[:-1]

    @classmethod
    def read(cls, message: prefill_pb2.PromptShares, num_tokens: int, block_tokens: int) -> Segments:
        """Reads the message of a request for `num_tokens`. Raises InvalidRequest."""
        degree, ends = len(message.addresses), list(message.segment_ends)
        if degree < 2 or message.own >= degree or not ends:
            raise InvalidRequest("a shared prompt needs two workers at least, and a segment", param="shares")
        if any(end % block_tokens for end in ends[:-1]) or not _rises(ends) or ends[-1] < num_tokens:
            raise InvalidRequest("segments are whole blocks, one behind the other, up to the end", param="shares")
        starts = (0, *(-(-end // block_tokens) for end in ends))
        segments = (
            Segment(number % degree, range(starts[number], starts[number + 1]))
            for number, end in enumerate(ends)
            if (0, *ends)[number] < num_tokens
        )
        return cls(tuple(message.addresses), message.own, tuple(segments), message.round_s, message.queue_s)


def _rises(ends: Sequence[int]) -> bool:
    return all(before < end for before, end in pairwise((0, *ends)))
