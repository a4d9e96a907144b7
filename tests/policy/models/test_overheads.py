"""What the hand-over adds to the first gaps."""

from __future__ import annotations

import pytest

from halfmoon.policy.models.overheads import handover_s


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("num_groups", [8, 9])
def test_tokens_that_come_together_change_no_handover(together: int, num_groups: int) -> None:
    """As those of decode steps of 3 ms do, which share messages."""
    group = [0.003 * together] + [0.0] * (together - 1)
    first = [0.023, *group[1:], *group * 4][:4]
    late = sum(first) - 4 * 0.003
    assert handover_s([*first, *group * num_groups]) == pytest.approx(late)
    assert late < 0.03


def test_of_few_tokens_nothing_is_known() -> None:
    assert handover_s([0.02] * 7) is None
    assert handover_s([]) is None
