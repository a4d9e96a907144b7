"""What it costs each worker to load KV from each holder, as the loading workers measure it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.view.capabilities import Bools

READERS_SHARE = 8  # those who read a worker's prefix cache hold at most one of so many of its blocks


def most_of_reader(num_blocks: int, num_held: int = 0) -> int:
    """Blocks of a worker's `num_blocks` that one reader may hold: half of what others left, so that the next has some.

    num_held: by the others.
    """
    return (max(1, num_blocks // READERS_SHARE) - num_held + 1) // 2


class FetchLink(NamedTuple):
    """The measured link from one holder: `n` tokens take `wait_s + n * s_per_token`."""

    holder: int  # number in the block index
    s_per_token: float
    wait_s: float = 0.0  # latency, and the bytes that are on their way already


class FetchCosts(NamedTuple):
    """Loading from some holders. Both arrays are [num_holders, num_rows]."""

    s_per_token: Floats  # inf where a row cannot load
    wait_s: Floats


class FetchLinks:
    """Owns the measurements by row and holder, which holders are stores, which serve nobody, and how much they hold.

    A link without a measurement costs what the row expects of any, which the caller knows.
    """

    def __init__(self) -> None:
        self._s_per_token: Floats = np.full((16, 16), np.nan)  # [holders, rows], nan: not measured
        self._wait_s: Floats = np.zeros((16, 16))
        self._is_store: Bools = np.zeros(16, dtype=np.bool_)
        self._serves: Bools = np.ones(16, dtype=np.bool_)
        self._most_of_reader: NDArray[np.int64] = np.zeros(16, dtype=np.int64)
        self._has_any = False

    def note_holder(self, holder: int, *, serves: bool = True) -> None:
        """Begins anew with a holder that is a worker, unless `note_store` says else.

        serves: whether others can load from it. One that was never noted serves its prefix cache.
        """
        self._make_room(0, holder)
        self._is_store[holder], self._serves[holder] = False, serves
        self._s_per_token[holder], self._wait_s[holder] = np.nan, 0.0

    def set_serving(self, holder: int, *, serves: bool) -> None:
        """Says whether others can load from a worker from now on: from one that cannot be reached nobody can."""
        self._serves[holder] = serves

    def note_store(self, holder: int) -> None:
        """Says that a holder is a store, or what all stores have together."""
        self._make_room(0, holder)
        self._is_store[holder], self._most_of_reader[holder] = True, 0

    def note_memory(self, holder: int, num_blocks: int) -> None:
        """Says how large a worker's KV memory is, of which it holds a part for those who read its cache."""
        self._make_room(0, holder)
        self._most_of_reader[holder] = most_of_reader(num_blocks)

    def most_of_reader(self, holders: NDArray[np.int64]) -> NDArray[np.int64]:
        """Most blocks that each of these would hold for one reader at once; 0 for stores."""
        self._make_room(0, int(holders.max(initial=0)))
        most: NDArray[np.int64] = self._most_of_reader[holders]
        return most

    def report(self, row: int, links: Iterable[FetchLink]) -> None:
        """Takes all that a row has measured."""
        links = list(links)
        self._make_room(row, max((link.holder for link in links), default=0))
        self._s_per_token[:, row], self._wait_s[:, row] = np.nan, 0.0
        for link in links:
            self._s_per_token[link.holder, row], self._wait_s[link.holder, row] = link.s_per_token, link.wait_s
        self._has_any |= bool(links)

    def is_store(self, holders: NDArray[np.int64]) -> Bools:
        """Whether each of these is a store."""
        self._make_room(0, int(holders.max(initial=0)))
        is_store: Bools = self._is_store[holders]
        return is_store

    def serving(self, cached_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Leading blocks of each holder that others can load. cached_blocks: `BlockIndex.match`."""
        self._make_room(0, len(cached_blocks))
        blocks: NDArray[np.int64] = cached_blocks[:-1] * self._serves[: len(cached_blocks) - 1]
        return blocks

    def costs(self, usual_s_per_token: Floats, holders: NDArray[np.int64], first_row: int = 0) -> FetchCosts:
        """Costs of the rows from `first_row` on, from these holders.

        usual_s_per_token: [num_rows] where nothing was measured.
        """
        num_rows, usual = len(usual_s_per_token), usual_s_per_token
        if not self._has_any:
            shape = len(holders), num_rows
            return FetchCosts(np.broadcast_to(usual, shape), np.zeros(shape))
        rows = slice(first_row, first_row + num_rows)
        self._make_room(rows.stop, int(holders.max(initial=0)))
        measured = self._s_per_token[holders, rows]
        s_per_token = np.where(np.isnan(measured) | np.isinf(usual), usual, measured)
        return FetchCosts(s_per_token, self._wait_s[holders, rows])

    def is_measured(self, holders: NDArray[np.int64], first_row: int, num_rows: int) -> Bools:
        """Which of these links were measured [num_holders, num_rows]."""
        self._make_room(first_row + num_rows, int(holders.max(initial=0)))
        is_measured: Bools = ~np.isnan(self._s_per_token[holders, first_row : first_row + num_rows])
        return is_measured

    def _make_room(self, row: int, holder: int) -> None:
        while row >= self._s_per_token.shape[1]:
            self._s_per_token = np.hstack([self._s_per_token, np.full_like(self._s_per_token, np.nan)])
            self._wait_s = np.hstack([self._wait_s, np.zeros_like(self._wait_s)])
        while holder >= len(self._serves):
            self._s_per_token = np.concatenate([self._s_per_token, np.full_like(self._s_per_token, np.nan)])
            self._wait_s = np.concatenate([self._wait_s, np.zeros_like(self._wait_s)])
            self._is_store = np.concatenate([self._is_store, np.zeros_like(self._is_store)])
            self._serves = np.concatenate([self._serves, np.ones_like(self._serves)])
            self._most_of_reader = np.concatenate([self._most_of_reader, np.zeros_like(self._most_of_reader)])
