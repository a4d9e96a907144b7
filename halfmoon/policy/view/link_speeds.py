"""How fast KV travels from one worker to another, as the sending workers measure it."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np

from halfmoon.policy.models.latency import Floats

DEFAULT_BYTES_PER_S = 1e9  # of a link while its sender has measured none


def usual_s_per_byte(measured: Iterable[float]) -> float:
    """What a link costs that was not measured: the median of those that were, or that of DEFAULT_BYTES_PER_S."""
    measured = list(measured)
    return median(measured) if measured else 1.0 / DEFAULT_BYTES_PER_S


class MeasuredLink(Protocol):
    """The measured speed of one link: `n` bytes take about `latency_s + n / bandwidth_bytes_per_s`."""

    @property
    def address(self) -> str:
        """The receiver's."""

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bandwidth."""

    @property
    def latency_s(self) -> float:
        """Latency."""


class LinkCosts(NamedTuple):
    """The speed of the links from one worker to each row of the view. Both arrays are [num_rows]."""

    s_per_byte: Floats
    latency_s: Floats


class LinkSpeeds:
    """Owns the latest report of each sending row, and the row of each address.

    A link without a measurement costs what the sender's others cost in the median; without any it has
    DEFAULT_BYTES_PER_S. Reports are read when they are first asked for.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}  # by address
        self._reports: dict[int, Iterable[MeasuredLink]] = {}
        self._costs: dict[int, LinkCosts] = {}  # of reports that have been read

    def join(self, row: int, address: str) -> None:
        """Says which address a row has."""
        if self._rows.get(address) != row:
            self._rows[address] = row
            self._costs.clear()

    def leave(self, row: int, address: str) -> None:
        """Forgets a row."""
        self._rows.pop(address, None)
        self._reports.pop(row, None)
        self._costs.clear()

    def report(self, row: int, links: Iterable[MeasuredLink]) -> None:
        """Takes all that a sender has measured; it must not change afterwards."""
        self._reports[row] = links
        self._costs.pop(row, None)

    def has_measured(self, row: int) -> bool:
        """Whether a row has sent something."""
        return any(link.bandwidth_bytes_per_s > 0 for link in self._reports.get(row, ()))

    def from_row(self, row: int, num_rows: int) -> LinkCosts:
        """The links from a row. The arrays must not be changed."""
        costs = self._costs.get(row)
        if costs is None or len(costs.latency_s) != num_rows:
            costs = self._costs[row] = self._read(self._reports.get(row, ()), num_rows)
        return costs

    def _read(self, links: Iterable[MeasuredLink], num_rows: int) -> LinkCosts:
        measured = [
            (self._rows[link.address], 1.0 / link.bandwidth_bytes_per_s, link.latency_s)
            for link in links
            if link.address in self._rows and link.bandwidth_bytes_per_s > 0
        ]
        if not measured:
            return LinkCosts(np.full(num_rows, usual_s_per_byte(())), np.zeros(num_rows))
        rows, s_per_byte, latency_s = zip(*measured, strict=True)
        costs = LinkCosts(np.full(num_rows, usual_s_per_byte(s_per_byte)), np.full(num_rows, median(latency_s)))
        costs.s_per_byte[list(rows)] = s_per_byte
        costs.latency_s[list(rows)] = latency_s
        return costs
