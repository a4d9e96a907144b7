"""Which KV frames are due while a prompt is still being computed. No I/O, no clock, no bytes.

KV becomes readable as a staircase: all layers of the chunks that are done, the first layers of the one that runs. The
law of a single frame is `plan_frames`; here it is decided when one is worth sending (Mooncake's layer-wise prefill,
section 5.2; collated into larger messages because small ones cost more than they hide).
"""

from __future__ import annotations

from typing import NamedTuple

from halfmoon.kv.frame import KVRange, plan_frames
from halfmoon.kv.layout import KVLayout, Shard

MIN_FRAME_TOKENS = 128
MIN_FRAME_BYTES = 1 << 20
MIN_LAST_BYTES = MIN_FRAME_BYTES // 8  # of the smaller and smaller frames near the end


class Written(NamedTuple):
    """How much of a sequence's KV is in memory, counted from its first token and its first layer."""

    num_tokens: int = 0  # in all layers
    chunk_end: int = 0  # tokens below this one, too, in the first `num_layers` layers
    num_layers: int = 0

    def num_tokens_of(self, layer: int) -> int:
        """Leading tokens whose K and V of `layer` are in memory."""
        return max(self.num_tokens, self.chunk_end) if layer < self.num_layers else self.num_tokens


class FramePlan:
    """Owns how many tokens of each layer have been sent of one sequence's KV, which is sent from front to back."""

    def __init__(self, layout: KVLayout, num_tokens: int) -> None:
        self._layout = layout
        self._num_tokens = num_tokens
        self._sent = [0] * layout.num_layers  # leading tokens of each layer

    @property
    def is_done(self) -> bool:
        """Whether everything has been sent."""
        return all(sent == self._num_tokens for sent in self._sent)

    def next(self, written: Written) -> KVRange | None:
        """The next frame that is worth sending, or None until more is written.

        It has at least MIN_FRAME_BYTES, and MIN_FRAME_TOKENS unless it ends the sequence; what is less waits for more
        layers or tokens. Near the end, whatever is as much as all that is still to come is enough, so that what is left
        when the last layer is written is little. The same again until `sent` is called.
        """
        num_layers = self._layout.num_layers
        is_final = written.num_tokens_of(num_layers - 1) == self._num_tokens
        first = 0
        while first < num_layers:
            sent, here = self._sent[first], written.num_tokens_of(first)
            end = first + 1
            while end < num_layers and (self._sent[end], written.num_tokens_of(end)) == (sent, here):
                end += 1
            if here > sent:
                shard = Shard(first, end, 0, self._layout.num_kv_heads)
                part = next(plan_frames(self._layout, shard, sent, here - sent))
                if is_final or self._is_worth(part, sent, here):
                    return part
            first = end
        return None

    def sent(self, part: KVRange) -> None:
        """`part`, as `next` gave it, is on its way."""
        for layer in range(part.layer_start, part.layer_end):
            assert self._sent[layer] == part.token_start, "frames are sent in another order than they were planned"
            self._sent[layer] += part.num_tokens

    def _is_worth(self, part: KVRange, start: int, end: int) -> bool:
        if end - start < MIN_FRAME_TOKENS and end < self._num_tokens:
            return False
        num_bytes = part.num_bytes(self._layout)
        return num_bytes >= MIN_FRAME_BYTES or num_bytes >= max(self._rest_bytes() - num_bytes, MIN_LAST_BYTES)

    def _rest_bytes(self) -> int:
        """What has not been sent, written or not."""
        return sum(self._num_tokens - sent for sent in self._sent) * self._layout.token_layer_bytes
