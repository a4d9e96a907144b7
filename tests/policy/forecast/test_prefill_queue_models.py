"""Placements are made exact for the chosen worker: its queue, its steps, and who decodes beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfmoon.policy.forecast.decode_forecast import DecodeForecast
from halfmoon.policy.forecast.prefill_queue_models import PrefillQueueModels
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.values import Placement
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView

MODEL = PrefillModel(0.0, 0.01, 0.0)
P = WorkerView("p", "prefill", "host:1", 9000, 10, 900, 900, step_tokens=100, prefill_model=MODEL, contention=1.0)
D = WorkerView("d", "decode", "host:2", 9000, 10, 900, 900, step_model=StepModel(0.01, 0.0, 0.0))
ELSEWHERE = replace(D, worker_id="e", address="other:2")


def at(view: ClusterView, prefill: WorkerView, decode: WorkerView, num_tokens: int = 100) -> Placement:
    view.put(prefill)
    view.put(decode)
    work_s = MODEL.seconds(num_tokens)
    return Placement(prefill, decode, ttft_s=work_s, tbt_s=0.01, work_s=work_s)


def refined(courses: PrefillQueueModels, view: ClusterView, placement: Placement, now_s: float) -> tuple[float, float]:
    found = courses.refine(view, placement, 100, 0, now_s)
    return pytest.approx(found.queue_s), pytest.approx(found.prefill_s)  # type: ignore[return-value]


def test_who_decodes_beside_a_worker_slows_it_down() -> None:
    for decode, num_output, expected in ((D, 1000, (0.0, 2.0)), (D, 50, (0.0, 1.25)), (ELSEWHERE, 1000, (0.0, 1.0))):
        forecast, view = DecodeForecast(), ClusterView()
        courses, placement = PrefillQueueModels(forecast), at(view, P, decode)
        row = view.row(decode.worker_id)
        assert row is not None
        forecast.join("r", row, 0.0, num_output * 0.01, 100, num_output)
        assert refined(courses, view, placement, 0.0) == expected


def test_the_queue_is_that_of_its_steps_until_tokens_are_there() -> None:
    view, courses = ClusterView(), PrefillQueueModels(DecodeForecast())
    placement = at(view, replace(P, contention=0.0), D)
    courses.join("long", view, placement, 250, 10, 0, 0.0)
    assert refined(courses, view, placement, 0.5) == (0.5, 2.0)  # shares two steps
    courses.join("gone", view, placement, 100, 10, 0, 0.5)
    courses.leave("gone", 0.6)
    courses.computed("long", 2.0)
    courses.computed("long", 2.0)
    assert refined(courses, view, placement, 2.0) == (0.0, 1.0)


def test_what_is_loaded_may_come_later_than_the_queue_ends() -> None:
    """Loading begins at once: half of a prompt is there after 1.5 s, behind a queue of one second."""
    view, courses = ClusterView(), PrefillQueueModels(DecodeForecast())
    placement = at(view, replace(P, contention=0.0), D)
    courses.join("first", view, placement, 100, 10, 0, 0.0)
    loading = replace(placement, fetched_tokens=50, ready_s=1.5, queue_s=1.0, work_s=1.0, ttft_s=2.0)
    assert refined(courses, view, loading, 0.0) == (1.5, 0.5)


def test_what_is_computed_there_is_decoded_beside_it() -> None:
    view, courses = ClusterView(), PrefillQueueModels(DecodeForecast())
    placement = at(view, P, D)
    courses.join("first", view, placement, 100, 1000, 0, 0.0)
    assert refined(courses, view, placement, 0.0) == (1.0, 2.0)


def test_steps_in_the_past_were_beside_whoever_was_busy() -> None:
    view, courses = ClusterView(), PrefillQueueModels(DecodeForecast())
    placement = at(view, P, D)
    view.busy.begin("d", "r", 0.0)
    courses.join("first", view, placement, 100, 0, 0, 0.0)
    view.busy.end("d", "r", 1.0)  # half of the first step is done
    assert refined(courses, view, placement, 1.0) == (0.5, 1.0)


@pytest.mark.parametrize("known", [{"step_tokens": 0}, {"role": "both"}, {"prefill_model": PrefillModel()}])
def test_a_worker_whose_steps_are_not_known_keeps_what_was_predicted(known: dict[str, object]) -> None:
    view, courses = ClusterView(), PrefillQueueModels(DecodeForecast())
    worker = replace(P, **known)  # type: ignore[arg-type]
    placement = at(view, worker, D)
    courses.join("first", view, placement, 100, 10, 0, 0.0)
    assert courses.refine(view, placement, 100, 0, 0.0) is placement


B = replace(P, worker_id="b", role="both", chunk_tokens=50, contention=0.0, step_model=StepModel(0.1, 0.0, 0.0))


def decoding_at(view: ClusterView, worker: WorkerView, until_s: float) -> DecodeForecast:
    forecast, row = DecodeForecast(), view.row(worker.worker_id)
    assert row is not None
    forecast.join("decoding", row, -1.0, until_s, 100, 10)
    forecast.begin("decoding", 0.0)
    return forecast


def test_a_worker_of_both_roles_computes_in_chunks_beside_its_decoding() -> None:
    view = ClusterView()
    placement = at(view, B, B)
    courses = PrefillQueueModels(decoding_at(view, B, 99.0))
    assert refined(courses, view, placement, 0.0) == (0.05, 1.2)
    courses.join("first", view, placement, 100, 1000, 0, 0.0)
    assert refined(courses, view, placement, 0.0) == (1.2, 1.2)  # its second step is the first one's, too
    courses.computed("first", 1.2)
    assert refined(courses, view, placement, 1.2) == (0.05, 1.2)
    assert refined(PrefillQueueModels(DecodeForecast()), view, placement, 0.0) == (0.0, 1.0)


def test_right_guesses_shorten_the_time_between_tokens_but_no_step() -> None:
    """A token every 0.1 s, four of them a step: a chunk waits for 0.4 s beside it, and takes a fourth of that each."""
    guessing, view = replace(B, tokens_per_step=4.0), ClusterView()
    placement = at(view, guessing, guessing)
    courses = PrefillQueueModels(decoding_at(view, guessing, 99.0))
    assert refined(courses, view, placement, 0.0) == (0.2, 1.8)
    courses.join("first", view, placement, 100, 1000, 0, 0.0)
    behind = replace(placement, behind_s=99.0)
    assert courses.tbt_s(view, behind, 0.1, 10, 0.0) == pytest.approx(0.1 + MODEL.seconds(50) / 4)


def test_an_answer_comes_slower_where_prompts_are_computed_in_its_steps() -> None:
    view = ClusterView()
    courses, placement = PrefillQueueModels(DecodeForecast()), at(view, B, B)
    assert courses.tbt_s(view, placement, 0.1, 10, 0.0) == 0.1
    for number in range(20):
        courses.join(str(number), view, placement, 50, 10, 0, float(number))
        courses.computed(str(number), number + 0.5)
    slower_s = courses.tbt_s(view, placement, 0.1, 10, 20.0)
    assert slower_s == pytest.approx(0.1 + 0.5 / 10)  # one a second, in half of one before the answer and one of it
    assert courses.tbt_s(view, replace(placement, behind_s=99.0), 0.1, 10, 20.0) == 0.1 + MODEL.seconds(50)
    assert courses.tbt_s(view, at(view, P, D), 0.1, 10, 20.0) == 0.1


def test_an_answer_comes_slower_beside_who_computes_prompts() -> None:
    slowed = replace(D, step_contention=0.5)
    for decode, num_gaps, expected_s in ((D, 10, 0.1), (slowed, 1000, 0.125), (slowed, 10, 0.135)):
        view, courses = ClusterView(), PrefillQueueModels(DecodeForecast())
        placement = replace(at(view, P, decode), behind_s=0.25)
        for number in range(10):  # half of the time
            view.busy.begin("p", str(number), 2.0 * number)
            view.busy.end("p", str(number), 2.0 * number + 1)
        found_s = courses.tbt_s(view, placement, 0.1, num_gaps, 20.0)
        assert found_s == pytest.approx(expected_s, rel=0.02)
    elsewhere = replace(ELSEWHERE, step_contention=0.5)
    assert PrefillQueueModels(DecodeForecast()).tbt_s(view, at(view, P, elsewhere), 0.1, 10, 20.0) == 0.1


def test_what_others_sent_there_is_ahead() -> None:
    view, courses = ClusterView(), PrefillQueueModels(DecodeForecast())
    placement = at(view, replace(P, prefill_free_s=5.0), D)
    assert refined(courses, view, placement, 0.0) == (5.0, 1.0)
    row = view.row("p")
    assert row is not None
    load = {"free_blocks": 9, "num_requests": 0, "waiting_prefill_tokens": 0, "context_in_use_tokens": 0}
    view.note_load(row, **load, prefill_free_s=7.0)  # in the columns alone, as the simulator tells it
    assert refined(courses, view, placement, 0.0) == (7.0, 1.0)


def test_what_caches_have_of_its_own_prompts_is_not_the_work_of_others() -> None:
    view, courses = ClusterView(), PrefillQueueModels(DecodeForecast())
    placement = at(view, replace(P, contention=0.0, prefill_free_s=10.0), D)  # says that 1,000 tokens wait
    courses.join("own", view, replace(placement, cached_tokens=900), 1000, 10, 0, 0.0)
    assert refined(courses, view, placement, 0.0) == (1.0, 1.0)


def test_neighbours_are_the_members_of_one_host() -> None:
    view = ClusterView((P, D, ELSEWHERE))
    assert view.colocated_with("p").tolist() == [False, True, False, False]
    view.remove("d")
    assert not view.colocated_with("p").any()
    assert not view.colocated_with("e").any()
    view.put(replace(D, worker_id="f", address="other:9"))  # in the row that is free
    assert view.colocated_with("e").tolist() == [False, True, False, False]
