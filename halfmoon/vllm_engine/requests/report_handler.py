"""Takes what our connector reports of vLLM's steps, and answers it."""

from __future__ import annotations

import asyncio

from halfmoon.engine.request import CONSTRAINT_TOKEN_ID, ERROR_TOKEN_ID, FinishReason, TokenOutput
from halfmoon.engine.step_result import BlockChain
from halfmoon.vllm_engine.frontend.token_source import TokenSource
from halfmoon.vllm_engine.messages import Ended, Finished, Keep, NotDrawn, Report, Saved, Stepped
from halfmoon.vllm_engine.requests.kept_answers import KeptAnswers
from halfmoon.vllm_engine.requests.present_requests import PresentRequests
from halfmoon.vllm_engine.requests.shared_blocks import SharedBlocks
from halfmoon.vllm_engine.requests.step_results import StepResults


class ReportHandler:
    """Owns how many of vLLM's blocks are free, as of its last step. Event-loop thread only."""

    def __init__(
        self,
        source: TokenSource,
        requests: PresentRequests,
        blocks: SharedBlocks,
        answers: KeptAnswers,
        results: StepResults,
        num_ranks: int,
        num_blocks: int,
    ) -> None:
        """num_ranks: processes that report each layer; num_blocks: of vLLM."""
        self.num_free_blocks = num_blocks
        self._source = source
        self._requests = requests
        self._blocks = blocks
        self._answers = answers
        self._results = results
        self._num_ranks = num_ranks
        self._aborting: set[asyncio.Task[None]] = set()

    def handle(self, report: Report) -> Keep | None:
        """Takes a report; returns the answer to it, if there is one."""
        match report:
            case Saved():
                self._note_saved(report)
            case Ended():
                self._note_ended(report)
            case Finished():
                return self._note_finished(report)
            case Stepped():
                self._note_step(report)
            case NotDrawn():
                self._note_not_drawn(report)
        return None

    def _note_saved(self, report: Saved) -> None:
        entry = self._requests.get(report.request_id)
        if entry is None:
            return
        written, sequence = entry.take_saved(report, self._num_ranks), entry.sequence
        if written is None:
            return
        request = sequence.request
        num_computed = len(request.prompt_token_ids) + len(request.output_token_ids)
        if written.num_tokens == num_computed and self._blocks.insert(sequence, num_computed):
            keys = tuple(sequence.block_keys[: sequence.num_known_blocks])
            self._results.put_chain(BlockChain(request.request_id, keys, request.tenant_salt, request.owner))
        entry.tell_written(written)

    def _note_ended(self, report: Ended) -> None:
        if not self._blocks.has_left(report):
            return
        self._results.put_chain(self._answers.take_saved(report.use))
        entry = self._requests.get(report.request_id)
        if entry is None or entry.use != report.use or entry.on_kv is None:
            self._blocks.give_back(report.use)
        else:
            entry.is_with_vllm = False

    def _note_finished(self, report: Finished) -> Keep | None:
        entry, sequence = self._requests.get(report.request_id), None
        if entry is not None and entry.use == report.use:
            entry.is_kept, sequence = False, entry.sequence
        return self._answers.place(report, sequence, self._requests.new_use())

    def _note_step(self, step: Stepped) -> None:
        self.num_free_blocks = step.num_free_blocks
        num_cached_tokens = {}
        for name, (num_before, num_tokens) in step.prefill_tokens.items():
            entry = self._requests.get(name)
            if entry is not None and entry.sequence.state == "waiting":
                entry.sequence.num_computed = num_before + num_tokens
            if entry is not None and not entry.has_begun:
                entry.has_begun = True
                num_cached_tokens[name] = num_before - (entry.loading.num_loaded_tokens if entry.loading else 0)
        self._results.put_step(step, num_cached_tokens)

    def _note_not_drawn(self, report: NotDrawn) -> None:
        """Ends a request with the reason for which our sampler, inside vLLM, drew no token."""
        entry = self._requests.get(report.request_id)
        if entry is None or entry.sequence.state == "held":
            return
        reason: FinishReason = "constraint" if report.is_constraint else "error"
        token_id = CONSTRAINT_TOKEN_ID if report.is_constraint else ERROR_TOKEN_ID
        self._results.put_output(TokenOutput(report.request_id, token_id, entry.sequence.num_output, reason))
        self._requests.forget(entry)
        aborting = asyncio.create_task(self._source.abort(report.request_id))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)
