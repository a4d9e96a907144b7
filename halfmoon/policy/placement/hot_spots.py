"""Hot spots: a running answer leaves a busy decode worker for another where that saves more time than it costs. Pure.

Times are of all tokens that are waited for: a step that becomes shorter by a millisecond saves a millisecond for each
answer in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.placement.ranking import predict_tbt
from halfmoon.policy.values import DecodeLoads, Placement
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView

LOOK_S = 1.0  # between two looks, as workers report
_AT_ONCE = 4  # answers that leave a worker after one look
_REST_S = 10.0  # between two moves of one answer
_MOST_LOOKED_AT = 16  # answers of a worker, those that go on longest
_QUICKER = 0.85  # step there / here: models of equal workers differ by as much without meaning it
_MARGIN = 2.0  # gain / cost: answers may end sooner than predicted
_PAUSE_STEPS = 2.0  # at the change: the running step there ends, then the first one with the answer
_HELD_UP = 0.1  # of the time of a copy, for everybody at both ends: it is read and written between steps


class RunningAnswer(NamedTuple):
    """An answer that decodes on `row`."""

    name: str
    row: int
    num_tokens: int  # of prompt and answer so far
    num_left: float  # of the answer, predicted
    most_left: int  # that it may still have


class HotMove(NamedTuple):
    """An answer that is to go on elsewhere."""

    name: str
    placement: Placement
    gain_s: float
    cost_s: float


class _Loads(NamedTuple):
    """What each row does, with the moves chosen so far. All arrays are [num_rows]."""

    batch: Floats
    context: Floats  # tokens
    free_tokens: Floats


class HotSpots:
    """Owns when each answer moved last."""

    def __init__(self) -> None:
        self._moved_s: dict[str, float] = {}

    def choose(
        self, view: ClusterView, answers: Iterable[RunningAnswer], same_kv: Callable[[int], Bools], now_s: float
    ) -> list[HotMove]:
        """The moves to begin now, busiest workers first.

        same_kv: the rows [num_rows] whose blocks are of the kind that a row has.
        """
        self._moved_s = {name: at_s for name, at_s in self._moved_s.items() if now_s - at_s < _REST_S}
        of_row: dict[int, list[RunningAnswer]] = {}
        for answer in answers:
            if answer.name not in self._moved_s and answer.num_left > view.column("block_tokens")[answer.row]:
                of_row.setdefault(answer.row, []).append(answer)
        loads = _Loads(
            view.column("num_requests").copy(),
            view.column("context_in_use_tokens").copy(),
            view.column("free_blocks") * view.column("block_tokens"),
        )
        steps_s = _steps_s(view, loads.batch, loads.context)
        chosen: list[HotMove] = []
        for row in sorted(of_row, key=lambda one: -steps_s[one]):
            left = sorted(of_row[row], key=lambda one: -one.num_left)[:_MOST_LOOKED_AT]
            for _ in range(_AT_ONCE):
                found = [move for one in left if (move := _best(view, loads, one, same_kv(row))) is not None]
                if not found:
                    break
                move = max(found, key=lambda one: one.gain_s - one.cost_s)
                answer = next(one for one in left if one.name == move.name)
                left.remove(answer)
                _apply(view, loads, answer, move)
                self._moved_s[move.name] = now_s
                chosen.append(move)
        return chosen


def _best(view: ClusterView, loads: _Loads, answer: RunningAnswer, same_kv: Bools) -> HotMove | None:
    """Where the answer gains most; None if it had better stay."""
    row, num_tokens = answer.row, answer.num_tokens
    batch, context = loads.batch, loads.context
    fetch_s = num_tokens * view.column("fetch_s_per_token")
    here_s = _steps_s(view, batch, context)
    there_s = _steps_s(view, batch + 1, context + num_tokens)
    without_s = float(_steps_s(view, batch - 1, context - num_tokens)[row])
    now_s = float(here_s[row])
    rows = _with_room(view, loads, answer) & same_kv & (there_s > 0) & (there_s <= _QUICKER * now_s)
    if not rows.any():
        return None
    num_left = answer.num_left - np.where(rows, fetch_s, 0.0) / now_s  # it goes on here meanwhile
    saved_s = (now_s - there_s) + (batch[row] - 1) * (now_s - without_s) - batch * (there_s - here_s)
    gains_s = np.where(rows, num_left * saved_s, -np.inf)
    costs_s = _PAUSE_STEPS * there_s + _HELD_UP * np.where(rows, fetch_s, 0.0) * (batch[row] + batch)
    net_s = gains_s - _MARGIN * costs_s
    best = int(np.argmax(np.where(rows, net_s, -np.inf)))
    if net_s[best] <= 0:
        return None
    worker, step_s = view.worker(best), float(there_s[best])
    placement = Placement(worker, worker, ttft_s=step_s, tbt_s=step_s, decode_reason="computes_prompt")
    return HotMove(answer.name, placement, float(gains_s[best]), float(costs_s[best]))


def _with_room(view: ClusterView, loads: _Loads, answer: RunningAnswer) -> Bools:
    """The rows that can take all of the answer and load its KV."""
    present = view.capabilities.present
    rows = present.decode | present.both
    rows[answer.row] = False
    rows &= view.column("capacity_tokens") >= answer.num_tokens + answer.most_left
    rows &= loads.free_tokens > answer.num_tokens + answer.num_left + view.column("block_tokens")
    rows &= loads.batch < view.column("max_running")
    can_load: Bools = np.isfinite(view.column("fetch_s_per_token"))
    return rows & can_load


def _apply(view: ClusterView, loads: _Loads, answer: RunningAnswer, move: HotMove) -> None:
    target = view.row(move.placement.decode.worker_id)
    for row, sign in ((answer.row, -1), (target, 1)):
        loads.batch[row] += sign
        loads.context[row] += sign * answer.num_tokens
        loads.free_tokens[row] -= sign * answer.num_tokens


def _steps_s(view: ClusterView, batch: Floats, context: Floats) -> Floats:
    """The predicted decode step of each row; 0 where nothing is known."""
    return predict_tbt(view, DecodeLoads(batch - 1, context), 0)
