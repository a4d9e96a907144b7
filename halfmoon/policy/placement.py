"""Placement: which prefill and which decode worker serve a request. Least loaded on both halves."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.policy.cluster_view import ClusterView, WorkerView

_RETRY_AFTER_MS = 1_000  # a worker that joins or drains takes about a second to show


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together are longer than the model's context, or than any worker's KV memory."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The two workers of a request; one worker of role `both` is both halves."""

    prefill: WorkerView
    decode: WorkerView

    @property
    def decode_address(self) -> str:
        """Where the prefill worker sends the KV; empty when it keeps it."""
        return "" if self.is_colocated else self.decode.address

    @property
    def is_colocated(self) -> bool:
        """Whether one worker does it all."""
        return self.prefill.worker_id == self.decode.worker_id


def place(view: ClusterView, num_prompt_tokens: int, max_tokens: int, exclude: Collection[str] = ()) -> Placement:
    """The least loaded placement for a prompt that may grow by `max_tokens`, without the workers in `exclude`.

    First the fewest prompt tokens waiting before prefill, then a decode worker with room for the prompt now, then
    the fewest requests there, then the most free blocks; ties go to the smaller worker ids. Raises Unavailable when
    a half is missing (now) and ContextLengthExceeded when no present worker can ever hold the request.
    """
    if view.missing:
        raise Unavailable(f"no {' and no '.join(view.missing)} is ready", retry_after_ms=_RETRY_AFTER_MS)
    pairs = list(_pairs(view))
    fitting = [pair for pair in pairs if _fits(pair, num_prompt_tokens, max_tokens)]
    if not fitting:
        most = max(min(pair.prefill.capacity_tokens, pair.decode.capacity_tokens) for pair in pairs)
        raise ContextLengthExceeded(
            f"{num_prompt_tokens} tokens of prompt and {max_tokens} of output are more than any worker can hold: "
            f"together at most {most} tokens fit"
        )
    allowed = [pair for pair in fitting if not {pair.prefill.worker_id, pair.decode.worker_id} & set(exclude)]
    if not allowed:
        raise Unavailable("every worker that could serve the request refused it", retry_after_ms=_RETRY_AFTER_MS)
    return min(allowed, key=lambda pair: _cost(pair, num_prompt_tokens))


def _pairs(view: ClusterView) -> Iterator[Placement]:
    decodes = [worker for worker in view.workers if worker.can_decode]
    for worker in view.workers:
        if worker.can_do_both:
            yield Placement(worker, worker)
        elif worker.can_prefill:
            for decode in decodes:
                yield Placement(worker, decode)


def _fits(pair: Placement, num_prompt_tokens: int, max_tokens: int) -> bool:
    return pair.prefill.holds(num_prompt_tokens + 1) and pair.decode.holds(num_prompt_tokens + max_tokens)


def _cost(pair: Placement, num_prompt_tokens: int) -> tuple[int, bool, int, int, str, str]:
    prefill, decode = pair.prefill, pair.decode
    return (
        prefill.waiting_prefill_tokens,
        not decode.has_room_now(num_prompt_tokens + 1),
        decode.num_requests,
        -decode.free_blocks,
        prefill.worker_id,
        decode.worker_id,
    )
