"""A host whose workers are busy at given times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from halfmoon.policy.forecast.colocated_workers import BusySpan, ColocatedWorkers, Spans


def _spans_of(by_row: Mapping[int, Sequence[BusySpan]]) -> Spans:
    """As they are, apart or not."""
    flat = [(row, *span) for row, of_row in by_row.items() for span in of_row]
    rows, begins_s, ends_s = np.array(flat, dtype=np.float64).reshape(-1, 3).T
    return Spans(rows.astype(np.int64), begins_s, ends_s)


def beside(by_row: Mapping[int, Sequence[BusySpan]]) -> ColocatedWorkers:
    """From second 0 on, by row of the cluster view."""
    return ColocatedWorkers(by_row, _spans_of(by_row).union(0.0))
