"""Answers that are kept for repeats of their requests: a pure core. Time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfmoon.errors import NotFound
from halfmoon.pb.decode_pb2 import KeptAnswer
from halfmoon.pb.prefill_pb2 import FirstToken
from halfmoon.pb.types_pb2 import NOT_FINISHED, Repeatable, Token

_ANSWER_BYTES = 512  # of an answer beside its tokens
_TOKEN_BYTES = 96  # of a token beside its message


@dataclass(slots=True)
class Kept:
    """One output that is kept. `KeptAnswers` owns it, and alone changes it."""

    request_id: str  # on this worker
    gateway_id: str  # that has it
    repeatable: Repeatable
    first: FirstToken | None = None  # None until the first token is known here
    tokens: list[Token] = field(default_factory=list)  # since the start of the answer
    num_bytes: int = _ANSWER_BYTES
    ended_s: float | None = None  # None while it runs
    left_s: float | None = None  # when its gateway was found gone; None while that is there
    is_settled: bool = False  # it is in the ledger


class KeptAnswers:
    """Owns the tokens of repeatable outputs, bounded in time and bytes. Knows nothing of engine and streams."""

    def __init__(self, keep_s: float = 60.0, max_bytes: int = 64 << 20) -> None:
        """`keep_s`: how long an answer is kept after its end, and goes on after its gateway has gone."""
        self.keep_s = keep_s
        self._max_bytes = max_bytes
        self._kept: dict[str, Kept] = {}  # by request id, in order of arrival
        self._by_key: dict[bytes, set[str]] = {}  # ids, by the key of their requests
        self._ended: dict[str, None] = {}  # ids, in order of their ends
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def begin(self, request_id: str, gateway_id: str, repeatable: Repeatable, first: FirstToken | None = None) -> None:
        """Keeps an output from now on, with the tokens of earlier attempts."""
        kept = self._kept[request_id] = Kept(request_id, gateway_id, Repeatable(), first)
        self._by_key.setdefault(repeatable.key, set()).add(request_id)
        self.num_bytes += kept.num_bytes
        kept.repeatable.CopyFrom(repeatable)
        kept.repeatable.ClearField("tokens")
        for token in repeatable.tokens:
            self._take(kept, token)

    def note_first(self, request_id: str, first: FirstToken) -> None:
        """Notes how the first token was computed."""
        if request_id in self._kept:
            self._kept[request_id].first = first

    def add(self, token: Token, now_s: float) -> None:
        """Takes the next token of an output, if that is kept. Makes room by dropping the answer that ended first, or
        the oldest one."""
        kept = self._kept.get(token.request_id)
        if kept is None:
            return
        self._take(kept, token)
        if token.finish_reason != NOT_FINISHED:
            self._end(kept, now_s)
        while self.num_bytes > self._max_bytes:
            self._drop(self._kept[next(iter(self._ended or self._kept))])

    def settle(self, request_id: str, now_s: float) -> None:
        """Ends an answer that is in the ledger."""
        kept = self._kept.get(request_id)
        if kept is not None:
            kept.is_settled = True
            self._end(kept, now_s)

    def find(self, key: bytes) -> list[KeptAnswer]:
        """The answers that are kept under a key."""
        return [
            KeptAnswer(
                request_id=kept.request_id,
                repeatable=kept.repeatable,
                num_tokens=len(kept.tokens),
                is_settled=kept.is_settled,
            )
            for kept in map(self._kept.__getitem__, self._by_key.get(key, ()))
            if kept.first is not None
        ]

    def adopt(self, request_id: str, gateway_id: str) -> Kept:
        """The answer, which another gateway has from now on. Raises NotFound."""
        kept = self._kept.get(request_id)
        if kept is None:
            raise NotFound("this answer is kept no longer")
        kept.gateway_id, kept.left_s = gateway_id, None
        return kept

    def owner(self, request_id: str) -> str | None:
        """The gateway that has the answer; None if it is not kept."""
        kept = self._kept.get(request_id)
        return None if kept is None else kept.gateway_id

    def drop(self, request_id: str) -> None:
        """Drops an answer that has not ended, because it is given up."""
        kept = self._kept.get(request_id)
        if kept is not None and kept.ended_s is None:
            self._drop(kept)

    def leave(self, gateway_id: str, now_s: float) -> None:
        """Notes that a gateway has gone."""
        for kept in self._kept.values():
            if kept.gateway_id == gateway_id:
                kept.left_s = now_s

    def expire(self, now_s: float) -> None:
        """Drops what has been kept for long enough."""
        for kept in [kept for kept in self._kept.values() if self._is_over(kept, now_s)]:
            self._drop(kept)

    def _is_over(self, kept: Kept, now_s: float) -> bool:
        since_s = kept.left_s if kept.ended_s is None else kept.ended_s
        return since_s is not None and now_s - since_s > self.keep_s

    def _take(self, kept: Kept, token: Token) -> None:
        num_bytes = token.ByteSize() + _TOKEN_BYTES
        kept.tokens.append(token)
        kept.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _end(self, kept: Kept, now_s: float) -> None:
        if kept.ended_s is None:
            kept.ended_s = now_s
            self._ended[kept.request_id] = None

    def _drop(self, kept: Kept) -> None:
        del self._kept[kept.request_id]
        self._ended.pop(kept.request_id, None)
        self.num_bytes -= kept.num_bytes
        same_key = self._by_key[kept.repeatable.key]
        same_key.remove(kept.request_id)
        if not same_key:
            del self._by_key[kept.repeatable.key]
