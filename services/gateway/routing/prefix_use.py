"""The use of a known prefix by one output: counted, and copied to where it will be asked for.

That is a hot prefix, and a turn of a conversation that is kept.
"""

from __future__ import annotations

from halfmoon.kv.owner import KVOwner
from halfmoon.policy.values import Placement, PlacementRequest
from services.gateway.cluster.prefix_replication import PromptBlocks
from services.gateway.cluster.prompt_keys import PromptKeys
from services.gateway.request import RequestOutput
from services.gateway.routing.routing_context import RoutingContext


def note_prefix_use(
    context: RoutingContext,
    output: RequestOutput,
    keys: PromptKeys | None,
    request: PlacementRequest,
    now_s: float,
    placement: Placement | None = None,
) -> None:
    """Counts the known prefix where it was asked for, and has it copied to where it will be if it is hot."""
    if keys is None or not keys.chains:
        return
    membership, telemetry = context.membership, context.telemetry
    worker_id = "" if placement is None else placement.prefill.worker_id
    chain = keys.chain(membership.layout_of(worker_id)) or keys.chains[0]
    near = membership.nearest_store(worker_id)
    cached_blocks, block_tokens = request.cached_blocks, chain.layout.block_tokens
    num_uses = telemetry.prefixes.note(chain.short, cached_blocks, block_tokens, now_s, near, membership.stores.holder)
    if placement is None or (membership.stores.addresses and not near):
        return
    tenant, depth = output.tenant, min(int(cached_blocks.max(initial=0)), len(chain.keys))
    owner = KVOwner(tenant.name, tenant.kv_bytes or 0)
    blocks = PromptBlocks(chain.keys[:depth], chain.layout, output.tenant_salt, owner, output.prompt_token_ids)
    if near:
        decision = context.copies.consider(near, num_uses, blocks, now_s)
    else:
        decision = context.copies.spread(request, placement, num_uses, blocks, now_s)
    if decision is not None:
        telemetry.pool_decisions["copy", decision] += 1


def bring_next_turn(context: RoutingContext, output: RequestOutput) -> None:
    """Has the KV of a finished turn copied from where it was decoded to where the next turn is likely to be read.

    That is the prefill worker of this turn: it has the prompt's KV, and lacks the answer's.
    """
    membership, progress, tenant = context.membership, output.progress, output.tenant
    members = {member.worker_id: member for member in membership.members()}
    source, target = members.get(progress.decode_worker or ""), members.get(progress.prefill_worker or "")
    if not progress.is_complete or source is None or target is None or source is target:
        return
    layout = membership.layout_of(target.worker_id)
    if layout is None or layout != membership.layout_of(source.worker_id):
        return
    token_ids = [*output.prompt_token_ids, *progress.output_token_ids]
    keys = PromptKeys(membership.model_fingerprint, [layout], output.tenant_salt)
    keys.extend(token_ids[:-1])  # the last token of an answer is not computed
    owner = KVOwner(tenant.name, tenant.kv_bytes or 0)
    blocks = PromptBlocks(keys.chains[0].keys, layout, output.tenant_salt, owner, token_ids)
    decision = context.copies.bring(source, target, blocks, context.clock())
    if decision is not None:
        context.telemetry.pool_decisions["copy", decision] += 1
