"""Prompts for a workload's requests, which have lengths and shared prefixes but no text. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from halfmoon.sim.workloads.workload import Ints, Workload

_FIRST_TOKEN, _NUM_TOKENS = 1_000, 29_000
_REQUEST_BITS = 26  # for the places of one request's tokens
_OWN = 1 << 62  # above any block id: tokens that a request shares with no other


class Prompts:
    """Token ids of a workload's prompts, equal exactly where the workload's block ids are.

    Token ids are hashes, from a range that common vocabularies of 32,000 and more use for words. Workloads with
    different `first_request`s have no block in common either, so that a trace played again finds nothing cached.
    """

    def __init__(self, workload: Workload, first_request: int = 0) -> None:
        self._workload = workload
        self._first_request = first_request

    def of(self, index: int) -> Ints:
        """The prompt of request `index`."""
        num_tokens = int(self._workload.prompt_tokens[index])
        shared = self._shared(index)[:num_tokens]
        own = own_tokens(self._first_request + index, num_tokens)[len(shared) :]
        return np.concatenate([shared, own])

    def _shared(self, index: int) -> Ints:
        """The tokens of its blocks with ids. The last block may reach beyond the prompt."""
        prefixes = self._workload.prefixes
        if prefixes is None:
            return np.zeros(0, dtype=np.int64)
        size = prefixes.block_tokens
        places = prefixes.of(index)[:, None] * size + np.arange(size)
        salt = _mixed(np.array([self._first_request], dtype=np.uint64)) & np.uint64(_OWN - 1)
        return _tokens(places.ravel().astype(np.uint64) ^ salt)


def own_tokens(number: int, num_tokens: int) -> Ints:
    """Tokens that the request `number` shares with no other."""
    first = _OWN + (number << _REQUEST_BITS)
    return _tokens(np.arange(first, first + num_tokens, dtype=np.uint64))


def _tokens(places: NDArray[np.uint64]) -> Ints:
    """Token ids from positions that no two blocks share."""
    result: Ints = _FIRST_TOKEN + (_mixed(places) % np.uint64(_NUM_TOKENS)).astype(np.int64)
    return result


def _mixed(places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer; 0 stays 0."""
    mixed = (places ^ (places >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result
