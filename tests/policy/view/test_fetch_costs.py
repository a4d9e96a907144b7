"""What loading from each holder costs each row, measured or usual."""

from __future__ import annotations

import numpy as np
import pytest

from halfmoon.policy.view.fetch_costs import FetchLink, FetchLinks

USUAL = np.array([1e-3, 2e-3, np.inf])


def test_a_measured_link_costs_what_was_measured_and_others_the_usual() -> None:
    links = FetchLinks()
    assert links.costs(USUAL, np.array([0, 7])).s_per_token.tolist() == [USUAL.tolist()] * 2
    links.report(0, [FetchLink(7, 5e-4, 0.25)])
    links.report(2, [FetchLink(7, 5e-4)])
    costs = links.costs(USUAL, np.array([0, 7]))
    assert costs.s_per_token.tolist() == [USUAL.tolist(), [5e-4, 2e-3, np.inf]], "who cannot load never does"
    assert costs.wait_s.tolist() == [[0.0] * 3, [0.25, 0.0, 0.0]]
    links.report(0, [])
    assert links.costs(USUAL, np.array([7])).s_per_token[0, 0] == pytest.approx(1e-3)


def test_a_number_that_is_used_again_begins_anew() -> None:
    links = FetchLinks()
    links.report(0, [FetchLink(40, 5e-4, 0.25)])
    links.note_store(40)
    assert links.is_store(np.array([3, 40])).tolist() == [False, True]
    links.note_holder(40, serves=False)
    assert links.is_store(np.array([40])).tolist() == [False]
    assert links.costs(USUAL, np.array([40])).s_per_token[0, 0] == pytest.approx(1e-3)
    blocks = np.full(60, 3)
    assert links.serving(blocks)[[39, 40, 41]].tolist() == [3, 0, 3]
    assert len(links.serving(blocks)) == 59, "the last entry belongs to no holder"
