"""Frames of a prompt that is still being computed: each cell once, never before it is written, no crumbs on the way."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.kv.frame import MAX_PAYLOAD_BYTES, KVRange
from halfmoon.kv.frame_plan import MIN_FRAME_BYTES, MIN_FRAME_TOKENS, MIN_LAST_BYTES, FramePlan, Written
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.receiver import Coverage

DEMO = KVLayout(30, 3, 64, "bfloat16")  # 768 bytes a token and layer
LARGE = KVLayout(8, 8, 128, "bfloat16")  # 4 KiB a token and layer


def sent_by(plan: FramePlan, written: Written) -> list[KVRange]:
    """Everything that is due now."""
    found = []
    while (part := plan.next(written)) is not None:
        plan.sent(part)
        found.append(part)
    return found


def layer_by_layer(layout: KVLayout, ends: Sequence[int], every: int) -> list[Written]:
    """What an engine tells that computes chunks up to `ends` and speaks after `every` layers."""
    news = []
    for start, end in zip((0, *ends), ends, strict=False):
        news += [Written(start, end, layers) for layers in range(every, layout.num_layers, every)]
        news.append(Written(end))
    return news


@st.composite
def histories(draw: st.DrawFn) -> tuple[KVLayout, list[Written]]:
    layout = KVLayout(draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.sampled_from([64, 1024])), "float32")
    ends = sorted(draw(st.sets(st.integers(1, 1500), min_size=1, max_size=5)))
    news = layer_by_layer(layout, ends, draw(st.integers(1, 4)))
    lost = draw(st.lists(st.integers(0, len(news) - 1), max_size=3))
    for index in lost:  # a preemption: what was told before comes again
        news = news[: index + 1] + news[draw(st.integers(0, index)) :]
    return layout, news


@given(histories(), st.floats(0, 1))
def test_every_cell_leaves_once_and_not_before_it_is_written(
    history: tuple[KVLayout, list[Written]], held: float
) -> None:
    layout, news = history
    num_tokens = news[-1].num_tokens
    held_tokens = int(held * num_tokens) if held > 0.5 else 0
    plan, coverage = (
        FramePlan(layout, num_tokens, held_tokens),
        Coverage(KVRange(0, layout.num_layers, 0, layout.num_kv_heads, held_tokens, num_tokens - held_tokens)),
    )
    frames: list[KVRange] = []
    for written in news:
        for part in sent_by(plan, written):
            coverage.add(part)
            frames.append(part)
            assert part.token_start + part.num_tokens <= written.num_tokens_of(part.layer_end - 1)
            assert part.num_bytes(layout) <= MAX_PAYLOAD_BYTES
            rest_bytes = (num_tokens - held_tokens) * layout.token_bytes - sum(one.num_bytes(layout) for one in frames)
            if written.num_tokens_of(layout.num_layers - 1) < num_tokens:
                assert part.num_bytes(layout) >= min(MIN_FRAME_BYTES, max(rest_bytes, MIN_LAST_BYTES))
        assert plan.is_done == coverage.is_whole()
    assert plan.is_done


def test_layers_leave_while_later_ones_compute() -> None:
    plan = FramePlan(DEMO, 1024)
    frames = [(written, part) for written in layer_by_layer(DEMO, (512, 1024), 5) for part in sent_by(plan, written)]
    assert [(part.layer_start, part.layer_end, part.token_start, part.num_tokens) for _, part in frames] == [
        (layer, layer + 5, start, 512) for start in (0, 512) for layer in range(0, 30, 5)
    ]
    assert [written.num_layers for written, _ in frames] == [5, 10, 15, 20, 25, 0] * 2


@given(histories(), st.floats(0, 1))
def test_a_batch_is_worth_its_bytes_or_the_last_one(history: tuple[KVLayout, list[Written]], share: float) -> None:
    layout, news = history
    num_tokens = news[-1].num_tokens
    batch_bytes = share * num_tokens * layout.token_bytes
    plan, sent = FramePlan(layout, num_tokens), [0] * layout.num_layers
    for written in news:
        is_last = written.num_tokens_of(layout.num_layers - 1) == num_tokens
        due = sum(max(written.num_tokens_of(layer) - sent[layer], 0) for layer in range(layout.num_layers))
        has_batch = plan.has_batch(written, batch_bytes)
        assert has_batch == (is_last or due * layout.token_layer_bytes >= batch_bytes)
        for part in sent_by(plan, written) if has_batch else ():
            for layer in range(part.layer_start, part.layer_end):
                sent[layer] += part.num_tokens
    assert plan.is_done


def test_loaded_runs_count_for_a_batch() -> None:
    plan = FramePlan(DEMO, 600)
    written = Written(64, loaded=((256, 512),))
    assert plan.has_batch(written, 320 * DEMO.token_bytes)
    assert not plan.has_batch(written, 320 * DEMO.token_bytes + 1)
    assert sent_by(plan, written)
    assert not plan.has_batch(Written(64, loaded=((256, 512),)), 64 * DEMO.token_bytes + 1)


def test_what_a_preemption_took_is_not_due() -> None:
    plan = FramePlan(LARGE, 512)
    assert sent_by(plan, Written(256))
    assert not plan.has_batch(Written(), 1)
    assert plan.has_batch(Written(384), 128 * LARGE.token_bytes)


def test_little_is_left_for_the_end() -> None:
    plan = FramePlan(DEMO, 512)
    layers = [
        [(part.layer_start, part.layer_end) for part in sent_by(plan, Written(0, 512, num_layers))]
        for num_layers in (20, 25, 26, 28, 29, 30)
    ]
    assert layers == [[(0, 5), (5, 10), (10, 15), (15, 20)], [(20, 25)], [], [(25, 28)], [(28, 29)], [(29, 30)]]


def test_a_short_prompt_is_not_sent_in_crumbs() -> None:
    plan, frames = FramePlan(DEMO, 20), []
    for num_layers in range(1, 31):
        frames += sent_by(plan, Written(0, 20, num_layers))
    assert [(part.layer_start, part.layer_end) for part in frames] == [(0, 15), (15, 24), (24, 30)]


def test_small_remainders_wait_for_the_next_chunk() -> None:
    plan = FramePlan(DEMO, 384)
    assert sent_by(plan, Written(0, 128, 10)) == []
    assert sent_by(plan, Written(128)) == [KVRange(0, 21, 0, 3, 0, 128)]
    assert sent_by(plan, Written(128, 256, 21)) == [KVRange(0, 21, 0, 3, 128, 128)]
    assert sent_by(plan, Written(256)) == [KVRange(21, 30, 0, 3, 0, 256)]


def test_few_tokens_wait_for_more_unless_there_are_none() -> None:
    few = MIN_FRAME_TOKENS - 1
    plan = FramePlan(LARGE, 2 * few)
    assert sent_by(plan, Written(few)) == []
    assert sent_by(plan, Written(few, 2 * few, 2)) == [KVRange(0, 2, 0, 8, 0, 2 * few)]
    whole = FramePlan(LARGE, few)
    assert sent_by(whole, Written(0, few, 4)) == [KVRange(0, 4, 0, 8, 0, few)]


def test_what_the_receiver_holds_is_never_sent() -> None:
    plan = FramePlan(DEMO, 640, 512)
    assert sent_by(plan, Written(512)) == []
    assert sent_by(plan, Written(640)) == [KVRange(0, 21, 0, 3, 512, 128), KVRange(21, 30, 0, 3, 512, 128)]
    assert FramePlan(DEMO, 640, 640).is_done


def test_a_cached_prefix_leaves_before_anything_is_computed() -> None:
    plan = FramePlan(DEMO, 600)
    frames = sent_by(plan, Written(512))
    assert (frames[0].layer_start, frames[-1].layer_end) == (0, 30)
    assert sum(part.num_bytes(DEMO) for part in frames) == 512 * DEMO.token_bytes


def test_what_is_written_again_after_a_preemption_is_not_sent_again() -> None:
    plan = FramePlan(LARGE, 512)
    assert sent_by(plan, Written(256))
    assert sent_by(plan, Written()) == []
    assert sent_by(plan, Written(128)) == []
    assert all(part.token_start >= 256 for part in sent_by(plan, Written(512)))
    assert plan.is_done


def test_a_frame_is_repeated_until_it_was_sent() -> None:
    plan = FramePlan(LARGE, 256)
    part = plan.next(Written(256))
    assert part is not None
    assert plan.next(Written(256)) == part
    plan.sent(part)
    assert plan.next(Written(256)) != part


@given(st.integers(1, 30), st.data())
def test_what_is_loaded_leaves_as_it_comes_and_once(num_blocks: int, data: st.DataObject) -> None:
    layout = KVLayout(data.draw(st.integers(1, 6)), 2, 64, "float32")
    num_tokens = num_blocks * 64 + data.draw(st.integers(1, 64))
    held_tokens = data.draw(st.integers(0, num_blocks)) * 64
    plan = FramePlan(layout, num_tokens, held_tokens)
    coverage = Coverage(KVRange(0, layout.num_layers, 0, 2, held_tokens, num_tokens - held_tokens))
    loaded: set[int] = set()
    computed = 0  # blocks
    while computed < num_blocks:
        ahead = [block for block in range(computed, num_blocks) if block not in loaded]
        loads: bool = data.draw(st.booleans())
        if ahead and loads:
            loaded.add(data.draw(st.sampled_from(ahead)))
        else:
            stop = min((one for one in loaded if one > computed), default=num_blocks)
            computed = data.draw(st.integers(computed + 1, stop))
        while computed in loaded:
            computed += 1
        runs = tuple((one * 64, one * 64 + 64) for one in sorted(loaded) if one >= computed)
        written = Written(computed * 64, loaded=runs)
        for part in sent_by(plan, written):
            assert written.has(part.layer_end - 1, part.token_start, part.token_start + part.num_tokens)
            coverage.add(part)
        assert all(not list(sent_by(plan, written)) for _ in runs)
    for part in sent_by(plan, Written(num_tokens)):
        coverage.add(part)
    assert plan.is_done
    assert coverage.is_whole()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5), st.integers(0, 5), st.integers(1, 8))
def test_written_without_blocks_counts_the_other_tokens(
    num_tokens: int, chunk_end: int, first: int, num: int, block_tokens: int
) -> None:
    left_out = set(range(first * block_tokens, (first + num) * block_tokens))
    written = Written(num_tokens, chunk_end, 1, ((3, 9), (9, 21))).without(range(first, first + num), block_tokens)
    own = [token for token in range(200) if token not in left_out]
    assert written.num_tokens == sum(token < num_tokens for token in own)
    assert written.chunk_end == sum(token < chunk_end for token in own)
    loaded = {index for index, token in enumerate(own) if 3 <= token < 21}
    assert {token for start, end in written.loaded for token in range(start, end)} == loaded
