"""What sequences under a KV policy keep and see, in the simulator's counts: the engine's rule (`KVPolicy.unseen`).

Counts are those of the step that computes a sequence's last token. From some length on a sequence needs no further
block: the one that it begins is paid for by the one that leaves its window.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from halfmoon.kv.kv_policy import KVPolicy, effective_policy, most_seen, num_chosen, num_pairs, parse_kv_policy
from halfmoon.sim.workloads.workload import Floats, Ints


def policy_of(text: str | None) -> KVPolicy | None:
    """The policy of a class's setting; None: all KV is kept. Raises InvalidRequest."""
    return None if text is None else parse_kv_policy(text)


def num_unseen(policy: KVPolicy | None, num_tokens: int, block_tokens: int) -> int:
    """Blocks of `num_tokens` that have been given back when the last one is computed."""
    return 0 if policy is None or not num_tokens else len(policy.unseen(num_tokens - 1, block_tokens))


def num_dropped(policy: KVPolicy | None, num_prompt: int, num_computed: int, block_tokens: int) -> int:
    """Blocks given back while a prompt is computed: none before the end of one that a policy chooses from."""
    effective = effective_policy(policy, num_prompt, num_computed)
    return 0 if effective is None else len(effective.unseen(num_computed, block_tokens))


class KeptKV(NamedTuple):
    """What all requests of a workload keep; policy None: everything."""

    policy: KVPolicy | None
    block_tokens: int

    def seen(self, num_tokens: Floats) -> Floats:
        """Tokens that decode steps of sequences of so many tokens attend to, at least, in the mean over a block."""
        return np.minimum(num_tokens, most_seen(self.policy, self.block_tokens)[1])

    def pairs(self, num_tokens: Floats) -> Floats:
        """Attention pairs of whole prompts."""
        if self.policy is None or self.policy.chooses:
            return num_tokens**2 / 2
        return np.array([num_pairs(self.policy, 0, int(one), self.block_tokens) for one in num_tokens])

    def chosen(self, prompt_tokens: Ints) -> Ints:
        """Tokens of the blocks for what each prompt will choose, which it needs besides its own."""
        blocks = [num_chosen(self.policy, int(one), self.block_tokens) for one in prompt_tokens]
        return np.array(blocks, dtype=np.int64) * self.block_tokens


ALL_KV = KeptKV(None, 1)
