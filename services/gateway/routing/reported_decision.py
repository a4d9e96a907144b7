"""What operators are shown of one admission and placement: the decision with its reasons."""

from __future__ import annotations

from halfmoon.policy.admission.refusal import Refused
from halfmoon.policy.values import AdmissionTargets, Placement, PlacementRequest
from services.gateway.request import RequestOutput
from services.gateway.routing.routing_context import RoutingContext
from services.gateway.telemetry.decisions import Decision


def report_decision(
    context: RoutingContext,
    output: RequestOutput,
    request: PlacementRequest,
    now_s: float,
    outcome: Placement | Refused,
) -> None:
    """Shows the decision, and counts where its prefix is expected to come from."""
    telemetry = context.telemetry
    placement = None if isinstance(outcome, Refused) else outcome
    decision = Decision(
        request_id=output.request_id,
        at_s=now_s,
        waited_s=now_s - output.progress.arrived_s,
        qos_class=output.qos.name,
        num_prompt_tokens=request.num_prompt_tokens,
        candidates=context.candidates(request.num_prompt_tokens, request.most_seen, outcome.ranked_by, placement),
        prefill_worker=placement.prefill.worker_id if placement else None,
        decode_worker=placement.decode.worker_id if placement else None,
        ttft_s=outcome.ttft_s,
        tbt_s=outcome.tbt_s,
        targets=AdmissionTargets(output.qos.ttft_s, output.qos.tbt_s),
        applied=context.admission.applied(output.qos),
        refusal=outcome.reason if isinstance(outcome, Refused) else None,
        transfer_s=(placement.transfer_s or None) if placement else None,
        disaggregation=placement.disaggregation if placement else None,
        sharing=placement.sharing if placement else None,
        helpers=[helper.worker_id for helper in placement.helpers] if placement else (),
    )
    telemetry.decisions.note(decision)
    if placement is not None:
        telemetry.pool_decisions["prefix", _origin_of_prefix(context, placement, request)] += 1


def _origin_of_prefix(context: RoutingContext, placement: Placement, request: PlacementRequest) -> str:
    """Where the prefix is expected to come from, and else why it is not loaded."""
    serving = context.membership.view().fetch_links.serving(request.cached_blocks)
    best = int(serving.max(initial=0)) * placement.prefill.block_tokens
    if placement.source >= 0:
        return "store" if placement.source == context.membership.stores.holder else "worker"
    if not best:
        return "unknown"
    if best <= placement.cached_tokens or placement.cached_tokens >= request.num_prompt_tokens - 1:
        return "local"
    threshold = context.admission.fetching_threshold
    if threshold is None or best <= threshold * placement.cached_tokens:
        return "below_threshold"
    return "slower"
