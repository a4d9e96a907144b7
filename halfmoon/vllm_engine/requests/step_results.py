"""What the worker is told of vLLM's steps: figures, tokens and cached blocks, together as far as they come together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from halfmoon.engine.request import TokenOutput
from halfmoon.engine.step_result import BlockChain, StepResult
from halfmoon.vllm_engine.frontend.block_events import CacheChange
from halfmoon.vllm_engine.messages import Stepped


class StepResults:
    """Owns what was not told yet. Event-loop thread only."""

    def __init__(self, on_step: Callable[[StepResult], None]) -> None:
        self._on_step = on_step
        self._steps: list[StepResult] = []
        self._outputs: list[TokenOutput] = []
        self._chains: list[BlockChain] = []  # that stores may lack
        self._is_due = False
        self._ended_s = 0.0  # when the latest step did

    def put_step(self, step: Stepped, num_cached_tokens: Mapping[str, int]) -> None:
        """num_cached_tokens: of requests whose first step it is."""
        began_s, self._ended_s = max(step.began_s, self._ended_s), step.ended_s  # vLLM may plan a step during another
        result = _result(step, began_s, num_cached_tokens)
        if not result.is_empty:
            self._steps.append(result)
            self._tell_soon()

    def put_blocks(self, change: CacheChange) -> None:
        """Adds changes of vLLM's cache."""
        if change.stored or change.evicted:
            self._steps.append(StepResult(stored_keys=change.stored, evicted_keys=change.evicted))
            self._tell_soon()

    def put_output(self, output: TokenOutput) -> None:
        """Adds a token."""
        self._outputs.append(output)
        self._tell_soon()

    def put_chain(self, chain: BlockChain | None) -> None:
        """Adds blocks that others may read now."""
        if chain is not None:
            self._chains.append(chain)
            self._tell_soon()

    def _tell_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        steps, outputs, chains = self._steps, tuple(self._outputs), tuple(self._chains)
        self._steps, self._outputs, self._chains, self._is_due = [], [], [], False
        *before, last = steps or [StepResult(ended_s=time.monotonic())]
        for result in (*before, replace(last, outputs=outputs, chains=chains)):
            self._on_step(result)


def _result(step: Stepped, began_s: float, num_cached_tokens: Mapping[str, int]) -> StepResult:
    counts = {name: count for name, (_, count) in step.prefill_tokens.items()}
    return StepResult(
        num_prefill_tokens=sum(counts.values()),
        num_prefill_pairs=sum(count * (before + count / 2) for before, count in step.prefill_tokens.values()),
        num_decode_seqs=step.num_decode_seqs,
        decode_context_tokens=step.decode_context_tokens,
        num_preempted=step.num_preempted,
        duration_s=step.ended_s - began_s,
        ended_s=step.ended_s,
        num_cached_tokens=num_cached_tokens,
        num_computed_tokens=counts,
    )
