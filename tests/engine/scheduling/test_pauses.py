"""A higher class pauses a lower one's decodes, whose K and V stay in their blocks, or move out and come back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.schedule import Schedule, SchedulerLimits
from halfmoon.engine.scheduling.scheduler import Scheduler
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.scheduling.sequence_queues import SequenceQueues
from halfmoon.errors import NoCapacity

BLOCK_TOKENS = 4


class CountedCopies:
    """Keeps what would be copied: how many tokens, of at most `most` sequences."""

    def __init__(self, most: int = 99) -> None:
        self.most = most
        self.copies: dict[str, int] = {}

    def save(self, sequence: Sequence) -> bool:
        if len(self.copies) == self.most:
            return False
        self.copies[sequence.request_id] = sequence.num_computed
        return True

    def load(self, sequence: Sequence) -> None:
        num_tokens = self.copies.pop(sequence.request_id)
        assert num_tokens == sequence.num_computed
        assert num_tokens <= BLOCK_TOKENS * len(sequence.blocks)

    def forget(self, sequence: Sequence) -> None:
        self.copies.pop(sequence.request_id, None)


class World:
    """A scheduler whose steps take a second each."""

    def __init__(
        self,
        num_blocks: int = 16,
        max_running: int = 8,
        most_copies: int = 99,
        *,
        caches: bool = False,
        num_divisible: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks, num_divisible=num_divisible)
        self.cache = PrefixCache(self.pool, BLOCK_TOKENS, bytes if caches else None)
        self.copies = CountedCopies(most_copies)
        limits = SchedulerLimits(max_batch_tokens=32, max_running=max_running)
        self.scheduler = Scheduler(SequenceQueues(self.cache, BLOCK_TOKENS, limits, self.copies))
        self.now_s = 0.0
        self.num_added = 0
        self.num_computed = 0  # tokens, in all steps

    def sequence(self, prompt: int, max_tokens: int, level: int = 0, max_pause_s: float = 0.0) -> Sequence:
        self.num_added += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        name = f"r{self.num_added}"
        request = EngineRequest(
            name, tuple(range(prompt)), sampling, priority=level, class_priority=level, max_pause_s=max_pause_s
        )
        return Sequence(request, self.num_added)

    def add(self, prompt: int, max_tokens: int, level: int = 0, max_pause_s: float = 0.0) -> Sequence:
        sequence = self.sequence(prompt, max_tokens, level, max_pause_s)
        self.scheduler.queues.add(sequence)
        return sequence

    def step(self) -> Schedule:
        schedule = self.scheduler.schedule(self.now_s)
        self.now_s += 1
        for item in schedule.scheduled:
            assert item.sequence.state == "running"
            assert len(item.sequence.blocks) * BLOCK_TOKENS >= item.start + item.num_tokens
            samples = item.samples
            item.sequence.num_computed += item.num_tokens
            self.num_computed += item.num_tokens
            self.cache.insert(item.sequence)
            if samples:
                item.sequence.token_ids.append(len(item.sequence.token_ids))
                if item.sequence.num_output == item.sequence.sampling.max_tokens:
                    self.scheduler.queues.remove(item.sequence)
        self.cache.check_integrity()
        return schedule

    def run(self) -> None:
        while self.scheduler.queues.has_work():
            self.step()


def test_halved_blocks_that_give_too_little_room_leave_others_waiting() -> None:
    world = World(num_blocks=6, num_divisible=6)
    low = world.add(15, 9, level=1, max_pause_s=60)
    other = world.add(6, 6)
    world.step()
    for block in low.blocks[:3]:
        world.pool.halve(block)
    high = world.add(19, 2)  # five blocks of six
    world.run()
    assert [one.num_output for one in (low, other, high)] == [9, 6, 2]


def states(*sequences: Sequence) -> list[str]:
    return [sequence.state for sequence in sequences]


def test_a_prompt_takes_the_place_of_a_lower_class_and_gives_it_back() -> None:
    world = World(max_running=1)
    low = world.add(4, 6, level=1, max_pause_s=60)
    world.step()
    world.step()
    high = world.add(4, 3)
    world.step()
    assert states(low, high) == ["paused", "running"]
    assert low.blocks
    while states(high) == ["running"]:
        world.step()
    world.step()
    assert states(low) == ["running"]
    world.run()
    assert low.num_output == 6
    assert world.scheduler.queues.pause_counts.take() == (1, 0, 3.0)
    assert world.num_computed == 4 + 5 + 4 + 2  # nothing twice


def test_without_the_setting_a_prompt_waits_for_a_place() -> None:
    world = World(max_running=1)
    low = world.add(4, 6, level=1)
    world.step()
    high = world.add(4, 3)
    while low.state == "running":
        assert high.state == "waiting"
        world.step()


def test_blocks_move_out_when_they_are_needed_and_nothing_is_computed_again() -> None:
    world = World(num_blocks=4)
    low = world.add(8, 5, level=1, max_pause_s=60)
    world.step()
    world.step()
    high = world.add(7, 2)
    world.step()
    assert low.is_moved_out
    assert world.copies.copies == {low.request_id: 9}
    assert not low.blocks
    assert high.state == "running"
    world.run()
    assert (low.num_output, high.num_output) == (5, 2)
    assert world.num_computed == 8 + 4 + 7 + 1
    assert world.cache.num_available == 4


def test_without_room_for_a_copy_it_is_computed_again_and_still_rises() -> None:
    world = World(num_blocks=4, most_copies=0)
    low = world.add(8, 5, level=1, max_pause_s=3)
    world.step()
    world.step()
    high = [world.add(7, 2) for _ in range(20)]
    world.step()
    assert low.state == "waiting"
    assert low.pauses.is_paused
    world.run()
    assert low.num_output == 5
    assert world.scheduler.queues.pause_counts.total_s <= 3 + 2  # it waits for the one that runs
    assert all(one.num_output == 2 for one in high)


def test_a_stream_of_higher_requests_does_not_starve_a_lower_one() -> None:
    world = World(max_running=1)
    low = world.add(4, 10, level=1, max_pause_s=5)
    world.step()
    steps = 0
    while low.state != "removed":
        if not world.scheduler.queues.waiting:
            world.add(4, 2)
        world.step()
        steps += 1
        assert steps < 60
    assert low.pauses.count > 1


def test_a_growing_answer_pauses_a_lower_one_instead_of_preempting_it() -> None:
    world = World(num_blocks=4)
    high = world.add(7, 6)
    low = world.add(7, 6, level=1, max_pause_s=60)
    world.run()
    assert (high.num_output, low.num_output) == (6, 6)
    assert low.pauses.count >= 1
    assert world.num_computed == 2 * (7 + 5)


def test_a_reservation_pauses_and_those_of_the_paused_class_wait() -> None:
    world = World(max_running=1)
    low = world.add(4, 6, level=1, max_pause_s=60)
    world.step()
    high = world.sequence(4, 3)
    world.scheduler.queues.reserve(high, world.now_s)
    assert states(low) == ["paused"]
    with pytest.raises(NoCapacity):
        world.scheduler.queues.reserve(world.sequence(4, 3), world.now_s)
    world.scheduler.queues.remove(high)
    with pytest.raises(NoCapacity, match="wait"):
        world.scheduler.queues.reserve(world.sequence(4, 3, level=1, max_pause_s=60), world.now_s)
    world.step()
    assert low.state == "running"


def test_a_paused_request_can_be_cancelled_wherever_its_kv_is() -> None:
    for num_blocks in (16, 4):
        world = World(num_blocks, max_running=1)
        low = world.add(8, 5, level=1, max_pause_s=60)
        world.step()
        high = world.add(7, 2)
        world.step()
        assert low.state == "paused"
        world.scheduler.queues.remove(low)
        world.scheduler.queues.remove(high)
        assert world.cache.num_available == num_blocks
        assert not world.copies.copies
        assert not world.scheduler.queues.has_work()


@settings(max_examples=200)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 30),
            st.integers(1, 12),
            st.integers(0, 2),
            st.sampled_from([0.0, 3.0, 1e9]),
            st.integers(0, 10),
            st.booleans(),
        ),
        min_size=1,
        max_size=10,
    ),
    num_blocks=st.integers(12, 30),
    max_running=st.integers(1, 5),
    most_copies=st.sampled_from([0, 1, 99]),
    caches=st.booleans(),
)
def test_every_request_ends_and_gives_back_its_blocks(
    requests: list[tuple[int, int, int, float, int, bool]],
    num_blocks: int,
    max_running: int,
    most_copies: int,
    caches: bool,
) -> None:
    world = World(num_blocks, max_running, most_copies, caches=caches)
    coming = sorted((at, number) for number, (*_, at, _) in enumerate(requests))
    reserved: list[tuple[int, Sequence]] = []
    begun: list[Sequence] = []
    for step in range(2000):
        while coming and coming[0][0] <= step:
            _, number = coming.pop(0)
            prompt, output, level, most_s, _, is_moving = requests[number]
            sequence = world.sequence(prompt, output, level, most_s)
            if is_moving and output > 1:
                try:
                    world.scheduler.queues.reserve(sequence, world.now_s)
                except NoCapacity:
                    coming.append((step + 1, number))
                    break
                reserved.append((step + 2, sequence))
            else:
                world.scheduler.queues.add(sequence)
            begun.append(sequence)
        for at, sequence in reserved:
            if at == step:
                world.scheduler.queues.start(sequence, 0)
        reserved = [item for item in reserved if item[0] > step]
        schedule = world.step()
        assert schedule.scheduled or schedule.num_preempted or reserved or not world.scheduler.queues.has_work()
        if not (coming or reserved or world.scheduler.queues.has_work()):
            break
    else:
        raise AssertionError("some request never ends")
    assert len(begun) == len(requests)
    assert all(one.num_output == one.sampling.max_tokens for one in begun)
    assert world.cache.num_available == num_blocks
    assert not world.copies.copies
