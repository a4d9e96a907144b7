"""Whose model is believed of a worker."""

from __future__ import annotations

from halfmoon.policy.kinship import Kinship


def test_its_own_once_enough_was_measured_lately() -> None:
    kin = Kinship[str]()
    assert kin.believed("a", "gpu", "own", 0.0) == "own"  # nobody knows better
    kin.note("b", "gpu", "fast", 8, 0.0)
    kin.note("c", "cpu", "slow", 8, 0.0)
    assert kin.believed("a", "gpu", "own", 0.0) == "fast"
    kin.note("a", "gpu", "own", 7, 1.0)
    assert kin.believed("a", "gpu", "own", 1.0) == "fast"
    kin.note("a", "gpu", "newest", 1, 2.0)
    assert kin.believed("a", "gpu", "own", 62.0) == "own"
    assert kin.believed("b", "gpu", "fast", 62.0) == "newest"  # it was not measured for a minute
    kin.forget("a")
    kin.forget("a")
    assert kin.believed("a", "gpu", "own", 3.0) == "newest"
    assert kin.believed("d", "tpu", "own", 3.0) == "own"
