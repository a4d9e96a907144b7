"""Which KV frames are due while a prompt is still being computed. No I/O, no clock, no bytes.

KV becomes readable as a staircase: all layers of the finished chunks, the first layers of the running one.
`plan_frames` cuts a single frame; this module decides when one is worth sending (Mooncake's layer-wise prefill, section
5.2; collated into larger messages because small ones cost more than they hide).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from halfmoon.kv.frame import KVRange, plan_frames
from halfmoon.kv.kv_layout import KVLayout, Shard

MIN_FRAME_TOKENS = 128
MIN_FRAME_BYTES = 1 << 20
MIN_LAST_BYTES = MIN_FRAME_BYTES // 8  # lower bound for the ever smaller frames near the end


class Written(NamedTuple):
    """How much of a sequence's KV is in memory, counted from its first token and its first layer."""

    num_tokens: int = 0  # in all layers
    chunk_end: int = 0  # tokens below this one are also in the first `num_layers` layers
    num_layers: int = 0
    loaded: tuple[tuple[int, int], ...] = ()  # later runs of tokens that were loaded from elsewhere, in all layers

    def has(self, layer: int, start: int, end: int) -> bool:
        """Whether K and V of tokens `start` to `end` of `layer` are in memory."""
        if end <= self.num_tokens_of(layer):
            return True
        return any(first <= start and end <= last for first, last in self.loaded)

    def num_tokens_of(self, layer: int) -> int:
        """Leading tokens whose K and V of `layer` are in memory."""
        return max(self.num_tokens, self.chunk_end) if layer < self.num_layers else self.num_tokens

    def without(self, blocks: range, block_tokens: int) -> Written:
        """What is written, counted without the tokens of some blocks."""
        first, num = blocks.start * block_tokens, len(blocks) * block_tokens

        def counted(token: int) -> int:
            return token - min(max(token - first, 0), num)

        loaded = ((counted(start), counted(end)) for start, end in self.loaded)
        runs = tuple(run for run in loaded if run[0] < run[1])
        return Written(counted(self.num_tokens), counted(self.chunk_end), self.num_layers, runs)


class FramePlan:
    """Owns what has been sent of one sequence's KV: the leading tokens of each layer, and runs that were sent ahead.

    Computed KV is sent from front to back; loaded KV is sent as it arrives, and the front skips it later. The first
    `held_tokens` are never sent: the receiver has them.
    """

    def __init__(self, layout: KVLayout, num_tokens: int, held_tokens: int = 0) -> None:
        self._layout = layout
        self._num_tokens = num_tokens
        self._sent = [0] * layout.num_layers  # leading tokens of each layer
        self._ahead = [(0, held_tokens)] if held_tokens else []  # runs of tokens that the front skips: held or sent
        self._due: deque[KVRange] = deque()  # frames of loaded runs
        self._skip()

    @property
    def is_done(self) -> bool:
        """Whether everything has been sent."""
        return not self._due and all(sent == self._num_tokens for sent in self._sent)

    def has_batch(self, written: Written, num_bytes: float) -> bool:
        """Whether `num_bytes` in memory (before any codec) can be sent now, or the last layer's last token."""
        if not num_bytes or self._is_last(written):
            return True
        self._take_ahead(written)
        num_cells = sum(max(self._here(layer, written) - sent, 0) for layer, sent in enumerate(self._sent))
        due_bytes = num_cells * self._layout.token_layer_bytes + sum(part.num_bytes(self._layout) for part in self._due)
        return due_bytes >= num_bytes

    def next(self, written: Written) -> KVRange | None:
        """The next frame that is worth sending, or None until more is written.

        It has at least MIN_FRAME_BYTES, and MIN_FRAME_TOKENS unless it ends the sequence; anything smaller waits for
        more layers or tokens. Near the end, a frame is large enough if it holds at least half of the rest, so that
        little is left when the last layer is written. Returns the same frame until `sent` is called.
        """
        self._take_ahead(written)
        if self._due:
            return self._due[0]
        num_layers = self._layout.num_layers
        is_last = self._is_last(written)
        first = 0
        while first < num_layers:
            sent, here = self._sent[first], self._here(first, written)
            end = first + 1
            while end < num_layers and (self._sent[end], self._here(end, written)) == (sent, here):
                end += 1
            if here > sent:
                shard = Shard(first, end, 0, self._layout.num_kv_heads)
                part = next(plan_frames(self._layout, shard, sent, here - sent))
                if is_last or self._is_worth(part, sent, here):
                    return part
            first = end
        return None

    def sent(self, part: KVRange) -> None:
        """Notes that `part`, as returned by `next`, is on its way."""
        if self._due and part == self._due[0]:
            self._due.popleft()
            return
        for layer in range(part.layer_start, part.layer_end):
            assert self._sent[layer] == part.token_start, "frames are sent in another order than they were planned"
            self._sent[layer] += part.num_tokens
        self._skip()

    def _is_last(self, written: Written) -> bool:
        return written.num_tokens_of(self._layout.num_layers - 1) == self._num_tokens

    def _here(self, layer: int, written: Written) -> int:
        """How far the front of a layer can advance: to the first token that is unwritten, or sent ahead."""
        ahead = min((start for start, _ in self._ahead if start >= self._sent[layer]), default=self._num_tokens)
        return min(written.num_tokens_of(layer), ahead)

    def _take_ahead(self, written: Written) -> None:
        """Plans separate frames for runs that were loaded since the last call."""
        for start, end in written.loaded:
            for first, last in _without(start, end, self._ahead):
                self._due.extend(plan_frames(self._layout, self._layout.whole(), first, last - first))
                self._ahead.append((first, last))
        self._skip()

    def _skip(self) -> None:
        """Moves the front of each layer past runs that are held or sent ahead."""
        ends = dict(self._ahead)
        for layer, sent in enumerate(self._sent):
            while sent in ends:
                sent = ends[sent]
            self._sent[layer] = sent

    def _is_worth(self, part: KVRange, start: int, end: int) -> bool:
        if end - start < MIN_FRAME_TOKENS and end < self._num_tokens:
            return False
        num_bytes = part.num_bytes(self._layout)
        return num_bytes >= MIN_FRAME_BYTES or num_bytes >= max(self._rest_bytes() - num_bytes, MIN_LAST_BYTES)

    def _rest_bytes(self) -> int:
        """Bytes that have not been sent, written or not."""
        apart = sum(end - start for start, end in self._ahead if start >= min(self._sent))
        num_cells = sum(self._num_tokens - sent - apart for sent in self._sent)
        return num_cells * self._layout.token_layer_bytes


def _without(start: int, end: int, taken: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of a run that lie in none of the disjoint runs `taken`."""
    for first, last in sorted(taken):
        if first < end and start < last:
            if start < first:
                yield start, first
            start = last
    if start < end:
        yield start, end
