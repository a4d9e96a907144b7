"""An answer of a peer gateway on its way through this one, which sees bytes and their times."""

from __future__ import annotations

import json

from services.gateway.replies.reply_format import Usage

_MARK = b"\n: halfmoon "
_TAIL_BYTES = 4_096


def counted_end(usage: Usage) -> bytes:
    """What a gateway writes behind an answer to another one's offer: a comment, which readers of events skip."""
    counts = [usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens]
    return b"%b%b\n\n" % (_MARK, json.dumps(counts).encode())


def without_end(body: bytes) -> bytes:
    """The whole answer without that."""
    return body.rpartition(_MARK)[0] or body


class PassedAnswer:
    """Owns times and counts of one answer of a peer. Times are seconds since the request arrived here."""

    def __init__(self, peer: str, predicted_ttft_s: float, predicted_tbt_s: float | None) -> None:
        self.peer = peer  # its address
        self.predicted_ttft_s = predicted_ttft_s  # since the request arrived here
        self.predicted_tbt_s = predicted_tbt_s
        self.ttft_s: float | None = None
        self.gaps_s: list[float] = []
        self.usage = Usage(0, 0, 0)  # once it has ended
        self._last_s = 0.0
        self._tail = b""

    def begin(self, at_s: float) -> None:
        """Takes the time of the first token, which is that of the answer's head."""
        self.ttft_s = self._last_s = at_s

    def add(self, part: bytes, at_s: float) -> None:
        """Takes a part of an event stream. Each counts as a token, as which the peer has written it."""
        if self._tail:
            self.gaps_s.append(at_s - self._last_s)
        self._last_s = at_s
        self._tail = (self._tail + part)[-_TAIL_BYTES:]

    def end(self) -> None:
        """Takes the counts behind the end of an event stream."""
        _, mark, written = self._tail.rpartition(_MARK)
        if mark:
            prompt, cached, completion = json.loads(written)
            self.usage = Usage(prompt, cached, completion)
            del self.gaps_s[max(completion - 1, 0) :]  # those up to the last token's

    def end_whole(self, body: bytes, at_s: float) -> None:
        """Takes an answer that came at once. Of its gaps only the mean is known."""
        self._tail = body[-_TAIL_BYTES:]
        self.end()
        num_gaps = self.usage.completion_tokens - 1
        if num_gaps > 0:
            self.gaps_s = [(at_s - self._last_s) / num_gaps] * num_gaps
