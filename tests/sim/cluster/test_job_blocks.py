"""What jobs hold of a simulated worker's memory: it adds up with what is free, and all of it comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.sim.cluster.job import Job
from halfmoon.sim.cluster.job_blocks import JobBlocks
from halfmoon.sim.cluster.kv_memory import KvMemory

PAGE, UNIT_PAGES, NUM_PAGES = 16, 2, 24


def memory() -> tuple[KvMemory, JobBlocks]:
    kv = KvMemory(NUM_PAGES, UNIT_PAGES, is_cache=True)
    return kv, JobBlocks(kv, PAGE)


def job(prompt: int, *units: int, index: int = 0) -> Job:
    return Job(index, 0.0, prompt, 9, list(units))


def computed(pages: JobBlocks, one: Job) -> Job:
    assert pages.admit(one)
    pages.make_known(one, one.target)
    return one


def test_what_another_job_computed_is_shared_but_for_the_last_token() -> None:
    kv, pages = memory()
    computed(pages, job(64, 1, 2))
    second = job(64, 1, 2, index=1)
    assert pages.admit(second)
    assert (second.cached_units, second.pages, second.computed) == ([1], 2, 32)
    assert kv.free == NUM_PAGES - 4 - 2
    assert kv.peak_pages == 6


def test_a_job_that_finds_too_little_changes_nothing() -> None:
    kv, pages = memory()
    computed(pages, job(64, 1, 2))
    large = job(PAGE * NUM_PAGES + 1, 1, 2, index=1)
    assert not pages.admit(large)
    assert (kv.available, large.pages, large.cached_units) == (NUM_PAGES - 4, 0, [])


def test_the_page_of_the_next_token_is_taken_with_its_step() -> None:
    kv, pages = memory()
    for prompt, num_kept in ((2 * PAGE, 2), (2 * PAGE - 1, 2), (2 * PAGE + 1, 3)):
        before, one = kv.free, job(prompt)
        pages.reserve(one, pages.num_for(one.target + 1))
        pages.receive(one)
        assert before - kv.free == num_kept
        one.join_length = one.target + 1
        pages.leave(one)
        assert kv.free == before


@given(st.lists(st.tuples(st.sampled_from(["admit", "reserve", "end"]), st.integers(0, 5), st.integers(1, 200))))
def test_what_is_held_and_what_is_free_are_all_pages(actions: list[tuple[str, int, int]]) -> None:
    kv, pages = memory()
    here: dict[int, Job] = {}
    for action, name, prompt in actions:
        if action == "end" and name in here:
            one = here.pop(name)
            (pages.unreserve if one.reserved else pages.release)(one)
        elif action != "end" and name not in here:
            one = Job(name, 0.0, prompt, 9, list(range(name % 2, prompt // (PAGE * UNIT_PAGES))))
            if action == "admit" and pages.admit(one):
                here[name] = one
                pages.make_known(one, prompt - prompt % 7)
            elif action == "reserve" and pages.num_for(prompt + 1) <= kv.available:
                pages.reserve(one, pages.num_for(prompt + 1))
                here[name] = one
        shared = {unit for one in here.values() for unit in one.cached_units}
        held = sum(one.pages + one.reserved for one in here.values()) + UNIT_PAGES * len(shared)
        assert kv.available == NUM_PAGES - held
        assert held <= kv.peak_pages <= NUM_PAGES
