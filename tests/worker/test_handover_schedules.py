"""Hand-overs of what is missing under random schedules: no wrong block, none leaked, and all of it ends.

`HANDOVER_SCHEDULES=100000 pytest --timeout 3600` runs more of them: 7 ms of processor each.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from functools import partial

import pytest

from halfmoon.engine.kv_memory.kv_watch import KVWatch
from halfmoon.engine.request import EngineRequest
from halfmoon.errors import HalfmoonError
from halfmoon.kv import frame_plan
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame import plan_frames
from tests.worker.handover_world import LAYOUT, VOCABULARY, Handover, Node, Truth, keys_of, sampling

NUM_SCHEDULES = int(os.environ.get("HANDOVER_SCHEDULES", "1000"))
PARTS = 4
SALTS = (b"", b"", b"", b"salt")
EXACT = (Codec.RAW, Codec.LZ4)
LOSSY = (Codec.RAW, Codec.INT8)


@pytest.fixture(autouse=True)
def _several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_plan, "MIN_FRAME_BYTES", 1)
    monkeypatch.setattr(frame_plan, "MIN_FRAME_TOKENS", 1)
    most_bytes = 3 * LAYOUT.token_layer_bytes
    monkeypatch.setattr(frame_plan, "plan_frames", partial(plan_frames, max_payload_bytes=most_bytes))
    monkeypatch.setattr(KVWatch, "_frame_layers", lambda watch, num_tokens: 1)


class Schedule:
    """A few prompts with common prefixes, handed over at once between up to four small workers, in a drawn order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.truth = Truth()
        self.nodes = [Node(rng, self.truth, rng.choice((8, 12, 20, 32))) for _ in range(rng.choice((2, 2, 3, 4)))]
        self.num_prefill = rng.randrange(1, len(self.nodes))
        self.is_lossy = rng.random() < 0.2  # int8 for all, as configured
        for node in self.nodes:
            node.least_tolerance = 1.5 if self.is_lossy else 0.0
        self.haste = rng.choice((0.01, 0.03, 0.3))  # how soon the next prompt comes
        self.trouble = rng.choice((0.0, 0.01, 0.03))
        stem = [rng.randrange(VOCABULARY) for _ in range(24)]
        self.prompts = [
            (rng.choice(SALTS), (*stem[: rng.randrange(4, 24)], *rng.choices(range(VOCABULARY), k=rng.randrange(1, 5))))
            for _ in range(rng.randrange(1, 4))
        ]
        self.waiting = [(*rng.choice(self.prompts), rng.randrange(1, 7), 0) for _ in range(rng.randrange(1, 9))]
        self.running: list[tuple[Handover, int]] = []
        self.ended: list[Handover] = []
        self.num_made = 0
        self.num_held = 0

    def run(self) -> None:
        """Draws until the end; the last rounds are orderly."""
        for round_number in range(20_000):
            is_orderly = round_number > 400
            if not self.waiting and not self.running and not any(node.has_work for node in self.nodes):
                break
            self._act(is_orderly=is_orderly)
        else:
            raise AssertionError("it never ends")
        self._check()

    def _act(self, *, is_orderly: bool) -> None:
        rng = self.rng
        if self.waiting and (rng.random() < self.haste or not self.running):
            self._begin(*self.waiting.pop())
        busy = [node for node in self.nodes if node.has_work]
        if busy and (rng.random() < 0.6 or not self.running):
            rng.choice(busy).act()
        elif self.running:
            one, _ = rng.choice(self.running)
            one.act()
            if not is_orderly and rng.random() < self.trouble:
                rng.choice((one.end_sending, one.cancel_prefill, one.cancel_decode, one.lose_decode))()
            if one.is_over:
                self._reap()
        if not is_orderly and rng.random() < self.trouble:
            node = rng.choice(self.nodes)
            node.calls.append(rng.choice((partial(self._forget, node), partial(self._churn, node))))

    def _begin(self, salt: bytes, prompt: tuple[int, ...], max_tokens: int, num_failed: int) -> None:
        prefill, decode = (
            self.rng.choice(self.nodes[: self.num_prefill]),
            self.rng.choice(self.nodes[self.num_prefill :]),
        )
        self.num_made += 1
        request = EngineRequest(f"r{self.num_made}", prompt, sampling(max_tokens), tenant_salt=salt)
        is_degraded = not self.is_lossy and self.rng.random() < 0.2
        codecs = LOSSY if is_degraded or self.is_lossy else EXACT
        one = Handover(self.rng, request, prefill, decode, codecs, is_degraded=is_degraded)
        self.running.append((one, num_failed))

    def _forget(self, node: Node) -> None:
        """Its cache is emptied."""
        node.core.forget_prefixes()

    def _churn(self, node: Node) -> None:
        """Something else runs there, which takes blocks."""
        self.num_made += 1
        prompt = tuple(self.rng.choices(range(VOCABULARY), k=self.rng.randrange(1, 20)))
        name = f"churn{self.num_made}"
        node.on_output[name] = lambda output: None
        self.prompts.append((b"", prompt))
        with suppress(HalfmoonError):  # it may be longer than this worker's memory
            node.core.add(EngineRequest(name, prompt, sampling(self.rng.randrange(1, 8))))

    def _reap(self) -> None:
        """Hand-overs that are over leave; those that failed may be repeated elsewhere."""
        for one, num_failed in [pair for pair in self.running if pair[0].is_over]:
            self.running.remove((one, num_failed))
            self.ended.append(one)
            self.num_held += one.num_held
            if not one.is_done and num_failed < 2:
                request = one.request
                again = request.tenant_salt, request.prompt_token_ids, request.sampling.max_tokens, num_failed + 1
                self.waiting.append(again)

    def _check(self) -> None:
        tokens_of = {}
        for salt, prompt in self.prompts:
            answer: list[int] = []
            for _ in range(8):
                answer.append(self.truth.next_token(salt, [*prompt, *answer]))
            tokens_of.update(keys_of(salt, [*prompt, *answer]))
            for one in self.ended:
                if (one.request.tenant_salt, one.request.prompt_token_ids) == (salt, prompt):
                    assert one.tokens == answer[: len(one.tokens)], "a wrong token"
                    whole = len(one.tokens) == one.request.sampling.max_tokens
                    assert whole or not one.is_done or one.request.request_id in one.decode.cancelled, "no whole answer"
        for node in self.nodes:
            stats = node.core.stats()
            assert stats.num_free_blocks == stats.num_blocks, "a block leaked"
            assert (stats.num_held, stats.num_reserved, stats.num_running, stats.num_waiting) == (0, 0, 0, 0)
            node.core.check_integrity()
            node.check_cache(tokens_of)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_schedule_ends_with_every_block_right(part: int) -> None:
    num_done = num_held = 0
    for number in range(part, NUM_SCHEDULES, PARTS):
        try:
            schedule = Schedule(random.Random(number))
            schedule.run()
        except Exception as error:
            raise AssertionError(f"schedule {number}: {error}") from error
        num_done += sum(one.is_done for one in schedule.ended)
        num_held += schedule.num_held
    assert num_done > NUM_SCHEDULES // PARTS
    assert num_held > NUM_SCHEDULES // PARTS, "many find a part of their prompt there"
