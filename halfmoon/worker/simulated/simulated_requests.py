"""The requests of a simulated engine: what they answer, and how much of their KV has crossed the modelled link."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.engine.request import EngineRequest, FinishReason, SampledToken, TokenLogprobs
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.kv.frame_plan import Written
from halfmoon.sim.answer_model import AnswerModel
from halfmoon.worker.simulated.simulated_links import SimulatedLinks


@dataclass(slots=True)
class _Present:
    """One request: the length of its answer, and how much of its KV has crossed the link."""

    request: EngineRequest
    num_output: int
    num_queued: int = 0  # tokens whose KV was put on the link
    num_sent: int = 0  # tokens whose KV has crossed it


class SimulatedRequests:
    """Owns the requests that are present. Knows nothing of steps."""

    def __init__(self, answers: AnswerModel, links: SimulatedLinks) -> None:
        self._answers = answers
        self._links = links
        self._present: dict[str, _Present] = {}

    def enter(self, request: EngineRequest) -> None:
        """Draws the length of its answer."""
        sampling = request.sampling
        num_output = self._answers.num_tokens(
            sampling.seed, sampling.max_tokens, sampling.min_tokens, ignore_eos=sampling.ignore_eos
        )
        for position in range(sampling.min_tokens, num_output) if sampling.stop_token_ids else ():
            if self._token_id(request, position) in sampling.stop_token_ids:
                num_output = position + 1
                break
        num_output = max(num_output, len(request.output_token_ids) + 1)
        self._present[request.request_id] = _Present(request, num_output)

    def leave(self, request_id: str) -> None:
        """Forgets one, if it is here."""
        self._present.pop(request_id, None)

    def is_held(self, request_id: str) -> bool:
        """Whether it is here until its KV is handed over."""
        present = self._present.get(request_id)
        return present is not None and present.request.prefill_only

    def num_sent(self, request_id: str) -> int:
        """Tokens whose KV has crossed the link."""
        return self._present[request_id].num_sent

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Why its answer ends with the token that it has now; None if it goes on."""
        if sequence.num_output < self._present[sequence.request_id].num_output:
            return None
        return "length" if sequence.num_output >= sequence.sampling.max_tokens else "stop"

    def next_token(self, sequence: Sequence) -> SampledToken:
        """The next token of its answer."""
        logprobs = None if sequence.sampling.num_top_logprobs is None else TokenLogprobs(0.0, ())
        return SampledToken(self._token_id(sequence.request, sequence.num_output), logprobs)

    def _token_id(self, request: EngineRequest, position: int) -> int:
        return self._answers.token_id(request.sampling.seed, position, request.prompt_token_ids)

    def put_on_link(self, request_id: str, on_kv: OnKV, written: Written | None) -> None:
        """Puts newly computed KV on the link and reports it when it has crossed."""
        if written is None:
            on_kv(None)
            return
        present, num_tokens = self._present[request_id], written.num_tokens
        if num_tokens <= present.num_queued:  # computed again after a preemption
            return
        num_crossing = max(num_tokens - max(present.num_queued, present.request.held_tokens), 0)
        present.num_queued = num_tokens
        wait_s = self._links.crossing_s(num_crossing)
        if wait_s > 0:
            asyncio.get_running_loop().call_later(wait_s, self._report, present, on_kv, num_tokens)
        else:
            self._report(present, on_kv, num_tokens)

    def _report(self, present: _Present, on_kv: OnKV, num_tokens: int) -> None:
        """Reports KV that crossed. Timers of one moment fire in any order, so the count never goes back."""
        is_here = self._present.get(present.request.request_id) is present
        if is_here and num_tokens > present.num_sent:
            present.num_sent = num_tokens
            on_kv(Written(num_tokens))
