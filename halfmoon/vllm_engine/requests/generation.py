"""Lets vLLM compute a request, and makes outputs of the tokens that it draws."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from halfmoon.engine.request import ERROR_TOKEN_ID, TokenOutput
from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.kv.keys import adapter_of
from halfmoon.vllm_engine.frontend.token_source import Drawn, Prompt, TokenSource
from halfmoon.vllm_engine.messages import KVOrder
from halfmoon.vllm_engine.requests.present_requests import PresentRequest, PresentRequests
from halfmoon.vllm_engine.requests.shared_blocks import SharedBlocks
from halfmoon.vllm_engine.requests.step_results import StepResults

log = logging.getLogger(__name__)


class Generation:
    """Owns nothing. Event-loop thread only."""

    def __init__(
        self,
        source: TokenSource,
        requests: PresentRequests,
        blocks: SharedBlocks,
        results: StepResults,
        eos_token_ids: frozenset[int],
        drain: Callable[[], None],
        die: Callable[[BaseException], None],
    ) -> None:
        """drain: handles the reports that have been sent by now; die: called when vLLM is gone."""
        self._source = source
        self._requests = requests
        self._blocks = blocks
        self._results = results
        self._eos_token_ids = eos_token_ids
        self._drain = drain
        self._die = die

    async def compute(self, entry: PresentRequest, sampling: Mapping[str, Any], num_blocks: int) -> None:
        """Computes a prompt, once there is room for the KV that is to be read."""
        sequence, loading = entry.sequence, entry.loading
        if num_blocks:
            sequence.blocks = await self._blocks.room(entry.use, num_blocks)
        save_tokens, is_watched = (len(sequence.token_ids) if num_blocks else 0), entry.on_kv is not None
        order = KVOrder(sequence.request_id, entry.use, tuple(sequence.blocks), save_tokens=save_tokens)
        order = replace(order, is_watched=is_watched, is_kept=not is_watched)
        if loading is not None:
            entry.tell_loaded()
            first, last = await loading.useful_tokens()
            order = replace(order, load_from=first, load_tokens=last) if last > first else order
        await self.generate(entry, sampling, order)

    async def generate(self, entry: PresentRequest, sampling: Mapping[str, Any], order: KVOrder) -> None:
        """Gives vLLM a request with this order, and takes its tokens until it has ended."""
        request_id = entry.sequence.request_id
        entry.is_with_vllm, entry.is_kept = True, order.is_kept
        try:
            async with aclosing(self._source.generate(_prompt(entry, sampling, order))) as stream:
                async for drawn in stream:
                    self._drain()  # what is written, and when the step began, is known before its token
                    self._take_tokens(entry, drawn)
            self._fail(entry)  # no more comes, unless it has ended here, too: vLLM may stop within min_tokens
        except InvalidRequest as error:  # vLLM has never had it
            log.warning("request.refused_by_vllm", extra={"request_id": request_id, "reason": error.message})
            entry.is_with_vllm = False
            self._fail(entry)
        except Unavailable as error:
            self._die(error)
        except Exception:
            log.exception("request.failed_in_vllm", extra={"request_id": request_id})
            self._fail(entry)

    def _take_tokens(self, entry: PresentRequest, drawn: Drawn) -> None:
        sequence, prompt_logprobs = entry.sequence, drawn.prompt_logprobs
        for token in drawn.tokens:
            if sequence.state in ("removed", "held"):
                return
            if entry.is_unsaved:  # its KV is wanted and did not come
                self._fail(entry)
                return
            position = sequence.num_output
            sequence.token_ids.append(token.token_id)
            reason = sequence.finish_reason(self._eos_token_ids)
            output = TokenOutput(sequence.request_id, token.token_id, position, reason, token.logprobs, prompt_logprobs)
            prompt_logprobs = ()  # they come with the first token alone
            self._results.put_output(output)
            if sequence.request.prefill_only:
                sequence.state = "held"
            elif reason is not None:
                self._requests.forget(entry)
            else:
                sequence.state = "running"
        if drawn.is_failed:
            self._fail(entry)

    def _fail(self, entry: PresentRequest) -> None:
        sequence = entry.sequence
        if sequence.state not in ("removed", "held"):
            self._results.put_output(TokenOutput(sequence.request_id, ERROR_TOKEN_ID, sequence.num_output, "error"))
            self._requests.forget(entry)


def _prompt(entry: PresentRequest, sampling: Mapping[str, Any], order: KVOrder) -> Prompt:
    request = entry.sequence.request
    is_private = not (order.is_watched or order.is_kept)
    salt = f"private {secrets.token_hex(16)}" if is_private else request.tenant_salt.hex()
    adapter = adapter_of(request.tenant_salt)
    tokens = list(entry.sequence.token_ids)
    return Prompt(request.request_id, tokens, dict(sampling), order, request.priority, salt, adapter)
