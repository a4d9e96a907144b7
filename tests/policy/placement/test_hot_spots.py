"""Which running answers leave a busy decode worker."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.latency import StepModel
from halfmoon.policy.placement.hot_spots import HotMove, HotSpots, RunningAnswer
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView
from tests.policy.placement.test_place import worker

STEP = StepModel(0.01, 0.002, 0.0)


def decoder(worker_id: str, num_running: int = 0, **changed: Any) -> WorkerView:
    given: dict[str, Any] = {"step_model": STEP, "fetch_s_per_token": 1e-6, "num_running": num_running, **changed}
    return worker(worker_id, given.pop("role", "decode"), **given)


def answers(num: int, left: float = 300.0, tokens: int = 100) -> list[RunningAnswer]:
    return [RunningAnswer(str(number), 0, tokens, left + number, 400) for number in range(num)]


def chosen(*workers: WorkerView, running: list[RunningAnswer] | None = None) -> list[HotMove]:
    view = ClusterView(workers)
    return HotSpots().choose(view, answers(20) if running is None else running, all_alike(view), 0.0)


def all_alike(view: ClusterView) -> Any:
    return lambda row: np.ones(view.num_rows, dtype=np.bool_)


def test_the_longest_leave_for_the_idle_worker_a_few_at_a_time() -> None:
    moves = chosen(decoder("d0", 20), decoder("d1"))
    assert [move.name for move in moves] == ["19", "18", "17", "16"]
    assert {move.placement.decode.worker_id for move in moves} == {"d1"}
    assert all(move.gain_s > 2 * move.cost_s for move in moves)


def test_about_equal_workers_keep_theirs() -> None:
    assert chosen(decoder("d0", 10), decoder("d1", 8)) == []


def test_it_ends_before_the_other_is_as_busy() -> None:
    moves = chosen(decoder("d0", 8), decoder("d1", 4))
    assert len(moves) < 4
    assert chosen(decoder("d0", 8 - len(moves)), decoder("d1", 4 + len(moves))) == []


def test_what_ends_soon_stays() -> None:
    assert chosen(decoder("d0", 20), decoder("d1"), running=answers(20, left=-5.0)) == []


def test_a_slow_link_is_not_worth_it() -> None:
    assert chosen(decoder("d0", 20), decoder("d1", fetch_s_per_token=1e-3))
    assert chosen(decoder("d0", 20), decoder("d1", fetch_s_per_token=0.2)) == []


def test_a_quicker_worker_takes_more_of_them() -> None:
    quick = StepModel(0.005, 0.001, 0.0)
    assert chosen(decoder("d0", 8), decoder("d1", 8)) == []
    assert chosen(decoder("d0", 8), decoder("d1", 8, step_model=quick))


@pytest.mark.parametrize(
    "unfit",
    [
        {"free_blocks": 7},
        {"draining": True},
        {"listening": False},
        {"max_running": 2, "num_running": 2},
        {"fetch_s_per_token": math.inf},
        {"context_tokens": 499},
        {"step_model": StepModel()},
        {"role": "prefill"},
    ],
)
def test_only_where_there_is_room_and_speed_is_known(unfit: dict[str, Any]) -> None:
    changed = {"num_running": 0, **unfit}
    assert chosen(decoder("d0", 20), decoder("d1", **changed)) == []


def test_blocks_of_another_kind_are_no_help() -> None:
    view = ClusterView([decoder("d0", 20), decoder("d1")])
    assert HotSpots().choose(view, answers(20), lambda row: np.array([True, False]), 0.0) == []


def test_an_answer_rests_after_a_move() -> None:
    view, policy = ClusterView([decoder("d0", 20), decoder("d1")]), HotSpots()
    (first,) = policy.choose(view, answers(1), all_alike(view), 0.0)
    assert first.name == "0"
    assert policy.choose(view, answers(1), all_alike(view), 5.0) == []
    assert len(policy.choose(view, answers(1), all_alike(view), 10.0)) == 1


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0.5, 1.0, 2.0])), min_size=2, max_size=6),
    st.floats(1.0, 2000.0),
)
def test_all_moves_together_shorten_the_steps(workers: list[tuple[int, float]], left: float) -> None:
    """Summed over the answers in them; so answers do not wander back and forth."""
    views = [
        decoder(f"d{row}", num, step_model=StepModel(0.01 * pace, 0.002 * pace, 0.0))
        for row, (num, pace) in enumerate(workers)
    ]
    view = ClusterView(views)
    running = [
        RunningAnswer(f"{row}-{number}", row, 10, left, 400)
        for row, (num, _) in enumerate(workers)
        for number in range(num)
    ]
    moves = HotSpots().choose(view, running, all_alike(view), 0.0)
    batch = [num for num, _ in workers]
    before = sum(num * view.worker(row).step_model.seconds(num, 0) for row, num in enumerate(batch))
    for move in moves:
        batch[int(move.name.split("-")[0])] -= 1
        target = view.row(move.placement.decode.worker_id)
        assert target is not None
        batch[target] += 1
    after = sum(num * view.worker(row).step_model.seconds(num, 0) for row, num in enumerate(batch))
    assert after < before or not moves
