"""Placement: which prefill and which decode worker serve a request. Mooncake's Algorithm 1, and its baselines."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.placement.conditional import ConditionalDisaggregation, ConditionalMode, KeepingMode
from halfmoon.policy.placement.device_rules import DeviceRule, allowed_rows
from halfmoon.policy.placement.forecast import Forecast
from halfmoon.policy.placement.prompt_sharing import share_prompt
from halfmoon.policy.placement.ranking import PREDICTING_MODES, PlacementMode, Ranking
from halfmoon.policy.values import Placement, PlacementRequest, TtftPrediction
from halfmoon.policy.view.capabilities import Bools, RoleMasks
from halfmoon.policy.view.cluster_view import ClusterView

_RETRY_AFTER_MS = 1_000  # a worker that joins or drains takes about a second to show


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together exceed the model's context, or the KV memory of every worker."""


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """How workers are chosen.

    - kvcache-centric: least predicted TTFT, fetching prefixes where that pays; then least predicted TBT, with what it
      takes to hand over what is missing. A conversation stays with its decode worker unless another is clearly better.
      Among workers of role `both`, those that meet both targets come first, and TBT breaks ties of TTFT.
    - cache-aware: the same without fetching from other workers. A restore from a store always counts.
    - least-loaded: fewest waiting prompt tokens; fewest requests.
    - random: any worker that fits.

    In the last two, the decode worker that they chose is the only one that may compute the prompt (`conditional`).
    """

    mode: PlacementMode = "kvcache-centric"
    balancing_threshold: float = 2.0  # best prefix / local prefix above which the best is fetched
    conditional: ConditionalMode = "off"  # whether decode workers compute prompts
    devices: tuple[DeviceRule, ...] = ()  # which prompts workers of a device compute
    max_prefill_degree: int = 1  # most prefill workers that compute one prompt; only in modes that predict TTFT

    @property
    def fetching_threshold(self) -> float | None:
        """The balancing threshold; None in modes that fetch nothing."""
        return self.balancing_threshold if self.mode == "kvcache-centric" else None

    @property
    def predicts_ttft(self) -> bool:
        """Whether the mode ranks workers by predicted TTFT."""
        return self.mode in PREDICTING_MODES

    @property
    def may_share(self) -> bool:
        """Whether several prefill workers may compute one prompt."""
        return self.max_prefill_degree > 1 and self.predicts_ttft

    def keeping_mode(self, *, is_failover: bool = False) -> KeepingMode:
        """When decode workers compute the prompts of new requests, or of failovers."""
        if self.conditional == "off":
            return "off"
        if is_failover:
            return "auto"
        return "off" if self.conditional == "failover" else self.conditional


def place(
    view: ClusterView,
    request: PlacementRequest,
    rules: PlacementRules,
    forecast: Forecast,
    now_s: float,
    rng: random.Random,
    estimates: TtftPrediction | None = None,
) -> Placement:
    """Chooses both workers of a request: estimates all, ranks them, refines the best, then chooses the decode worker.

    `estimates` is `forecast.ttft` of this request, if already known. Ties are broken at random so that equal workers
    share the load. Raises Unavailable if a role is missing (now), and ContextLengthExceeded if no present worker can
    ever hold the request.
    """
    keeping = rules.keeping_mode(is_failover=request.is_failover)
    rows = _eligible(view, request, goes_alone=request.is_failover and keeping != "off")
    rows = allowed_rows(rules.devices, view, request, rows)
    ranking = Ranking(view, rules.mode, request)
    conditional = ConditionalDisaggregation(view, request, keeping, forecast, now_s)

    # 1. Estimate the TTFT on every worker, and rank by it.
    ttft = estimates or forecast.ttft(view, request, now_s)
    if np.logical_or.reduce(rows.both):
        begins_s = now_s + float(np.minimum.reduce(ttft.seconds[rows.prefill | rows.both]))
        loads = forecast.decode_loads(view, begins_s, now_s)
        prefill = ranking.best_of_any(ttft, loads, rows.prefill, rows.decode, rows.both, rng)
    else:
        prefill = ranking.best_prefill(ttft, rows.prefill, rng)
    prefill_reason = ranking.why_prefill(ttft, rows.prefill | rows.both, prefill)

    # 2. Refine the best. Estimates ignore colocated workers; if these cost more than another host would, go there.
    def refined(row: int) -> Placement:
        return forecast.refine_prefill(view, request, _on_prefill_worker(view, row, ttft), now_s)

    chosen = refined(prefill)
    if chosen.prefill.contention > 0:
        elsewhere = ranking.best_elsewhere(ttft, rows.prefill, prefill, rng)
        if elsewhere is not None and ttft.seconds[elsewhere] < chosen.ttft_s - chosen.overhead_s:
            other = refined(elsewhere)
            if other.ttft_s < chosen.ttft_s:
                prefill, chosen, prefill_reason = elsewhere, other, "other_host"

    if rules.may_share and rows.prefill[prefill]:
        chosen = share_prompt(view, request, chosen, rows.prefill, rules.max_prefill_degree)

    # 3. Choose the decode worker by the load at the moment when this prefill ends. One of them may do all of it.
    if rows.both[prefill]:
        decode, load = prefill, forecast.decode_load(prefill, now_s + chosen.ttft_s, now_s)
        if rows.decode[decode]:
            chosen = replace(chosen, disaggregation="kept_alone", decode_reason="computes_prompt")
        else:
            chosen = replace(chosen, prefill_reason=prefill_reason, decode_reason="both_roles")
    else:
        begins_s = now_s + chosen.ttft_s
        loads = forecast.decode_loads(view, begins_s, now_s)
        handover = forecast.handover(view, request, chosen, begins_s)
        decodes = _paired(view, prefill, rows.decode)
        decode, decode_reason = ranking.best_decode(loads, handover, decodes, rng)
        load = loads.of(decode)
        chosen = replace(
            chosen,
            handover_s=float(handover.exposed_s[decode]),
            handover_bytes=float(handover.num_bytes[decode]),
            held_tokens=int(handover.held_tokens[decode]),
            prefill_reason=prefill_reason,
            decode_reason=decode_reason,
        )
        may_compute = rows.decode if rules.predicts_ttft else rows.decode & (np.arange(view.num_rows) == decode)
        choice = conditional.choose(may_compute, ttft, loads, chosen, refined, rng)
        if choice.kept is None or choice.row is None:
            chosen = replace(chosen, disaggregation=choice.reason)
        else:
            chosen = replace(choice.kept, disaggregation=choice.reason, decode_reason="computes_prompt")
            decode, load = choice.row, forecast.decode_load(choice.row, now_s + chosen.ttft_s, now_s)
    load = forecast.load_beside(view, request, decode, load, now_s + chosen.ttft_s, now_s)
    worker = view.worker(decode)
    tbt_s = worker.step_model.seconds(load.batch + 1, load.context_tokens + request.context_tokens())
    chosen = replace(chosen, decode=worker, tbt_s=tbt_s, tbt_target_s=request.tbt_target_s)
    return forecast.refine_decode(view, request, chosen, now_s)


def _paired(view: ClusterView, prefill: int, decodes: Bools) -> Bools:
    """The decode workers of the prefill worker's unit (DistServe, Algorithm 2); all where there are none."""
    unit = view.in_unit_of(prefill)
    within = decodes if unit is None else decodes & unit
    return within if np.logical_or.reduce(within) else decodes


def _on_prefill_worker(view: ClusterView, row: int, ttft: TtftPrediction) -> Placement:
    """A placement whose decode worker is not chosen yet."""
    worker = view.worker(row)
    return Placement(
        worker,
        worker,
        float(ttft.seconds[row]),
        cached_tokens=int(ttft.cached_tokens[row]),
        fetched_tokens=int(ttft.fetched_tokens[row]),
        source=ttft.source_of(row),
        transfer_s=ttft.transfer_s_of(row),
        ready_s=ttft.ready_s_of(row),
        queue_s=float(ttft.queue_s[row]),
        work_s=float(ttft.seconds[row] - ttft.queue_s[row]),
        ranked_by=ttft,
    )


def some_decode_only_fewer(view: ClusterView, num_tokens: int, fewer_tokens: int) -> bool:
    """Whether some decode worker can hold a sequence of `fewer_tokens` but not of `num_tokens`."""
    capacity, num_rows = view.column("capacity_tokens"), view.num_rows
    decodes = view.can_decode[:num_rows] | view.can_do_both[:num_rows]
    return bool((decodes & (capacity >= fewer_tokens) & (capacity < num_tokens)).any())


def _eligible(view: ClusterView, request: PlacementRequest, *, goes_alone: bool) -> RoleMasks:
    """The workers that can hold the request and are not excluded.

    goes_alone: where no worker is left that prefills, decode workers serve it as those of both roles do.
    """
    known = view.capabilities
    longest = request.num_prompt_tokens + max(request.max_tokens, 1)
    if longest <= known.least_capacity_tokens and known.is_complete and not request.exclude:  # the common case
        return known.useful
    present, capacity = known.present, view.column("capacity_tokens")
    holds_prompt = capacity >= request.num_prompt_tokens + 1
    holds_all = capacity >= request.num_prompt_tokens + request.max_tokens
    fitting = RoleMasks(present.prefill & holds_prompt, present.decode & holds_all, present.both & holds_all)
    may_go_alone = known.may_keep & goes_alone
    if not _or_alone(fitting, may_go_alone).is_any:
        if view.missing:
            raise Unavailable(f"no {' and no '.join(view.missing)} is ready", retry_after_ms=_RETRY_AFTER_MS)
        raise ContextLengthExceeded(
            f"{request.num_prompt_tokens} tokens of prompt and {request.max_tokens} of output are more than any "
            f"worker can hold: together at most {_longest_that_fits(present, capacity)} tokens fit"
        )
    allowed = np.ones(view.num_rows, dtype=np.bool_)
    allowed[view.rows_of(request.exclude)] = False
    left = RoleMasks(fitting.prefill & allowed, fitting.decode & allowed, fitting.both & allowed)
    left = _or_alone(left, may_go_alone)
    if not left.is_any:
        raise Unavailable("every worker that could serve the request refused it", retry_after_ms=_RETRY_AFTER_MS)
    return left.useful


def _or_alone(rows: RoleMasks, may_go_alone: Bools) -> RoleMasks:
    """The rows, where none of them prefills with decode workers for all of the request."""
    if np.logical_or.reduce(rows.prefill | rows.both):
        return rows
    return rows._replace(both=rows.decode & may_go_alone)


def _longest_that_fits(present: RoleMasks, capacity: Floats) -> int:
    """The longest sequence that any pair of workers can hold."""
    prefill, decode, both = (float(capacity[rows].max(initial=0.0)) for rows in present)
    return int(max(min(prefill, decode), both))
