"""A small cluster that hands over: real engines without a model, real ends of transfers, links and shells simulated.

Every cell of KV has a value that follows from its tokens, tenant, layer and position. A freed block is poisoned.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmoon.engine.engine_core import EngineCore, Step
from halfmoon.engine.kv_memory.kv_access import KVAccess, NotWritten
from halfmoon.engine.request import EngineRequest, FinishReason, SampledToken, SamplingParams, TokenOutput
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.engine.scheduling.sequence import Sequence as EngineSequence
from halfmoon.errors import Cancelled, HalfmoonError, NotFound
from halfmoon.kv.codec import Codec, decode, encode
from halfmoon.kv.frame import Frame, FrameKind, KVRange, decode_frame, encode_frame
from halfmoon.kv.frame_plan import FramePlan, Written
from halfmoon.kv.keys import block_keys, root_key
from halfmoon.kv.kv_layout import KVBytes, KVLayout, KVSlice
from halfmoon.kv.negotiation import Acceptance, encode_open
from halfmoon.kv.receiver import Commit, Reserve, TransferReceiver, Write
from halfmoon.kv.sender import TransferSending

LAYOUT = KVLayout(2, 1, 16, "float16", 4)
VOCABULARY = 50
_MASK = (1 << 64) - 1
_LOSSY = 1.5  # what int8 may be wrong by, once or twice over
_COMMIT = struct.Struct("<I?")  # first token, is_private

Values = NDArray[np.float16]


class Truth:
    """What the model computes: of each prefix its KV and its next token."""

    def __init__(self) -> None:
        self._states: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
        self._values: dict[tuple[bytes, tuple[int, ...]], Values] = {}

    def values(self, salt: bytes, tokens: Sequence[int]) -> Values:
        """KV of all tokens, [layers, K and V, heads, tokens, head_dim]."""
        name = salt, tuple(tokens)
        known = self._values.get(name)
        if known is None:
            numbers = [
                [[(state >> 16 * layer + 8 * kv + 24) % 255 - 127 for state in self._state(*name)] for kv in range(2)]
                for layer in range(LAYOUT.num_layers)
            ]
            known = np.array(numbers, np.float16)[:, :, None, :, None].repeat(LAYOUT.head_dim, axis=4)
            self._values[name] = known
        return known

    def _state(self, salt: bytes, tokens: tuple[int, ...]) -> list[int]:
        """One number for each prefix of the tokens."""
        known = self._states.get((salt, tokens))
        if known is None:
            state, known = len(salt) + 1, []
            for token in tokens:
                state = (state * 6364136223846793005 + (token + 1) * 1442695040888963407) & _MASK
                known.append(state)
            self._states[salt, tokens] = known
        return known

    def next_token(self, salt: bytes, tokens: Sequence[int]) -> int:
        return self._state(salt, tuple(tokens))[-1] % VOCABULARY


class Memory:
    """KV by block; implements `KVMemory`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        shape = num_blocks, LAYOUT.block_tokens, LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, LAYOUT.head_dim
        self.cells = np.full(shape, np.nan, np.float16)

    def values(self, blocks: Sequence[int], start: int, num_tokens: int) -> Values:
        """[layers, K and V, heads, tokens, head_dim]."""
        return self.cells[self._at(blocks, start, num_tokens)].transpose(1, 2, 3, 0, 4)

    def read(self, blocks: Sequence[int], part: KVSlice, out: object = None) -> memoryview:
        values = self.values(blocks, part.token_start, part.num_tokens)[part.layers]
        return memoryview(np.ascontiguousarray(values).tobytes())

    def write(self, blocks: Sequence[int], part: KVSlice, payload: Any) -> None:
        values = np.frombuffer(payload, np.float16).reshape(LAYOUT.shape(part.num_layers, part.num_tokens))
        where = self._at(blocks, part.token_start, part.num_tokens)
        self.cells[(*where, part.layers)] = values.transpose(3, 0, 1, 2, 4)

    def _at(self, blocks: Sequence[int], start: int, num_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens = np.arange(start, start + num_tokens)
        return np.array(blocks)[tokens // LAYOUT.block_tokens], tokens % LAYOUT.block_tokens


class PoisoningPool(BlockPool):
    """Nothing is left in a block from its last use."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory.num_blocks)
        self._memory = memory

    def allocate(self, num_blocks: int, near: int | None = None, room: int = 0) -> list[int]:
        blocks = super().allocate(num_blocks, near, room)
        self._memory.cells[blocks] = np.nan
        return blocks


class Node:
    """One worker: its engine, which is called between steps, and what is written into its memory."""

    def __init__(self, rng: random.Random, truth: Truth, num_blocks: int) -> None:
        self.truth = truth
        self.memory = Memory(num_blocks)
        self.access = KVAccess(self.memory)
        limits = RequestLimits(VOCABULARY, 64, num_blocks, LAYOUT)
        steps = SchedulerLimits(rng.choice((6, 16, 64)), rng.choice((3, 8)), rng.choice((3, 8)))
        self.core = EngineCore(
            PoisoningPool(self.memory), limits, steps, partial(root_key, "model", LAYOUT), _finish_reason
        )
        self.calls: deque[Callable[[], None]] = deque()
        self.on_output: dict[str, Callable[[TokenOutput], None]] = {}
        self.tolerance: dict[str, float] = {}  # of requests whose KV came lossy
        self.least_tolerance = 0.0
        self.cancelled: set[str] = set()  # what the worker refuses
        self._step: Step | None = None
        self._layer = 0

    @property
    def has_work(self) -> bool:
        return bool(self.calls) or self._step is not None or self.core.has_work()

    def act(self) -> None:
        """Does the next piece of work: a call, or one layer of a step."""
        if self._step is None and self.calls:
            self.calls.popleft()()
        elif self._step is None and self.core.has_work():
            self._step, self._layer = self.core.begin_step(), 0
            for item in self._step.schedule.scheduled:
                self.check(item.sequence, item.sequence.num_computed)
            if not self._step.schedule.scheduled:
                self._end_step(self._step)
        elif self._step is not None:
            self._compute_layer(self._step)

    def check(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Asserts that what attention is about to read is right."""
        if num_tokens:
            here = self.memory.values(sequence.blocks, 0, num_tokens)
            right = self.truth.values(sequence.request.tenant_salt, sequence.token_ids[:num_tokens])
            assert is_right(here, right, self.tolerance.get(sequence.request_id, self.least_tolerance)), (
                "a sequence reads wrong KV"
            )

    def check_cache(self, tokens_of: dict[bytes, tuple[bytes, tuple[int, ...]]]) -> None:
        """Asserts that every block that others may find is the one that its key names."""
        for key, block in self.core._cache._blocks.items():
            salt, tokens = tokens_of[key]
            right = self.truth.values(salt, tokens)[:, :, :, -LAYOUT.block_tokens :]
            here = self.memory.values([block], 0, LAYOUT.block_tokens)
            assert is_right(here, right, self.least_tolerance), "a wrong block can be found"

    def _compute_layer(self, step: Step) -> None:
        for item in step.schedule.scheduled:
            sequence, start, end = (
                item.sequence,
                item.sequence.num_computed,
                item.sequence.num_computed + item.num_tokens,
            )
            values = self.truth.values(sequence.request.tenant_salt, sequence.token_ids[:end])[:, :, :, start:]
            part = KVSlice(self._layer, self._layer + 1, start, item.num_tokens)
            self.memory.write(sequence.blocks, part, np.ascontiguousarray(values[part.layers]))
        self._layer += 1
        if step.watch is not None:
            step.watch.notify(self._layer)
        if self._layer == LAYOUT.num_layers:
            self._end_step(step)

    def _end_step(self, step: Step) -> None:
        self._step = None
        drawn = [
            SampledToken(self.truth.next_token(item.sequence.request.tenant_salt, item.sequence.token_ids))
            for item in step.schedule.scheduled
            if item.samples
        ]
        for output in self.core.end_step(step, drawn).outputs:
            self.on_output[output.request_id](output)


def is_right(here: Values, right: Values, tolerance: float) -> bool:
    return np.array_equal(here, right) if not tolerance else bool((np.abs(here - right) <= tolerance).all())


def _finish_reason(sequence: EngineSequence) -> FinishReason | None:
    return sequence.finish_reason(frozenset())


class Handover:
    """One attempt of a request: both ends of its transfer, and what the two workers' shells do about it.

    Each `*_next` method does one thing that may happen next, in the order in which the real shells do it.
    """

    def __init__(
        self,
        rng: random.Random,
        request: EngineRequest,
        prefill: Node,
        decode: Node,
        codecs: Sequence[Codec],
        *,
        is_degraded: bool,
    ) -> None:
        self.rng = rng
        self.request = request
        self.prefill, self.decode = prefill, decode
        self.codecs = codecs
        self.is_degraded = is_degraded
        self.tokens: list[int] = []  # of the answer
        self.has_failed = False
        self.is_done = False
        self._is_lossy = False
        self._forth: deque[bytes | None] = deque()  # None: the stream ends
        self._back: deque[bytes | None] = deque()
        # the sending end
        self._sending = TransferSending(LAYOUT, rng.randbytes(16))
        self._has_ended = False
        self._first: TokenOutput | None = None
        self._plan: FramePlan | None = None
        self._written = Written()
        self._has_news = False
        self._is_dropped = False
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        self._whole = KVRange(0, LAYOUT.num_layers, 0, LAYOUT.num_kv_heads, 0, num_tokens)
        self._send(self._sending.open(self._whole, encode_open((), b""), skips_held=True))
        # the receiving end
        self._receiver = TransferReceiver(LAYOUT)
        self._is_busy = False  # with a call of the engine
        self._has_closed = False
        self._is_reserved = False
        self._is_reservation_dropped = False
        self._uncredited: list[int] = []
        self.num_held = 0

    @property
    def is_over(self) -> bool:
        return self._has_ended and self._has_closed

    # What the sending worker does.

    def act(self) -> None:
        """Does one thing of those that may come next, at either end."""
        chances = [self.send_next]
        if self._back and not self._has_ended:
            chances.append(self.hear_next)
        if (self._forth or self._is_reservation_dropped) and not self._has_closed and not self._is_busy:
            chances.append(self.receive_next)
        self.rng.choice(chances)()

    def send_next(self) -> None:
        """Sends a frame, if one is due; or commits."""
        if self._has_ended or self._plan is None:
            return
        if self._is_dropped:
            self.end_sending()
        elif not self._plan.is_done:
            self._send_data(self._plan)
        elif self._first is not None and self._sending.state == "opened":
            is_private = self.is_degraded and self._is_lossy
            self._send(self._sending.commit(_COMMIT.pack(self._first.token_id, is_private)))

    def hear_next(self) -> None:
        """Takes the next answer."""
        if self._has_ended or not self._back:
            return
        answer = self._back.popleft()
        if answer is None:
            self.end_sending()
            return
        self._sending.handle(decode_frame(answer))
        if self._sending.state == "opened" and self._plan is None:
            if self.request.request_id in self.prefill.cancelled:
                self.end_sending()
                return
            self._plan = FramePlan(LAYOUT, self._whole.num_tokens, self._sending.held_tokens)
            self.prefill.calls.append(self._add)
        elif self._sending.state == "done":
            self.is_done = True
            self.end_sending()

    def end_sending(self) -> None:
        """The call ends, however: what is still under way may be lost, and the prompt is dropped here."""
        if self._has_ended:
            return
        self._has_ended = True
        if not self.is_done:
            while self._forth and self.rng.random() < 0.5:
                self._forth.pop()
        self._forth.append(None)
        self.prefill.calls.append(lambda: self._cancel(self.prefill, ".p"))

    def cancel_prefill(self) -> None:
        """The gateway cancels at the prefill worker."""
        self.prefill.cancelled.add(self.request.request_id)
        self.prefill.calls.append(lambda: self._cancel(self.prefill, ".p"))

    def _send(self, frame: Frame) -> None:
        self._forth.append(encode_frame(frame))

    def _add(self) -> None:
        if self._has_ended:
            return
        request = self._named(".p", prefill_only=True, held_tokens=self._sending.held_tokens)
        order, num_whole = None, (self._whole.num_tokens - 1) // LAYOUT.block_tokens
        if num_whole and self.rng.random() < 0.3:
            num_blocks = self.rng.randrange(1, num_whole + 1)
            order = RestoreOrder(num_blocks, self.rng.randrange(num_blocks), lambda *_: None)
        self.prefill.on_output[request.request_id] = self._note_first
        try:
            self.prefill.core.add(request, self._on_kv, order)
        except HalfmoonError:
            self.end_sending()
            return
        for block in range(order.fence, order.num_blocks) if order else ():
            self.prefill.calls.append(partial(self._load, block))

    def _load(self, block: int) -> None:
        """A block comes from a store, or does not."""
        core, name = self.prefill.core, self.request.request_id + ".p"
        if self.rng.random() < 0.2:
            core.note_loaded(name, (), (block,))
            return
        end = (block + 1) * LAYOUT.block_tokens
        values = self.prefill.truth.values(self.request.tenant_salt, self._prompt[:end])
        try:
            sequence = core.find(name)
            if sequence.state == "waiting" and not sequence.blocks and sequence.restore is not None:
                self.prefill.calls.append(partial(self._load, block))  # it has no room yet
                return
            payload = np.ascontiguousarray(values[:, :, :, -LAYOUT.block_tokens :])
            self.prefill.access.load(sequence, block, LAYOUT, payload)  # type: ignore[arg-type]
        except NotFound:
            return
        core.note_loaded(name, (block,))

    def _note_first(self, output: TokenOutput) -> None:
        self._first = output
        if output.finish_reason is not None:
            self.tokens, self.is_done = [output.token_id], True
            self.end_sending()

    def _on_kv(self, written: Written | None) -> None:
        if written is None:
            self._is_dropped = True
        else:
            self._written, self._has_news = written, True

    def _send_data(self, plan: FramePlan) -> None:
        if not self._has_news or (part := plan.next(self._written)) is None:
            return
        codec = self.rng.choice(self.codecs)
        try:
            raw = self.prefill.access.read(self.prefill.core.find(self.request.request_id + ".p"), part.all_heads)
        except NotWritten:
            self._has_news = False
            return
        except NotFound:
            self.end_sending()
            return
        shape = part.shape(LAYOUT)
        payload = encode(codec, decode(Codec.RAW, raw, shape, LAYOUT.dtype), LAYOUT.dtype)
        if payload.nbytes >= raw.nbytes:
            codec, payload = Codec.RAW, raw
        self._is_lossy = self._is_lossy or not codec.is_exact
        self._send(self._sending.data(part, payload, codec))
        plan.sent(part)

    # What the receiving worker does.

    def receive_next(self) -> None:
        """Takes the next message; or hears that its reservation is gone."""
        if self._has_closed or self._is_busy:
            return
        if self._forth:
            message = self._forth.popleft()
            if message is None:
                self._close()
                return
            try:
                self._carry_out(decode_frame(message))
            except (NotFound, Cancelled):
                self._close()
        elif self._is_reservation_dropped:
            self._close()

    def cancel_decode(self) -> None:
        """The gateway cancels at the decode worker."""
        self.decode.cancelled.add(self.request.request_id)
        self.decode.calls.append(lambda: self._cancel(self.decode, ".d"))

    def lose_decode(self) -> None:
        """The decode worker's end of the call breaks."""
        if not self._has_closed and not self._is_busy:
            self._close()

    def _carry_out(self, frame: Frame) -> None:
        effect = self._receiver.handle(frame)
        match effect:
            case Reserve():
                self._check_not_cancelled()
                self._is_busy = True
                self.decode.calls.append(self._reserve)
            case Write(part, payload, codec):
                self._write(part, payload, codec)
                self._uncredited.append(frame.sequence)
            case Commit(body):
                self._check_not_cancelled()
                self._is_busy = True
                self.decode.calls.append(partial(self._start, body))
        if self._uncredited and (frame.kind is FrameKind.COMMIT or self.rng.random() < 0.5):
            self._answer(self._receiver.credit(*self._uncredited))
            self._uncredited = []

    def _check_not_cancelled(self) -> None:
        if self.request.request_id in self.decode.cancelled:
            raise Cancelled("the request was cancelled")

    def _reserve(self) -> None:
        self._is_busy = False
        if self._has_closed:
            return
        request = self._named(".d")
        self.decode.on_output[request.request_id] = self._note_token
        try:
            self.num_held = self.decode.core.reserve(request, self._on_reservation)
            self._is_reserved = True
            self._check_not_cancelled()
        except HalfmoonError:
            self._close()
            return
        self.decode.check(self.decode.core.find(request.request_id), self.num_held)
        self._answer(self._receiver.accept(Acceptance("grpc", held_tokens=self.num_held)))

    def _write(self, part: KVRange, payload: KVBytes, codec: Codec) -> None:
        shape = part.shape(LAYOUT)
        values = decode(codec, payload, shape, LAYOUT.dtype)
        name = self.request.request_id + ".d"
        self.decode.access.write(self.decode.core.find(name), part.all_heads, values.data)
        if not codec.is_exact:
            self.decode.tolerance[name] = _LOSSY

    def _start(self, body: bytes) -> None:
        self._is_busy = False
        if self._has_closed:
            return
        first_token_id, is_private = _COMMIT.unpack(body)
        name = self.request.request_id + ".d"
        try:
            sequence = self.decode.core.find_in("reserved", name)
            self.tokens = [first_token_id]
            self.decode.core.start(name, first_token_id, is_private=is_private)
        except HalfmoonError:
            self._close()
            return
        self.decode.check(sequence, sequence.num_computed)
        self._is_reserved = False
        self._answer(self._receiver.done())
        self._has_closed = True

    def _note_token(self, output: TokenOutput) -> None:
        self.tokens.append(output.token_id)

    def _on_reservation(self, written: Written | None) -> None:
        self._is_reservation_dropped = written is None

    def _answer(self, frame: Frame) -> None:
        self._back.append(encode_frame(frame))

    def _close(self) -> None:
        """The stream ends without a start: what was reserved is freed."""
        self._has_closed = True
        self._back.append(None)
        if self._is_reserved:
            self.decode.calls.append(lambda: self._cancel(self.decode, ".d"))

    # Both.

    @property
    def _prompt(self) -> tuple[int, ...]:
        return self.request.prompt_token_ids + self.request.output_token_ids

    def _cancel(self, node: Node, end: str) -> None:
        node.core.cancel(self.request.request_id + end)

    def _named(self, end: str, *, prefill_only: bool = False, held_tokens: int = 0) -> EngineRequest:
        """The request as one of the two engines knows it: a worker may be both ends."""
        one = self.request
        return EngineRequest(
            one.request_id + end,
            one.prompt_token_ids,
            one.sampling,
            one.output_token_ids,
            prefill_only=prefill_only,
            held_tokens=held_tokens,
            tenant_salt=one.tenant_salt,
        )


def keys_of(salt: bytes, tokens: Sequence[int]) -> dict[bytes, tuple[bytes, tuple[int, ...]]]:
    """The prefix that each key of the tokens' blocks names."""
    keys = block_keys(root_key("model", LAYOUT, salt), tokens, LAYOUT.block_tokens)
    return {key: (salt, tuple(tokens[: (n + 1) * LAYOUT.block_tokens])) for n, key in enumerate(keys)}


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
