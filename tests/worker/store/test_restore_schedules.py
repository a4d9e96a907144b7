"""A restore from several sources under 100,000 random schedules: no wrong block, none lost, and it always ends."""

from __future__ import annotations

import random

import pytest

from halfmoon.policy.models.latency import PrefillModel
from halfmoon.worker.store.block_bits import span
from halfmoon.worker.store.restore_progress import RestoreProgress
from halfmoon.worker.store.source_progress import SourceProgress

NUM_SCHEDULES = 100_000
BLOCK_TOKENS = 4
PARTS = 10


class Schedule:
    """One restore whose sources, loads and steps do whatever may happen, in a drawn order.

    `content` is what is in each block of the request's memory: its own number once it is right. The engine's law stands
    beside it: blocks that are not awaited are computed, from the front.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.num = rng.randrange(1, 9)
        self.num_here = rng.randrange(self.num)
        held = [
            {block for block in range(self.num_here, self.num) if rng.random() < rng.choice((0.4, 1.0))}
            for _ in range(rng.randrange(1, 4))
        ]
        while any(all(block not in one for one in held) for block in range(self.num_here, self.num)):
            held[rng.randrange(len(held))] = set(range(self.num_here, self.num))
        self.sources = [SourceProgress(one, rng.choice((0.001, 0.05, 0.5)), rng.choice((0.0, 0.3))) for one in held]
        model = PrefillModel(0.001, rng.choice((0.0001, 0.01, 0.2)), 0.0)
        self.progress = RestoreProgress(self.num, BLOCK_TOKENS, 2 * BLOCK_TOKENS, model, self.sources)
        load_s, queue_s = self.progress.load_s(span(self.num_here, self.num), 0.0)
        self.progress.begin(self.num_here, self.progress.costs(self.num_here * BLOCK_TOKENS, load_s, queue_s))
        self.progress.advance(self.num_here * BLOCK_TOKENS, 0.0)
        self.num_done = self.num_here
        self.awaited = set(range(self.progress.fence, self.num))
        self.given_up: set[int] = set()
        self.loaded: set[int] = set()
        self.content: dict[int, int | None] = {block: block for block in range(self.num_here)}
        self.loads: list[tuple[int, list[int]]] = []

    def run(self) -> None:
        """Draws until the end; the last rounds are orderly, as deadlines make them."""
        for round_number in range(400):
            if self.num_done == self.num:
                break
            self._act(is_orderly=round_number > 60)
        assert self.num_done == self.num, "it never ends"
        assert self.content == {block: block for block in range(self.num)}, "a block is wrong or lost"

    def _act(self, *, is_orderly: bool) -> None:
        self.now_s += self.rng.choice((0.0, 0.01, 0.3, 1.0))
        for number in self.progress.replaceable(self.now_s):
            self._drop(number)
            for load in [load for load in self.loads if load[0] == number]:
                self._end(load, 0)
        self._claim()
        is_behind = self.num_done < self.progress.fence
        assert self.loads or is_behind or self.progress.is_over, "nobody asks for what is left"
        if self.loads and (is_orderly or self.rng.random() < 0.5):
            load = self.rng.choice(self.loads)
            if not is_orderly and self.rng.random() < 0.15:  # the source fails
                self._drop(load[0])
                self._end(load, 0)
            else:  # it delivers all, some, or none: evicted meanwhile
                self._end(load, self.rng.choice((len(load[1]), self.rng.randrange(len(load[1]) + 1))))
        if self.rng.random() < 0.5 or is_orderly:
            self._compute()
        self._move_fence()

    def _claim(self) -> None:
        order = list(range(len(self.sources)))
        self.rng.shuffle(order)
        for number in order:
            if sum(load[0] == number for load in self.loads) < 2:
                blocks = self.progress.claim(self.now_s, number)
                under_way = {block for _, others in self.loads for block in others}
                assert not under_way & set(blocks), "a block is under way twice"
                assert not self.loaded & set(blocks), "a block is loaded again"
                if blocks:
                    self.loads.append((number, blocks))

    def _end(self, load: tuple[int, list[int]], num_delivered: int) -> None:
        """A load ends: what was delivered is written where it is still awaited, as the engine does."""
        number, blocks = load
        self.loads.remove(load)
        came: list[int] = []
        for block in blocks[:num_delivered]:
            if block not in self.awaited:  # the engine no longer needs it: nothing of this load counts
                came = []
                break
            assert self.content.get(block) is None or block in self.loaded
            self.content[block] = block
            came.append(block)
        for block in blocks:
            if block not in came and block in self.awaited:
                self.content.pop(block, None)  # unverified bytes
        self.progress.came(came, self.now_s, number)
        missed = [block for block in blocks if block not in came]
        if came and missed and self.rng.random() < 0.5:  # the holder serves a part at a time
            self.progress.left_out(missed, number)
            self._note(came, [])
        else:
            self._note(came, self.progress.failed(missed, number))

    def _drop(self, number: int) -> None:
        if not self.sources[number].is_gone:
            self._note([], self.progress.drop(number))
        if all(source.is_gone for source in self.sources):
            self._note([], list(range(self.num)))  # as when the restore ends

    def _note(self, loaded: list[int], given_up: list[int]) -> None:
        for block in loaded:
            if block in self.awaited:
                self.awaited.remove(block)
                self.loaded.add(block)
        self.given_up.update(given_up)
        self.awaited -= self.given_up
        self._skip()

    def _skip(self) -> None:
        while self.num_done in self.loaded:
            self.num_done += 1
        self.progress.advance(self.num_done * BLOCK_TOKENS, self.now_s)

    def _compute(self) -> None:
        if self.num_done < self.num and self.num_done not in self.awaited and self.num_done not in self.loaded:
            self.content[self.num_done] = self.num_done
            self.num_done += 1
        self._skip()

    def _move_fence(self) -> None:
        fence = self.progress.wanted_fence(self.now_s)
        if fence == self.progress.fence or self.num_done == self.num:
            return
        self.progress.fence = fence = max(fence, self.num_done)
        self.awaited = set(range(fence, self.num)) - self.loaded - self.given_up


@pytest.mark.parametrize("part", range(PARTS))
def test_every_schedule_ends_with_every_block_right(part: int) -> None:
    for number in range(NUM_SCHEDULES // PARTS):
        seed = part * NUM_SCHEDULES + number
        try:
            Schedule(random.Random(seed)).run()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
