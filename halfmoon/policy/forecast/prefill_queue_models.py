"""What placements predict of queue and prefill, made exact for the worker that was chosen."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from halfmoon.policy.forecast.colocated_decodes import NO_LIVES, ColocatedDecodes
from halfmoon.policy.forecast.colocated_workers import ColocatedWorkers, Decoding, Spans
from halfmoon.policy.forecast.decode_forecast import DecodeForecast
from halfmoon.policy.forecast.prefill_queue_model import Prefill, PrefillQueueModel, Speed
from halfmoon.policy.forecast.running_steps import RunningStepColumns
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.models.tbt_model import pace_among_prompts, pace_beside
from halfmoon.policy.placement.place import Placement
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView, WorkerView

_LEAST_CONTENTION = 0.02  # below it neighbours do not matter
_COME_BEFORE = 0.5  # of those that come while a prompt is computed: shorter ones share its steps


class PrefillQueueModels:
    """Owns the course of each prefill worker whose steps are known, by row of the cluster view, and who is on which.

    Placement ranks many workers by sums of seconds; here are the steps of one.
    """

    def __init__(self, decodes: DecodeForecast) -> None:
        self._decodes = decodes
        self._courses: dict[int, PrefillQueueModel] = {}
        self._rows: dict[str, tuple[int, WorkerView]] = {}  # by request
        self._steps = RunningStepColumns(lambda row: self._courses[row].step)

    def join(
        self,
        request_id: str,
        view: ClusterView,
        placement: Placement,
        num_prompt_tokens: int,
        num_output: float,
        priority: int,
        now_s: float,
    ) -> None:
        """A request goes where `placement` says."""
        worker, row = placement.prefill, view.row(placement.prefill.worker_id)
        decode_row = view.row(placement.decode.worker_id)
        if row is None or decode_row is None or not _has_steps(worker):
            return
        course = self._advanced(row, view, worker, now_s)
        decoding = Decoding(decode_row, num_output * placement.tbt_s, num_prompt_tokens + num_output / 2)
        self._rows[request_id] = (row, worker)
        work = _work(placement, num_prompt_tokens, priority, now_s)
        step_tokens = 0 if course.is_computing else self._room(row, worker, now_s)
        course.join(request_id, work, decoding, step_tokens, now_s)
        self._steps.note_changed(row)

    def computed(self, request_id: str, now_s: float) -> None:
        """Its first token is here."""
        found = self._rows.pop(request_id, None)
        if found is not None:
            self._steps.note_changed(found[0])
            course = self._courses[found[0]]
            step_tokens = self._room(*found, now_s) if len(course) > 1 else 0
            course.computed(request_id, step_tokens, now_s)

    def leave(self, request_id: str, now_s: float) -> None:
        """It is on no worker, or on another one."""
        found = self._rows.pop(request_id, None)
        if found is not None:
            self._steps.note_changed(found[0])
            self._courses[found[0]].remove(request_id, self._room(*found, now_s), now_s)

    def refined(
        self, view: ClusterView, placement: Placement, num_prompt_tokens: int, priority: int, now_s: float
    ) -> Placement:
        """The same placement with the times of its steps, as far as they are foreseen."""
        worker, row = placement.prefill, view.row(placement.prefill.worker_id)
        if row is None or not _has_steps(worker):
            return placement
        own = self._own(row, worker, now_s)
        own_step_s = own.step_s(now_s)
        course = self._advanced(row, view, worker, now_s)
        if not len(course) and worker.contention < _LEAST_CONTENTION and not own_step_s:
            return placement
        times = course.predict(
            _work(placement, num_prompt_tokens, priority, now_s),
            _speed(worker),
            self._neighbours(view, worker, course, now_s),
            self._past_busy(view, worker, course, now_s),
            _others_s(view, row, course, now_s),
            now_s,
            own,
        )
        if times is None:
            return placement
        behind_s = times.behind_tokens * worker.prefill_model.b
        return replace(placement, ttft_s=times.ends_s - now_s, queue_s=times.begins_s - now_s, behind_s=behind_s)

    def earliest_s(self, view: ClusterView, row: int, least: Prefill, now_s: float) -> float:
        """Seconds from now that `refined` undercuts on that worker for no prompt with as much work or more; infinite
        where it leaves every placement as it is."""
        worker, course = view.worker(row), self._courses.get(row)
        is_alone = worker.role != "both" and worker.contention < _LEAST_CONTENTION
        if not _has_steps(worker) or (not course and is_alone):
            return math.inf
        course = self._advanced(row, view, worker, now_s)
        return course.earliest_s(least, _speed(worker), _others_s(view, row, course, now_s), now_s) - now_s

    def steps_left_s(self, view: ClusterView, now_s: float) -> Floats:
        """Of every row: `earliest_s` of a prompt is this and what it takes alone at least."""
        return self._steps.left_s(view, now_s)

    def tbt_s(self, view: ClusterView, placement: Placement, step_s: float, num_gaps: float, now_s: float) -> float:
        """The mean of an answer whose decode steps alone take `step_s`: more beside busy neighbours, and where chunks
        of prompts are in them, too."""
        worker, row = placement.decode, view.row(placement.decode.worker_id)
        if row is None:
            return step_s
        step_s = self._beside_s(view, placement, step_s, num_gaps, now_s)
        if worker.role != "both" or not _has_steps(worker) or row not in self._courses:
            return step_s
        length_s = _COME_BEFORE * placement.ttft_s + num_gaps * step_s
        prompts_s = placement.behind_s + self._courses[row].usual_work_s(_speed(worker), length_s, now_s)
        return pace_among_prompts(step_s, worker.prefill_model.seconds(worker.chunk_tokens), prompts_s, num_gaps)

    def _beside_s(self, view: ClusterView, placement: Placement, step_s: float, num_gaps: float, now_s: float) -> float:
        worker, prefill = placement.decode, placement.prefill
        if worker.step_contention < _LEAST_CONTENTION or step_s <= 0:
            return step_s
        usual, behind_s = view.busy.usual_beside(worker.worker_id, now_s), 0.0
        if prefill.host == worker.host and not placement.is_colocated:
            behind_s = (1 + prefill.contention) * placement.behind_s
        return pace_beside(step_s, worker.step_contention, usual, behind_s, num_gaps)

    def _advanced(self, row: int, view: ClusterView, worker: WorkerView, now_s: float) -> PrefillQueueModel:
        """What decoding and neighbours add to a step is asked for where a step may be over."""
        course, speed = self._courses.get(row), _speed(worker)
        if course is None:
            course = self._courses[row] = PrefillQueueModel()
        if not course.is_in_step(speed, now_s):
            past_busy = self._past_busy(view, worker, course, now_s)
            course.advance(speed, past_busy, now_s, self._own_step_s(row, worker, now_s))
            self._steps.note_changed(row)
        return course

    def _own(self, row: int, worker: WorkerView, now_s: float) -> ColocatedDecodes:
        """Who decodes in the steps of a worker that does both."""
        if worker.role != "both":
            return ColocatedDecodes(row, NO_LIVES, worker.step_model)
        return ColocatedDecodes(row, self._decodes.present(row, now_s, self._queued(row)), worker.step_model)

    def _own_step_s(self, row: int, worker: WorkerView, now_s: float) -> float:
        """What they take of a step that begins now."""
        if worker.role != "both":
            return 0.0
        load = self._decodes.present_load(row, now_s, self._queued(row))
        return worker.step_model.seconds(load.batch, load.context_tokens) if load.batch else 0.0

    def _queued(self, row: int) -> Collection[str]:
        """Whose prompts are on the course of a row."""
        course = self._courses.get(row)
        return () if course is None else course.request_ids

    def _room(self, row: int, worker: WorkerView, now_s: float) -> int:
        """Prompt tokens of a step that begins now."""
        is_shared = worker.role == "both" and any(worker.step_model)
        is_shared = is_shared and self._decodes.is_anybody_present(row, now_s, self._queued(row))
        return worker.chunk_tokens if is_shared else worker.step_tokens

    def _past_busy(self, view: ClusterView, worker: WorkerView, course: PrefillQueueModel, now_s: float) -> float:
        if worker.contention < _LEAST_CONTENTION or not len(course):
            return 0.0
        return view.busy.mean_busy_beside(worker.worker_id, course.step_began_s, now_s)

    def _neighbours(
        self, view: ClusterView, worker: WorkerView, course: PrefillQueueModel, now_s: float
    ) -> ColocatedWorkers:
        """Those that decode by the forecast, those that prefill until what they have is computed."""
        if worker.contention < _LEAST_CONTENTION:
            return ColocatedWorkers(())
        beside = view.beside(worker.worker_id)
        decodes, prefills = self._decodes.spans(beside, now_s, course.request_ids), self._prefills(view, beside, now_s)
        both = [np.concatenate(of_both) for of_both in zip(decodes, prefills, strict=True)]
        return ColocatedWorkers(set(np.flatnonzero(beside).tolist()), Spans(*both).union(now_s))

    def _prefills(self, view: ClusterView, beside: Bools, now_s: float) -> Spans:
        num = len(self._courses)
        rows = np.fromiter(self._courses.keys(), np.int64, num)
        num_tokens = np.fromiter((course.num_tokens for course in self._courses.values()), np.float64, num)
        busy = beside[rows] & (num_tokens > 0)
        rows, num_tokens = rows[busy], num_tokens[busy]
        return Spans(rows, np.full(len(rows), now_s), now_s + num_tokens * view.prefill_coefficients[rows, 1])


def _has_steps(worker: WorkerView) -> bool:
    """Whether it is known how it forms its steps, and how long they take."""
    is_told = worker.step_tokens > 0 and (worker.role == "prefill" or worker.chunk_tokens > 0)
    return is_told and any(worker.prefill_model)


def _others_s(view: ClusterView, row: int, course: PrefillQueueModel, now_s: float) -> float:
    """What the worker has to do that is not of this gateway; less than a step of it may be ours already."""
    others_s = float(view.column("others_prefill_s")[row])
    if others_s <= 0:
        return 0.0
    worker, free_s = view.worker(row), float(view.column("prefill_free_s")[row])
    others_s = min(max(free_s - now_s - course.num_reported * worker.prefill_model.b, 0.0), others_s)
    return others_s if others_s > worker.prefill_model.seconds(worker.step_tokens) else 0.0


def _speed(worker: WorkerView) -> Speed:
    contention = worker.contention if worker.contention >= _LEAST_CONTENTION else 0.0
    return Speed(worker.prefill_model, worker.step_tokens, contention, worker.chunk_tokens)


def _work(placement: Placement, num_prompt_tokens: int, priority: int, now_s: float) -> Prefill:
    known_tokens = placement.cached_tokens + placement.fetched_tokens
    new_tokens = max(num_prompt_tokens - known_tokens, 1)
    restore_s = placement.work_s - placement.prefill.prefill_model.seconds(new_tokens, known_tokens)
    ready_s = now_s + restore_s if placement.fetched_tokens else -math.inf
    return Prefill(new_tokens, known_tokens, priority, ready_s)
