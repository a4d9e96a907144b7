"""Queue and prefill of a placement, refined by the steps of the chosen worker."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from halfmoon.policy.forecast.colocated_decodes import NO_DECODES, ColocatedDecodes
from halfmoon.policy.forecast.colocated_workers import ColocatedWorkers, Decoding, Spans
from halfmoon.policy.forecast.decode_forecast import DecodeForecast
from halfmoon.policy.forecast.prefill_queue_model import PrefillQueueModel
from halfmoon.policy.forecast.prefill_step import PromptWork, Speed, StepRoom
from halfmoon.policy.forecast.running_steps import RunningStepColumns
from halfmoon.policy.models.chunk_length import NO_STEP_DECODES, StepDecodes, chunk_s, chunk_target_s
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.models.tbt_model import tbt_among_prompts, tbt_with_interference
from halfmoon.policy.values import SEEN_WHOLE, MostSeen, Placement
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView

_LEAST_CONTENTION = 0.02  # less interference is ignored
_NO_ROOM = StepRoom(0, 0)
_COME_BEFORE = 0.5  # share of the prompts arriving during a prefill that delay its answer: shorter ones share its steps


class PrefillQueueModels:
    """Owns the queue model of each prefill worker whose steps are known, by row, and which request is on which.

    Ranking compares many workers by sums of seconds; this follows the steps of one.
    """

    def __init__(self, decodes: DecodeForecast) -> None:
        self._decodes = decodes
        self._models: dict[int, PrefillQueueModel] = {}
        self._rows: dict[str, tuple[int, WorkerView]] = {}  # by request
        self._steps = RunningStepColumns(lambda row: self._models[row].step)

    def join(
        self,
        request_id: str,
        view: ClusterView,
        placement: Placement,
        num_prompt_tokens: int,
        num_output: float,
        priority: int,
        now_s: float,
        tbt_target_s: float = math.inf,
        most_seen: MostSeen = SEEN_WHOLE,
    ) -> None:
        """Adds a request to the queue of its prefill worker."""
        worker, row = placement.prefill, view.row(placement.prefill.worker_id)
        decode_row = view.row(placement.decode.worker_id)
        if row is None or decode_row is None or not _has_steps(worker):
            return
        queue_model = self._advanced(row, view, worker, now_s)
        seconds = num_output * placement.tbt_s
        context_tokens = min(num_prompt_tokens + num_output / 2, most_seen.answer)
        decoding = Decoding(decode_row, seconds, context_tokens, tbt_target_s)
        self._rows[request_id] = (row, worker)
        work = _work(placement, num_prompt_tokens, priority, now_s, most_seen.prompt)
        room = _NO_ROOM if queue_model.is_computing else self._step_room(row, worker, now_s, work.known_tokens)
        past_busy = self._past_busy(view, worker, queue_model, now_s) if worker.nests_prompts else 0.0
        queue_model.join(request_id, work, decoding, room, now_s, _speed(worker), past_busy)
        self._steps.note_changed(row)

    def computed(self, request_id: str, now_s: float) -> None:
        """Notes the first token of a request."""
        entry = self._rows.pop(request_id, None)
        if entry is not None:
            row, worker = entry
            self._steps.note_changed(row)
            queue_model = self._models[row]
            room = self._step_room(row, worker, now_s) if len(queue_model) > 1 else _NO_ROOM
            queue_model.computed(request_id, room, now_s)

    def leave(self, request_id: str, now_s: float) -> None:
        """Removes a request that has ended or moved to another worker."""
        entry = self._rows.pop(request_id, None)
        if entry is not None:
            row, worker = entry
            self._steps.note_changed(row)
            self._models[row].remove(request_id, self._step_room(row, worker, now_s), now_s)

    def refine(
        self,
        view: ClusterView,
        placement: Placement,
        num_prompt_tokens: int,
        priority: int,
        now_s: float,
        most_seen: float = math.inf,
    ) -> Placement:
        """The placement with queue and prefill predicted step by step; unchanged where steps are unknown.

        The prompt's tokens see at most `most_seen`.
        """
        worker, row = placement.prefill, view.row(placement.prefill.worker_id)
        if row is None or not _has_steps(worker):
            return placement
        decodes = self._colocated_decodes(row, worker, now_s)
        decode_s = decodes.step_s(now_s)
        queue_model = self._advanced(row, view, worker, now_s)
        if not len(queue_model) and worker.contention < _LEAST_CONTENTION and not decode_s:
            return placement
        times = queue_model.predict(
            _work(placement, num_prompt_tokens, priority, now_s, most_seen),
            _speed(worker),
            self._colocated_workers(view, worker, queue_model, now_s),
            self._past_busy(view, worker, queue_model, now_s),
            _others_s(view, row, queue_model, now_s),
            now_s,
            decodes,
        )
        behind_s = times.behind_tokens * worker.prefill_model.b
        return replace(placement, ttft_s=times.ends_s - now_s, queue_s=times.begins_s - now_s, behind_s=behind_s)

    def earliest_s(self, view: ClusterView, row: int, work: PromptWork, now_s: float) -> float:
        """Lower bound on `refine` for any prompt with at least this work, in seconds from now.

        Infinite where `refine` changes no placement.
        """
        worker, queue_model = view.worker(row), self._models.get(row)
        is_undisturbed = worker.role == "prefill" and worker.contention < _LEAST_CONTENTION
        if not _has_steps(worker) or (not queue_model and is_undisturbed):
            return math.inf
        queue_model = self._advanced(row, view, worker, now_s)
        past_busy = self._past_busy(view, worker, queue_model, now_s) if worker.nests_prompts else 0.0
        others_s = _others_s(view, row, queue_model, now_s)
        return queue_model.earliest_s(work, _speed(worker), others_s, now_s, past_busy) - now_s

    def steps_left_s(self, view: ClusterView, num_tokens: Floats, now_s: float) -> Floats:
        """Time [num_rows] that a prompt waits for the running steps, at least, if it has `num_tokens` to compute there.

        `earliest_s` is at least this plus the prompt's own prefill.
        """
        return self._steps.left_s(view, num_tokens, now_s)

    def tbt_s(self, view: ClusterView, placement: Placement, step_s: float, num_gaps: float, now_s: float) -> float:
        """The mean TBT of an answer whose decode steps take `step_s` without prefill chunks and interference."""
        worker, row = placement.decode, view.row(placement.decode.worker_id)
        if row is None:
            return step_s
        step_s = self._with_interference(view, placement, step_s, num_gaps, now_s)
        if worker.role == "prefill" or not _has_steps(worker) or row not in self._models:
            return step_s
        length_s = _COME_BEFORE * placement.ttft_s + num_gaps * step_s
        prompts_s = placement.behind_s + self._models[row].usual_work_s(_speed(worker), length_s, now_s)
        added_s = worker.prefill_model.seconds(worker.chunk_tokens)
        if worker.chunk_rule.is_known:
            bound_s = chunk_target_s(placement.tbt_target_s, worker.role)
            beside = self._step_decodes(row, worker, now_s).with_one(0.0, bound_s)
            chunk_tokens = worker.chunk_rule.tokens(worker.chunk_tokens, worker.step_tokens, beside, 0)
            added_s = chunk_s(worker.prefill_model, worker.whole_step_model, chunk_tokens)
        return tbt_among_prompts(step_s, added_s / worker.tokens_per_step, prompts_s, num_gaps)

    def prompts_s(self, view: ClusterView, row: int, length_s: float, now_s: float) -> float:
        """Work of the prompts that are on a worker, and of those that usually come within `length_s`."""
        worker, queue_model = view.worker(row), self._models.get(row)
        if queue_model is None or not worker.chunk_tokens:
            return 0.0
        usual_s = queue_model.usual_work_s(_speed(worker), length_s, now_s)
        return queue_model.num_tokens * worker.prefill_model.b + usual_s

    def _with_interference(
        self, view: ClusterView, placement: Placement, step_s: float, num_gaps: float, now_s: float
    ) -> float:
        worker, prefill = placement.decode, placement.prefill
        if worker.step_contention < _LEAST_CONTENTION or step_s <= 0:
            return step_s
        usual, behind_s = view.busy.usual_colocated(worker.worker_id, now_s), 0.0
        if prefill.host == worker.host and not placement.is_colocated:
            behind_s = (1 + prefill.contention) * placement.behind_s
        return tbt_with_interference(step_s, worker.step_contention, usual, behind_s, num_gaps)

    def _advanced(self, row: int, view: ClusterView, worker: WorkerView, now_s: float) -> PrefillQueueModel:
        """The queue model of a row as of now. Interference is computed only where a step may have ended."""
        queue_model, speed = self._models.get(row), _speed(worker)
        if queue_model is None:
            queue_model = self._models[row] = PrefillQueueModel()
        if not queue_model.is_in_step(speed, now_s):
            past_busy = self._past_busy(view, worker, queue_model, now_s)
            beside = self._step_decodes(row, worker, now_s)
            model = worker.whole_step_model
            decode_s = model.seconds(beside.batch, beside.context_tokens) if beside.batch else 0.0
            queue_model.advance(speed, past_busy, now_s, decode_s, beside)
            self._steps.note_changed(row)
        return queue_model

    def _colocated_decodes(self, row: int, worker: WorkerView, now_s: float) -> ColocatedDecodes:
        """The requests that decode in the steps of a worker that decodes, too."""
        if worker.role == "prefill":
            return ColocatedDecodes(row, NO_DECODES, worker.whole_step_model)
        present = self._decodes.present(row, now_s, self._queued(row))
        return ColocatedDecodes(row, present, worker.whole_step_model, worker.role)

    def _step_decodes(self, row: int, worker: WorkerView, now_s: float) -> StepDecodes:
        """What decodes in a step that begins now; nobody where such steps are unknown."""
        if worker.role == "prefill" or not any(worker.step_model):
            return NO_STEP_DECODES
        return self._decodes.step_decodes(row, worker.role, now_s, self._queued(row))

    def _queued(self, row: int) -> Collection[str]:
        """Requests whose prompts are in the queue model of a row."""
        queue_model = self._models.get(row)
        return () if queue_model is None else queue_model.request_ids

    def _step_room(self, row: int, worker: WorkerView, now_s: float, known_tokens: int | None = None) -> StepRoom:
        """What a step that begins now takes of prompts; `known_tokens`: of the first one, if it is not queued yet."""
        speed = _speed(worker)
        is_shared = worker.role != "prefill" and any(worker.step_model)
        if not is_shared or not self._decodes.is_any_present(row, now_s, self._queued(row)):
            return speed.step_room(NO_STEP_DECODES, 0)
        if known_tokens is None:
            known_tokens = self._models[row].known_tokens(now_s)
        return speed.step_room(self._step_decodes(row, worker, now_s), known_tokens)

    def _past_busy(self, view: ClusterView, worker: WorkerView, queue_model: PrefillQueueModel, now_s: float) -> float:
        if worker.contention < _LEAST_CONTENTION or not len(queue_model):
            return 0.0
        return view.busy.mean_busy_colocated(worker.worker_id, queue_model.step_began_s, now_s)

    def _colocated_workers(
        self, view: ClusterView, worker: WorkerView, queue_model: PrefillQueueModel, now_s: float
    ) -> ColocatedWorkers:
        """Workers on the same host: decoding as forecast, prefilling until their queues are computed."""
        if worker.contention < _LEAST_CONTENTION:
            return ColocatedWorkers(())
        rows = view.colocated_with(worker.worker_id)
        decodes, prefills = self._decodes.spans(rows, now_s, queue_model.request_ids), self._prefills(view, rows, now_s)
        both = [np.concatenate(columns) for columns in zip(decodes, prefills, strict=True)]
        return ColocatedWorkers(set(np.flatnonzero(rows).tolist()), Spans(*both).union(now_s))

    def _prefills(self, view: ClusterView, among: Bools, now_s: float) -> Spans:
        num = len(self._models)
        rows = np.fromiter(self._models.keys(), np.int64, num)
        num_tokens = np.fromiter((queue_model.num_tokens for queue_model in self._models.values()), np.float64, num)
        busy = among[rows] & (num_tokens > 0)
        rows, num_tokens = rows[busy], num_tokens[busy]
        return Spans(rows, np.full(len(rows), now_s), now_s + num_tokens * view.prefill_coefficients[rows, 1])


def _has_steps(worker: WorkerView) -> bool:
    """Whether the size and duration of its steps are known."""
    is_reported = worker.step_tokens > 0 and (worker.role == "prefill" or worker.chunk_tokens > 0)
    return is_reported and any(worker.prefill_model)


def _others_s(view: ClusterView, row: int, queue_model: PrefillQueueModel, now_s: float) -> float:
    """Prefill work from other gateways; 0 below one step, since that may be this gateway's own."""
    others_s = float(view.column("others_prefill_s")[row])
    if others_s <= 0:
        return 0.0
    worker, free_s = view.worker(row), float(view.column("prefill_free_s")[row])
    others_s = min(max(free_s - now_s - queue_model.num_reported * worker.prefill_model.b, 0.0), others_s)
    return others_s if others_s > worker.prefill_model.seconds(worker.step_tokens) else 0.0


def _speed(worker: WorkerView) -> Speed:
    contention = worker.contention if worker.contention >= _LEAST_CONTENTION else 0.0
    chunks = worker.chunk_tokens, worker.chunk_rule
    limits = worker.max_running, worker.nests_prompts
    return Speed(worker.prefill_model, worker.step_tokens, contention, *chunks, *limits)


def _work(placement: Placement, num_prompt_tokens: int, priority: int, now_s: float, most_seen: float) -> PromptWork:
    known_tokens = placement.cached_tokens + placement.fetched_tokens
    new_tokens = max(num_prompt_tokens - known_tokens, 1)
    ready_s = now_s + placement.ready_s if placement.fetched_tokens else -math.inf
    return PromptWork(new_tokens, known_tokens, priority, ready_s, most_seen)
