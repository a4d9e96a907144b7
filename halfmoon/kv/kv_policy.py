"""Which part of a request's KV is kept: a window, and of what precedes it the first tokens or those that count most.

- `sinks:S+W`: attention sinks (Xiao et al., StreamingLLM, arXiv 2309.17453). All tokens, the prompt's too, see no more.
- `snapkv:B+W`: the prompt is computed whole. At its end each layer and KV head keeps those tokens to which the prompt's
  last ones gave most attention (Li et al., SnapKV, arXiv 2404.14469); what follows sees these and the window.
- `h2o:B+W`: the same by the attention of all tokens of the prompt, which run in one step and come from no cache (Zhang
  et al., H2O, arXiv 2306.14048). Like SnapKV it chooses once: an answer does not change what is kept of its prompt.

A policy is counted in whole blocks, rounded up: what is kept is seen, and what is not seen is freed. All tokens of a
block therefore see the same blocks before it. Positions stay those of the text, also behind tokens that were freed.

Requests under a policy compute other KV than requests without one. The policy is thus a part of the salt, which is in
the root of all block keys: no block of such a request is ever found by another one, or the other way round.
"""

from __future__ import annotations

import math
import re
import struct
from functools import lru_cache
from typing import NamedTuple

from halfmoon.errors import InvalidRequest
from halfmoon.kv.keys import ADAPTER_SALT_BYTES, adapter_of

_MOST_TOKENS = 1 << 20
WHOLE = "whole"  # a request's policy that keeps all KV, whatever its class has
PATTERN = rf"(?:sinks|snapkv|h2o):\d{{1,7}}\+\d{{1,7}}|{WHOLE}"
_SALT = struct.Struct("<cII")
_SINKS = b"\xfd"  # begins no text in UTF-8, and no salt of a tenant
_FAR = 1 << 40  # a position behind any window


class Chooser(NamedTuple):
    """Whose attention says which tokens of a prompt are kept."""

    name: str
    mark: bytes  # of its salts; like `_SINKS`
    num_observers: int  # latest tokens of the prompt that choose, at most
    num_neighbours: int  # a token's attention is the mean over as many, itself in the middle


SNAPKV = Chooser("snapkv", b"\xfc", 32, 7)
H2O = Chooser("h2o", b"\xfb", _MOST_TOKENS, 1)
_CHOOSERS = {chooser.mark: chooser for chooser in (SNAPKV, H2O)}


class KVPolicy(NamedTuple):
    """`num_early` tokens and at least the latest `num_window` ones are kept and seen."""

    num_early: int  # the first ones, or those chosen
    num_window: int
    chooser: Chooser | None = None  # None: the first tokens are kept

    @property
    def chooses(self) -> bool:
        """Whether prompts are computed whole, and what is kept is chosen at their end."""
        return self.chooser is not None

    def unseen(self, position: int, block_tokens: int) -> range:
        """Blocks between the early ones and the window, which no token from `position` on sees.

        Those of a policy that chooses, from the end of the prompt on: what was chosen lies in the early blocks then.
        """
        first = position // block_tokens - -(-self.num_window // block_tokens)
        early = -(-self.num_early // block_tokens)
        return range(early, max(early, first))

    def __str__(self) -> str:
        return f"{'sinks' if self.chooser is None else self.chooser.name}:{self.num_early}+{self.num_window}"


class Bound(NamedTuple):
    """A sequence of more than `most_tokens` sees `mean_seen` tokens, in the mean over a block, and grows no more."""

    most_tokens: int
    mean_seen: int


@lru_cache(maxsize=256)
def bound_of(policy: KVPolicy, block_tokens: int) -> Bound:
    """Where a policy's sequences stop growing."""
    unseen = policy.unseen(_FAR * block_tokens, block_tokens)
    num_seen = _FAR - len(unseen)  # blocks before that of the token itself
    return Bound((num_seen + 1) * block_tokens, num_seen * block_tokens + (block_tokens + 1) // 2)


def most_seen(policy: KVPolicy | None, block_tokens: int) -> tuple[float, float]:
    """Tokens that those of a long prompt and its decode steps see, in the mean over a block; inf: all before them."""
    if policy is None:
        return math.inf, math.inf
    mean_seen = bound_of(policy, block_tokens).mean_seen
    return math.inf if policy.chooses else mean_seen, mean_seen


def effective_policy(policy: KVPolicy | None, num_prompt: int, num_computed: int) -> KVPolicy | None:
    """The policy by which what is computed next sees; None: it sees everything before it.

    One that chooses does not hold before the prompt's end.
    """
    return None if policy is not None and policy.chooses and num_computed < num_prompt else policy


def num_pairs(policy: KVPolicy | None, num_before: int, num_new: int, block_tokens: int) -> float:
    """Pairs of new tokens and those that they see, in the mean over a block; policy None: all tokens before them."""
    num_growing, bounded = num_new, 0.0
    if policy is not None:
        most_tokens, mean_seen = bound_of(policy, block_tokens)
        num_growing = min(max(most_tokens - num_before, 0), num_new)
        bounded = (num_new - num_growing) * (mean_seen - 0.5)
    return num_growing * (num_before + num_growing / 2) + bounded


def num_reusable(policy: KVPolicy | None, num_prompt: int, num_tokens: int) -> int:
    """Leading tokens of `num_tokens` whose KV may come from elsewhere; at least one is left to compute."""
    if policy is None or policy.chooser is None:
        return num_tokens - 1
    return max(num_prompt - policy.chooser.num_observers, 0)


def num_findable(policy: KVPolicy | None, num_prompt: int, num_computed: int) -> int:
    """Leading computed tokens whose KV others may share.

    Under a policy that chooses, the answer's do not see what they would see as a part of a prompt. Where all of a
    prompt choose, nobody looks for any.
    """
    if policy is None or policy.chooser is None:
        return num_computed
    return min(num_computed, num_prompt) if policy.chooser.num_observers < _MOST_TOKENS else 0


def num_at_once(policy: KVPolicy | None, num_prompt: int, num_computed: int, num_tokens: int) -> int:
    """How many of the next `num_tokens` run in one step. The tokens that choose run together, last of a prompt."""
    if policy is None or policy.chooser is None or not num_tokens or num_computed >= num_prompt:
        return num_tokens
    num_left = num_prompt - num_computed
    num_before = num_left - policy.chooser.num_observers
    return num_left if num_tokens >= num_left or num_before <= 0 else min(num_tokens, num_before)


def num_chosen(policy: KVPolicy | None, num_prompt: int, block_tokens: int) -> int:
    """Blocks for what a policy will choose of a prompt, besides those of the prompt; 0: it keeps all of that."""
    if policy is None or not policy.chooses:
        return 0
    unseen = policy.unseen(num_prompt, block_tokens)
    return unseen.start if unseen else 0


def most_tokens(policy: KVPolicy | None, num_blocks: int, block_tokens: int) -> int:
    """The longest request that `num_blocks` hold, with what is chosen of it if any that it chooses of fits."""
    left = (num_blocks - num_chosen(policy, _FAR, block_tokens)) * block_tokens
    return left if num_chosen(policy, left - 1, block_tokens) else num_blocks * block_tokens


def most_blocks(policy: KVPolicy | None, num_prompt: int, num_tokens: int, block_tokens: int) -> int:
    """Blocks that a worker must have to take a request which can become `num_tokens` long.

    An answer that is computed again begins with all of its KV, and what is chosen lies beside that.
    """
    return -(-num_tokens // block_tokens) + num_chosen(policy, num_prompt, block_tokens)


def parse_kv_policy(text: str) -> KVPolicy | None:
    """Reads `sinks:4+1024`, `snapkv:512+64` or `h2o:512+512`; None for `whole`. Raises InvalidRequest."""
    if text == WHOLE:
        return None
    if re.fullmatch(PATTERN, text) is None:
        raise InvalidRequest(
            f"kv_policy is {text!r}: write sinks:S+W, snapkv:B+W or h2o:B+W, the numbers of first or of chosen tokens "
            "and of latest ones that are kept, for example sinks:4+1024, or whole",
            param="kv_policy",
        )
    name, numbers = text.split(":")
    num_early, num_window = map(int, numbers.split("+"))
    chooser = next((chooser for chooser in _CHOOSERS.values() if chooser.name == name), None)
    policy = KVPolicy(num_early, num_window, chooser)
    if not 1 <= policy.num_window <= _MOST_TOKENS or not policy.chooses <= policy.num_early <= _MOST_TOKENS:
        raise InvalidRequest(
            f"kv_policy is {text!r}: the window must have 1 to {_MOST_TOKENS} tokens, what is chosen as many, and the "
            "sinks at most as many",
            param="kv_policy",
        )
    return policy


def policy_salt(policy: KVPolicy | None, tenant_salt: bytes) -> bytes:
    """The salt of KV that is computed under a policy; None: under none."""
    if policy is None:
        return tenant_salt
    mark = _SINKS if policy.chooser is None else policy.chooser.mark
    return _SALT.pack(mark, policy.num_early, policy.num_window) + tenant_salt


def kv_policy_of(salt: bytes) -> KVPolicy | None:
    """The policy that KV under this salt is computed with. Raises InvalidRequest for a salt that was cut."""
    own = salt[ADAPTER_SALT_BYTES:] if adapter_of(salt) else salt
    if not own.startswith((_SINKS, *_CHOOSERS)):
        return None
    if len(own) < _SALT.size:
        raise InvalidRequest("the salt names a policy and is too short for it", param="kv_policy")
    mark, num_early, num_window = _SALT.unpack_from(own)
    return parse_kv_policy(str(KVPolicy(num_early, num_window, _CHOOSERS.get(mark))))
