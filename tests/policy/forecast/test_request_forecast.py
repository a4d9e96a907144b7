"""A placement and what is foreseen of it fit together; less is asked for only where that may help."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from halfmoon.policy.forecast.request_forecast import RequestForecast, RunningRequest
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.placement.place import PlacementRules, place
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.policy.values import MostSeen, Placement, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView

P = WorkerView("p", "prefill", "a:1", 9000, 10, 900, 900, step_tokens=100, prefill_model=PrefillModel(0.0, 0.01, 0.0))
SLOWER = PrefillModel(0.0, 0.012, 0.0)
D = WorkerView("d", "decode", "b:1", 9000, 10, 900, 900, step_model=StepModel(0.0, 0.01, 0.0))


def placed_by(forecast: RequestForecast, view: ClusterView, request: PlacementRequest, now_s: float) -> Placement:
    return place(view, request, PlacementRules(), forecast, now_s, random.Random(0))


def test_the_decode_load_is_that_of_the_moment_when_the_steps_end() -> None:
    forecast, view = RequestForecast(2.0), ClusterView((P, D))
    long = placed_by(forecast, view, PlacementRequest(250, 1), 0.0)
    forecast.move("long", view, RunningRequest(250, 1.0, 0.0, 0), long, 0.0)
    for number, leaves_s in enumerate((2.3, 2.8, 9.0)):
        forecast.decodes.join(str(number), 1, 0.0, leaves_s, 10, 10)
    placed = placed_by(forecast, view, PlacementRequest(60, 10), 0.5)
    assert placed.ranked_by is not None
    moments_s = (0.5 + float(placed.ranked_by.seconds[0]), 0.5 + placed.ttft_s)
    loads = [forecast.decodes.loads(at_s, 0.5, 2).batch[1] for at_s in moments_s]
    assert loads[0] != loads[1]  # or this would show nothing
    assert placed.tbt_s == pytest.approx(0.01 * (loads[1] + 1))


@pytest.mark.parametrize(
    ("mode", "busy_s", "cached", "goes_to"),
    [
        ("kvcache-centric", 9.0, 0, "q"),
        ("kvcache-centric", 0.0, 0, "p"),  # 10 ms a token, 12 on q
        ("kvcache-centric", 9.0, 80, "p"),  # what is left there is worth the neighbours
        ("cache-aware", 9.0, 0, "q"),
        ("least-loaded", 9.0, 0, "either"),
    ],
)
def test_a_prompt_goes_where_neighbours_leave_it_time(
    mode: PlacementMode, busy_s: float, cached: int, goes_to: str
) -> None:
    """Beside each busy one of two neighbours it takes half as long again."""
    p, q = replace(P, contention=0.5, holder=0), replace(P, worker_id="q", address="c:1", prefill_model=SLOWER)
    beside = [replace(D, worker_id=name, address=f"a:{name}") for name in ("d1", "d2")]
    rules = PlacementRules(mode)
    view, forecast, rng = ClusterView((p, q, *beside, D)), RequestForecast(rules.fetching_threshold), random.Random(0)
    for one in beside:
        row = view.row(one.worker_id)
        assert row is not None
        forecast.decodes.join(one.worker_id, row, 0.0, busy_s, 10, 900)
    request = PlacementRequest(100, 10, cached_blocks=np.array([cached // 10, 0]))
    placed = [place(view, request, rules, forecast, 1e-3 * number, rng) for number in range(20)]
    names = {one.prefill.worker_id for one in placed}
    assert names == ({"p", "q"} if goes_to == "either" else {goes_to})


def test_an_answer_lasts_as_long_as_its_mean_gap_says() -> None:
    forecast, view = RequestForecast(2.0), ClusterView((P, D))
    placed = placed_by(forecast, view, PlacementRequest(100, 10), 0.0)
    assert placed.tbt_s == pytest.approx(0.01)  # alone, as it begins; others will slow it down
    forecast.move("r", view, RunningRequest(100, 100.0, 0.05, 0), placed, 0.0)
    forecast.begin_decode("r", 2.0)
    assert [forecast.decodes.loads(at_s, 2.0, 2).batch[1] for at_s in (3.5, 6.9, 7.1)] == [1, 1, 0]


@pytest.mark.parametrize(("most_seen", "first", "mean", "last"), [(30, 30, 30, 30), (150, 100, 150, 150)])
def test_steps_see_what_a_kv_policy_keeps(most_seen: float, first: float, mean: float, last: float) -> None:
    """A decode step takes 1 ms a token that it sees: of 100 tokens and an answer of 100."""
    view = ClusterView((P, replace(D, step_model=StepModel(0.0, 0.0, 1e-3))))
    forecast, request = RequestForecast(2.0), PlacementRequest(100, 100, most_seen=MostSeen(answer=most_seen))
    placed = placed_by(forecast, view, request, 0.0)
    assert placed.tbt_s == pytest.approx(1e-3 * first)
    assert forecast.mean_tbt_s(view, request, placed, 100.0, 0.0) == pytest.approx(1e-3 * mean)
    assert forecast.tbt_at(view, request, placed, 0.0, 0.0) == pytest.approx(1e-3 * first)
    assert forecast.tbt_at_mean_load(view, request, placed, 0.0) == pytest.approx(1e-3 * first)
    forecast.move("r", view, RunningRequest(100, 100.0, 0.05, 0, most_seen=request.most_seen), placed, 0.0)
    forecast.begin_decode("r", 2.0)
    contexts = [forecast.decodes.loads(at_s, 2.0, 2).context_tokens[1] for at_s in (2.0, 7.0)]
    assert contexts == pytest.approx([first, last])
