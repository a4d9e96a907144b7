"""Output lengths are predicted from requests of the same class and prompt length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.output_lengths import OutputLengths


def test_output_lengths() -> None:
    lengths = OutputLengths(window=16)
    assert lengths.predict("a", 100, 50) == 50
    for _ in range(20):
        lengths.add("a", 100, 10)
        lengths.add("a", 1000, 30)
    assert lengths.predict("a", 90, 50) == 10  # prompts of 64 to 127
    assert lengths.predict("a", 1000, 50) == 30
    assert 10 <= lengths.predict("a", 7, 50) <= 30  # of any length
    assert lengths.predict("a", 1000, 20) == 20  # not more than allowed
    assert lengths.predict("b", 100, 50) == 50
    for output in range(16):
        lengths.add("a", 100, output)
    assert lengths.predict("a", 100, 50, 0.5) == pytest.approx(7.5)  # the latest count
    assert lengths.predict("a", 100, 50, 1.0) == 15


@given(st.lists(st.integers(0, 1_000), min_size=8, max_size=40), st.floats(0, 1))
def test_a_prediction_is_the_quantile_that_numpy_gives(lengths: list[int], quantile: float) -> None:
    learned = OutputLengths(window=len(lengths))
    for length in lengths:
        for _ in range(8):  # quantiles may lag by fewer
            learned.add("x", 100, length)
    for length in lengths:
        learned.add("x", 100, length)
    for _ in range(8):
        learned.add("x", 100, lengths[-1])
    kept = ([*lengths, *[lengths[-1]] * 8])[-len(lengths) :]
    assert learned.predict("x", 100, 10_000, quantile) == pytest.approx(np.quantile(kept, quantile))
