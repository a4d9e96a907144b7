"""A restore on its way, simulated: never worse than the better single method by more than a chunk, whatever happens."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfmoon.policy.forecast.restore_plan import LayerLoads
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.worker.store.restore_progress import RestoreProgress
from halfmoon.worker.store.source_progress import SourceProgress

BLOCK_TOKENS, CHUNK_TOKENS = 64, 512
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
LOADS_AT_ONCE = 2


class Simulated:
    """A worker and a link of the given speeds; time goes on in small steps."""

    def __init__(
        self,
        progress: RestoreProgress,
        compute_s: float,
        load_s: float,
        dead_after_s: float,
        later: tuple[float, float] = (math.inf, 0.0),
    ) -> None:
        """later: from when on a block takes how long to load."""
        self.progress = progress
        self.compute_s, self.load_s, self.dead_after_s = compute_s, load_s, dead_after_s  # a block
        self.later = later
        self.loaded: set[int] = set()
        self.given_up: set[int] = set()
        self.loads: list[list[int]] = []
        self.link_free_s = 0.0
        self.num_computed = 0
        self.chunk: tuple[int, float] | None = None  # where it ends, when

    def run(self) -> float:
        """When everything is there."""
        now_s, tick_s = 0.0, min(self.compute_s, self.load_s) / 3
        self.progress.advance(0, 0.0)
        while self.num_computed < self.progress.num_blocks:
            now_s += tick_s
            self._load(now_s)
            self._compute(now_s)
            fence = self.progress.wanted_fence(now_s)
            self.progress.fence = max(fence, self.num_computed, self.chunk[0] if self.chunk else 0)
        return now_s

    def _load(self, now_s: float) -> None:
        while len(self.loads) < LOADS_AT_ONCE and (blocks := self.progress.claim(now_s)):
            assert all(self.progress.fence <= block not in self.loaded for block in blocks)
            self.link_free_s = max(self.link_free_s, now_s) if not self.loads else self.link_free_s
            self.loads.append(blocks)
        if not self.loads or now_s >= self.dead_after_s:
            return
        load_s = self.load_s if now_s < self.later[0] else self.later[1]
        if now_s >= self.link_free_s + load_s * len(self.loads[0]):
            blocks = self.loads.pop(0)
            self.link_free_s = now_s
            wanted = [block for block in blocks if block >= self.progress.fence]
            self.progress.came(wanted, now_s)
            self.loaded.update(wanted)
            self.given_up.update(set(blocks) - set(wanted))
            self.progress.failed([block for block in blocks if block not in wanted])

    def _compute(self, now_s: float) -> None:
        if self.chunk is not None and now_s >= self.chunk[1]:
            self.num_computed, self.chunk = self.chunk[0], None
        if self.chunk is None:
            while self.num_computed in self.loaded:
                self.num_computed += 1
            self.progress.advance(self.num_computed * BLOCK_TOKENS, now_s)
            if self.progress.is_over:
                self.given_up.update(range(self.progress.num_blocks))
            end = min(self.num_computed + CHUNK_BLOCKS, self._stop())
            if end > self.num_computed:
                self.chunk = end, now_s + (end - self.num_computed) * self.compute_s

    def _stop(self) -> int:
        """The first block behind what is computed that somebody loads."""
        everything = range(self.num_computed, self.progress.num_blocks)
        mine = (block < self.progress.fence or block in self.given_up for block in everything)
        others = (block for block, is_mine in zip(everything, mine, strict=True) if block in self.loaded or not is_mine)
        return next(others, self.progress.num_blocks)


def progress_of(num_blocks: int, compute_s: float, load_s: float) -> RestoreProgress:
    """Progress that expects these seconds per block."""
    progress = RestoreProgress(
        num_blocks,
        BLOCK_TOKENS,
        CHUNK_TOKENS,
        PrefillModel(0, compute_s / BLOCK_TOKENS),
        [SourceProgress(range(num_blocks), load_s)],
    )
    progress.begin(0, progress.costs(0, load_s, 0.0))
    return progress


@pytest.mark.parametrize("load_s", [0.15, 0.1, 0.05, 0.03, 0.007])
def test_both_sides_meet_where_that_saves_enough(load_s: float) -> None:
    num_blocks, compute_s = 62, 0.1
    took_s = Simulated(progress_of(num_blocks, compute_s, load_s), compute_s, load_s, math.inf).run()
    together_s = num_blocks / (1 / compute_s + 1 / load_s)
    better_s = num_blocks * min(compute_s, load_s)
    if together_s <= 0.75 * better_s:
        assert took_s <= together_s + 3 * compute_s + 3 * load_s
    assert took_s <= better_s * 1.05 + compute_s


seconds = st.floats(0.002, 0.5)


@given(st.integers(1, 100), seconds, seconds, seconds, seconds)
def test_wrong_predictions_cost_no_more_than_a_chunk(
    num_blocks: int, compute_s: float, load_s: float, expected_compute_s: float, expected_load_s: float
) -> None:
    progress = progress_of(num_blocks, compute_s, expected_load_s)
    took_s = Simulated(progress, compute_s, load_s, math.inf).run()
    better_s = num_blocks * min(compute_s, load_s)
    bound_s = better_s * 1.1 + (CHUNK_BLOCKS + 2) * compute_s + 4 * max(load_s, expected_load_s) + 0.3
    assert took_s <= max(bound_s, num_blocks * compute_s + 0.1)  # a link that seems useless is not tried


@given(st.integers(1, 60), st.floats(0.01, 0.2), st.floats(0.0, 2.0))
def test_a_link_that_dies_leaves_the_rest_to_computing(num_blocks: int, compute_s: float, dead_after_s: float) -> None:
    progress = progress_of(num_blocks, compute_s, 0.02)
    took_s = Simulated(progress, compute_s, 0.02, dead_after_s).run()
    assert took_s <= num_blocks * compute_s + dead_after_s + 1.5


@settings(max_examples=25)
@example(15, 0.03125, 0.1875, 0.0, 1.5)  # the first of two blocks comes when no more would have been waited for
@given(st.integers(1, 30), st.floats(0.03, 0.2), st.floats(0.02, 0.2), st.floats(0.0, 2.0), st.floats(0.02, 30.0))
def test_a_link_whose_rate_changes_costs_no_more_than_what_was_done_before(
    num_blocks: int, compute_s: float, load_s: float, change_s: float, later_s: float
) -> None:
    progress = progress_of(num_blocks, compute_s, load_s)
    took_s = Simulated(progress, compute_s, load_s, math.inf, (change_s, later_s)).run()
    alone_s = min(num_blocks * compute_s, change_s + num_blocks * later_s)
    waits_s = 4 * 0.2 * 2 + 4 * 0.2  # four times the expected, for two blocks and then for the other one
    assert took_s <= change_s + alone_s * 1.1 + (CHUNK_BLOCKS + 2) * compute_s + waits_s + 0.1


def test_little_is_asked_for_before_the_link_is_known() -> None:
    progress = progress_of(40, 1.0, 0.001)
    assert [len(progress.claim(0.0)), len(progress.claim(0.0))] == [1, 1]
    progress.came([39, 38], 0.002)
    assert progress.claim(0.002) == [37, 36]
    progress.failed([37, 36])
    assert progress.num_loaded == 2
    assert progress.sources[0].load_s_per_block == pytest.approx(0.001)


def test_it_is_not_over_while_blocks_are_left_to_ask_for() -> None:
    progress = progress_of(3, 1.0, 0.001)
    progress.advance(0, 0.0)
    assert not progress.is_over, "nothing was asked for yet"
    assert [progress.claim(0.0), progress.claim(0.0)] == [[2], [1]]
    progress.came([2], 0.001)
    progress.left_out([1])
    assert not progress.is_over, "two are left, though nothing is under way"
    assert progress.claim(0.001) == [1]
    assert progress.claim(0.001) == [0]
    progress.came([0], 0.002)
    assert progress.failed([1]) == [1]
    assert progress.is_over, "nobody has the one that is left"


def test_what_a_step_costs_is_counted() -> None:
    """Half of two blocks: the time of a step more is more than what loading the other half saves."""
    model = PrefillModel(0.05, 0.001, 0.0)
    both = RestoreProgress(40, BLOCK_TOKENS, CHUNK_TOKENS, model, [SourceProgress(range(40), 0.06)])
    assert both.begin(0, both.costs(0, 0.06, 0.0)).method == "both"
    short = RestoreProgress(2, BLOCK_TOKENS, CHUNK_TOKENS, model, [SourceProgress(range(2), 0.06)])
    assert short.begin(0, short.costs(0, 0.09, 0.0)).method != "both"
    progress = RestoreProgress(
        40, BLOCK_TOKENS, 128, PrefillModel(0.1, 0.0005, 0.0), [SourceProgress(range(40), 0.2)], step_tokens=2048
    )
    assert progress.begin(0, progress.costs(0, 0.2, 0.0)).method == "compute", "in large steps it is quick"


def test_a_single_method_is_preferred_where_both_save_little() -> None:
    plans = []
    for compute_s, load_s in ((0.1, 0.001), (0.001, 0.1), (0.1, 0.1)):
        progress = RestoreProgress(
            20,
            BLOCK_TOKENS,
            CHUNK_TOKENS,
            PrefillModel(0, compute_s / BLOCK_TOKENS),
            [SourceProgress(range(20), load_s)],
        )
        plans.append(progress.begin(4, progress.costs(0, load_s, 0.0)).method)
    assert plans == ["load", "compute", "both"]


@pytest.mark.parametrize(("load_s", "fence"), [(0.01, 0), (10.0, 16)])
def test_an_engine_that_does_one_after_the_other_loads_all_or_nothing(load_s: float, fence: int) -> None:
    sources = [SourceProgress(range(16), load_s, 0.0)]
    model = PrefillModel(0.0, 1e-3, 0.0)  # 64 ms a block
    progress = RestoreProgress(16, BLOCK_TOKENS, CHUNK_TOKENS, model, sources, can_do_both=False)
    progress.begin(0, progress.costs(0, load_s, 0.0))
    assert progress.fence == fence


def test_such_an_engine_computes_all_once_loading_has_become_slower() -> None:
    sources = [SourceProgress(range(16), 0.03, 0.0)]
    progress = RestoreProgress(16, BLOCK_TOKENS, CHUNK_TOKENS, PrefillModel(0.0, 1e-3, 0.0), sources, can_do_both=False)
    progress.begin(0, progress.costs(0, 0.03, 0.0))
    progress.advance(0, 0.0)
    blocks = progress.claim(0.0)
    assert progress.wanted_fence(0.01) == 0
    assert progress.wanted_fence(100.0) == 16  # nothing came for long
    assert blocks


def quick_link(num_new_s: float = 0.0) -> RestoreProgress:
    """23 blocks of 40 ms each to compute, 7 ms to load; `num_new_s`: the step behind them, if it may hide the load."""
    model, sources = PrefillModel(0.01, 0.6e-3, 0.0), [SourceProgress(range(23), 0.007, most_by_layer=23)]
    layers = LayerLoads(num_new_s, 5, 0.01) if num_new_s else None
    progress = RestoreProgress(23, BLOCK_TOKENS, 128, model, sources, layers=layers)
    plan = progress.begin(0, progress.costs(0, 0.007, 0.0))
    assert plan.method == ("layers" if layers else "load"), "both together would save less than a quarter"
    progress.advance(0, 0.0)
    return progress


def test_no_step_begins_beside_a_load_that_it_would_hardly_shorten() -> None:
    """What was no reason to compute the front at first is none a moment later."""
    progress = quick_link()
    now_s = 0.0
    while blocks := progress.claim(now_s):
        assert progress.wanted_fence(now_s) == 0
        now_s += 0.009 * len(blocks)  # a little later than expected
        assert progress.wanted_fence(now_s) == 0
        progress.came(blocks, now_s)
        assert progress.wanted_fence(now_s) == 0
    assert progress.num_loaded == 23


def test_a_link_that_has_become_slow_is_helped() -> None:
    progress = quick_link()
    progress.came(progress.claim(0.0), 0.15)
    progress.claim(0.15)
    assert progress.wanted_fence(0.15) > 0


def test_what_arrives_by_layer_is_requested_at_once() -> None:
    progress = quick_link(0.3)
    assert progress.claim(0.0) == []
    assert progress.claim_layers(0.0) == list(range(23))
    assert progress.claim_layers(0.0) == []
    assert progress.wanted_fence(0.05) == 0
    assert progress.failed(list(range(22))) == list(range(22))
    assert progress.layers_at_once(30) == 30, "the rest comes by block"


def test_a_step_that_cannot_hide_the_load_has_no_layers_wait() -> None:
    model, sources = PrefillModel(0.01, 0.6e-3, 0.0), [SourceProgress(range(23), 0.007)]
    progress = RestoreProgress(23, BLOCK_TOKENS, 128, model, sources, layers=LayerLoads(0.1, 5, 0.0))
    assert progress.begin(0, progress.costs(0, 0.007, 0.0)).method == "load"
    assert progress.claim_layers(0.0) == []
    assert progress.claim(0.0) == [22]


def test_layers_come_from_the_one_source_that_serves_all_of_them() -> None:
    """Of several that have the prefix: not from a store, nor from a worker that holds less for one reader."""
    model = PrefillModel(0.01, 0.6e-3, 0.0)
    most = [0, 22, 23, 23]  # by layer
    sources = [SourceProgress(range(23), 0.007 + 0.002 * number, 0.0, most[number]) for number in range(4)]
    progress = RestoreProgress(23, BLOCK_TOKENS, 128, model, sources, layers=LayerLoads(3.0, 5, 0.01))
    slow = progress.costs(0, 0.04, 0.0)  # of all together
    assert progress.begin(0, slow).method == "layers"
    assert progress.layer_source == 2
    assert progress.claim(0.0, 0) == [], "the others wait"
    assert progress.claim_layers(0.0) == list(range(23))
    fewer = RestoreProgress(23, BLOCK_TOKENS, 128, model, sources[:2], layers=LayerLoads(3.0, 5, 0.01))
    assert fewer.begin(0, slow).method != "layers"


def test_what_a_holder_leaves_out_is_asked_for_by_block() -> None:
    progress = quick_link(0.3)
    assert progress.claim_layers(0.0) == list(range(23))
    progress.left_out(range(10, 23))
    assert progress.layer_wait_s(0.2, 0.1) == math.inf, "no step waits for what does not come"
    assert progress.claim(0.1) == [22]
    progress.came(range(10), 0.1)
    assert progress.num_leading == 10
    assert not progress.is_over


def test_a_plan_of_both_counts_the_last_step_as_others_do() -> None:
    """What is compared with a load by layer is then without that step, whichever plan it is."""
    model, sources = PrefillModel(0.05, 1e-3, 0.0), [SourceProgress(range(40), 0.06)]
    progress = RestoreProgress(40, BLOCK_TOKENS, CHUNK_TOKENS, model, sources)
    costs = progress.costs(0, 0.06, 0.0)
    plan = progress.begin(0, costs)
    assert plan.method == "both"
    assert plan.seconds == pytest.approx(
        0.05 + costs.restore_s(plan.num_compute_blocks * BLOCK_TOKENS, 40 * BLOCK_TOKENS)
    )
