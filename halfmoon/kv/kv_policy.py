"""Which part of a request's KV is kept: attention sinks and a window (Xiao et al., StreamingLLM, arXiv 2309.17453).

A policy is counted in whole blocks, rounded up: what is kept is seen, and what is not seen is freed. All tokens of a
block therefore see the same blocks before it. Positions stay those of the text, also behind tokens that were freed.

Requests under a policy compute other KV than requests without one. The policy is thus a part of the salt, which is in
the root of all block keys: no block of such a request is ever found by another one, or the other way round.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from halfmoon.errors import InvalidRequest
from halfmoon.kv.keys import ADAPTER_SALT_BYTES, adapter_of

WHOLE = "whole"  # a request's policy that keeps all KV, whatever its class has
PATTERN = rf"sinks:\d{{1,7}}\+\d{{1,7}}|{WHOLE}"
_SALT = struct.Struct("<cII")
_MARK = b"\xfd"  # begins no text in UTF-8, and no salt of a tenant
_MOST_TOKENS = 1 << 20


class KVPolicy(NamedTuple):
    """The first `num_sinks` tokens and at least the latest `num_window` ones are kept and seen."""

    num_sinks: int
    num_window: int

    def unseen(self, position: int, block_tokens: int) -> range:
        """Blocks between sinks and window, which neither the token at `position` nor any later one sees."""
        first = position // block_tokens - -(-self.num_window // block_tokens)
        sinks = -(-self.num_sinks // block_tokens)
        return range(sinks, max(sinks, first))

    def __str__(self) -> str:
        return f"sinks:{self.num_sinks}+{self.num_window}"


def parse_kv_policy(text: str) -> KVPolicy | None:
    """Reads `sinks:4+1024`; None for `whole`. Raises InvalidRequest."""
    if text == WHOLE:
        return None
    if re.fullmatch(PATTERN, text) is None:
        raise InvalidRequest(
            f"kv_policy is {text!r}: write sinks:S+W, the numbers of first and of latest tokens that are kept, "
            "for example sinks:4+1024, or whole",
            param="kv_policy",
        )
    policy = KVPolicy(*map(int, text.removeprefix("sinks:").split("+")))
    if not 1 <= policy.num_window <= _MOST_TOKENS or policy.num_sinks > _MOST_TOKENS:
        raise InvalidRequest(
            f"kv_policy is {text!r}: the window must have 1 to {_MOST_TOKENS} tokens, and the sinks at most as many",
            param="kv_policy",
        )
    return policy


def policy_salt(policy: KVPolicy | None, tenant_salt: bytes) -> bytes:
    """The salt of KV that is computed under a policy; None: under none."""
    return tenant_salt if policy is None else _SALT.pack(_MARK, *policy) + tenant_salt


def kv_policy_of(salt: bytes) -> KVPolicy | None:
    """The policy that KV under this salt is computed with. Raises InvalidRequest for a salt that was cut."""
    own = salt[ADAPTER_SALT_BYTES:] if adapter_of(salt) else salt
    if not own.startswith(_MARK):
        return None
    if len(own) < _SALT.size:
        raise InvalidRequest("the salt names a policy and is too short for it", param="kv_policy")
    _, num_sinks, num_window = _SALT.unpack_from(own)
    return parse_kv_policy(str(KVPolicy(num_sinks, num_window)))
