"""Which latency model is used for a worker."""

from __future__ import annotations

from services.gateway.cluster.model_fallback import ModelFallback


def test_its_own_once_enough_was_measured_lately() -> None:
    kin = ModelFallback[str]()
    assert kin.model_for("a", "gpu", "own", 0.0) == "own"  # nobody knows better
    kin.note("b", "gpu", "fast", 8, 0.0)
    kin.note("c", "cpu", "slow", 8, 0.0)
    assert kin.model_for("a", "gpu", "own", 0.0) == "fast"
    kin.note("a", "gpu", "own", 7, 1.0)
    assert kin.model_for("a", "gpu", "own", 1.0) == "fast"
    kin.note("a", "gpu", "newest", 1, 2.0)
    assert kin.model_for("a", "gpu", "own", 62.0) == "own"
    assert kin.model_for("b", "gpu", "fast", 62.0) == "newest"  # it was not measured for a minute
    kin.forget("a")
    kin.forget("a")
    assert kin.model_for("a", "gpu", "own", 3.0) == "newest"
    assert kin.model_for("d", "tpu", "own", 3.0) == "own"


def test_the_first_measurement_of_a_kind_counts_for_all_of_it() -> None:
    kin = ModelFallback[str]()
    kin.note("a", "gpu", "first", 1, 0.0)
    assert kin.model_for("b", "gpu", "own", 0.0) == "first"
    kin.note("a", "gpu", "settled", 7, 1.0)
    kin.note("b", "gpu", "hasty", 1, 1.0)
    assert kin.model_for("c", "gpu", "own", 1.0) == "settled"
