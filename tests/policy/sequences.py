"""Sequences that decode on a worker, for who computes prompts beside them."""

from __future__ import annotations

import numpy as np

from halfmoon.policy.forecast.colocated_decodes import DecodeIntervals


def lives(*each: tuple[float, float]) -> DecodeIntervals:
    """Of each when it ends, and its tokens."""
    ends_s, context_tokens = np.array(each, dtype=np.float64).reshape(-1, 2).T
    return DecodeIntervals(ends_s, context_tokens, np.full(len(ends_s), np.inf))
