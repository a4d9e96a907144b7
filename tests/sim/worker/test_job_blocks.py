"""What jobs hold of a simulated worker's memory: it adds up with what is free, and all of it comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.job_blocks import JobBlocks
from halfmoon.sim.worker.kv_memory import KvMemory

PAGE, UNIT_PAGES, NUM_PAGES = 16, 2, 24


def memory() -> tuple[KvMemory, JobBlocks]:
    kv = KvMemory(NUM_PAGES, UNIT_PAGES, is_cache=True)
    return kv, JobBlocks(kv, PAGE)


def job(prompt: int, *prefix_blocks: int, index: int = 0) -> Job:
    return Job(index, 0.0, prompt, 9, list(prefix_blocks))


def computed(blocks: JobBlocks, one: Job) -> Job:
    assert blocks.admit(one)
    blocks.make_known(one, one.target)
    return one


def test_what_another_job_computed_is_shared_but_for_the_last_token() -> None:
    kv, blocks = memory()
    computed(blocks, job(64, 1, 2))
    second = job(64, 1, 2, index=1)
    assert blocks.admit(second)
    assert (second.cached_blocks, second.num_blocks, second.computed) == ([1], 2, 32)
    assert kv.free == NUM_PAGES - 4 - 2
    assert kv.peak_blocks == 6


def test_a_job_that_finds_too_little_changes_nothing() -> None:
    kv, blocks = memory()
    computed(blocks, job(64, 1, 2))
    large = job(PAGE * NUM_PAGES + 1, 1, 2, index=1)
    assert not blocks.admit(large)
    assert (kv.available, large.num_blocks, large.cached_blocks) == (NUM_PAGES - 4, 0, [])


def test_the_page_of_the_next_token_is_taken_with_its_step() -> None:
    kv, blocks = memory()
    for prompt, num_kept in ((2 * PAGE, 2), (2 * PAGE - 1, 2), (2 * PAGE + 1, 3)):
        before, one = kv.free, job(prompt)
        assert blocks.reserve(one)
        blocks.receive(one)
        assert before - kv.free == num_kept
        one.join_length = one.target + 1
        blocks.leave(one)
        assert kv.free == before


@given(
    st.lists(st.tuples(st.sampled_from(["admit", "reserve", "receive", "end"]), st.integers(0, 5), st.integers(1, 200)))
)
def test_what_is_held_and_what_is_free_are_all_pages(actions: list[tuple[str, int, int]]) -> None:
    kv, blocks = memory()
    here: dict[int, Job] = {}
    for action, name, prompt in actions:
        if action == "end" and name in here:
            one = here.pop(name)
            (blocks.unreserve if one.reserved_blocks else blocks.release)(one)
        elif action in ("admit", "reserve") and name not in here:
            one = Job(name, 0.0, prompt, 9, list(range(name % 2, prompt // (PAGE * UNIT_PAGES))))
            if action == "admit" and blocks.admit(one):
                here[name] = one
                blocks.make_known(one, prompt - prompt % 7)
            elif action == "reserve" and blocks.reserve(one):
                here[name] = one
        elif action == "receive" and name in here and here[name].reserved_blocks:
            one = here[name]
            num_before = len(one.held_blocks)
            blocks.receive(one)
            one.num_blocks -= one.target % PAGE == 0  # given back until the next token's step
            assert one.num_known_blocks >= num_before
        shared = {block_id for one in here.values() for block_id in one.cached_blocks + one.held_blocks}
        held = sum(one.num_blocks + one.reserved_blocks for one in here.values()) + UNIT_PAGES * len(shared)
        assert kv.available == NUM_PAGES - held
        assert held <= kv.peak_blocks <= NUM_PAGES
