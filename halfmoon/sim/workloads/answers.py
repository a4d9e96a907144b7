"""Which blocks the answers of a trace complete: the trace does not say, but the next turn of a chat does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from halfmoon.sim.workloads.workload import Ints, Prefixes


def with_answers(prefixes: Prefixes, prompt_tokens: Ints, output_tokens: Ints) -> Prefixes:
    """The prefixes with the blocks of all answers.

    A prompt that begins with all whole blocks of an earlier one, and is longer than that one and its answer, is its
    next turn: what follows there is the answer. A prompt of which every whole block was asked before, as of a common
    beginning, has no next turn unless it is one. Blocks of other answers are in no prompt.
    """
    size = prefixes.block_tokens
    num_tokens = prompt_tokens + output_tokens
    num_whole, num_ends = prompt_tokens // size, (num_tokens - 1) // size
    offsets = np.concatenate([[0], np.cumsum(num_ends - num_whole)])
    ids = int(prefixes.ids.max(initial=0)) + 1 + np.arange(offsets[-1])
    latest: dict[int, int] = {}  # the newest request of each chat, by the last whole block of its prompt
    known: set[int] = set()
    for index in range(len(prompt_tokens)):
        all_ids = prefixes.of(index)
        whole = all_ids[: num_whole[index]].tolist()
        end = next((block for block in reversed(whole) if block in latest), None)
        is_next = end is not None and prompt_tokens[index] >= num_tokens[latest[end]]
        if end is not None and is_next:
            before = latest.pop(end)
            answer = all_ids[num_whole[before] : num_ends[before]]
            ids[offsets[before] : offsets[before] + len(answer)] = answer
        if whole and (is_next or whole[-1] not in known):
            latest[whole[-1]] = index
        known.update(whole)
    return replace(prefixes, answers=Prefixes(size, ids, offsets))
