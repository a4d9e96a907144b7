"""How much a step is going to compute."""

from __future__ import annotations

from halfmoon.engine.scheduling.paused_sequences import PauseCounts
from halfmoon.engine.scheduling.schedule import Schedule
from halfmoon.engine.step_result import StepResult
from halfmoon.kv.kv_policy import num_pairs


def step_counts(schedule: Schedule, pauses: PauseCounts, block_tokens: int) -> StepResult:
    """The counts for a step's result, taken before its outcome is booked."""
    num_paused, num_moved_out, paused_s = pauses.take() if schedule.scheduled else (0, 0, 0.0)  # empty: not reported
    decodes = schedule.scheduled[: schedule.num_decode_seqs]
    prefills = schedule.scheduled[schedule.num_decode_seqs :]
    return StepResult(
        num_prefill_tokens=sum(item.num_tokens for item in prefills),
        num_prefill_pairs=sum(
            num_pairs(item.sequence.effective_policy, item.start, item.num_tokens, block_tokens) for item in prefills
        ),
        num_decode_seqs=schedule.num_decode_seqs,
        decode_context_tokens=sum(item.num_seen(block_tokens) for item in decodes),
        num_drafts=sum(len(item.drafts) for item in schedule.scheduled),
        num_preempted=schedule.num_preempted,
        num_paused=num_paused,
        num_moved_out=num_moved_out,
        paused_s=paused_s,
        num_cached_tokens={
            item.sequence.request_id: item.sequence.num_cached
            for item in schedule.scheduled
            if not item.sequence.has_begun
        },
        num_computed_tokens={item.sequence.request_id: item.num_tokens for item in prefills},
    )
