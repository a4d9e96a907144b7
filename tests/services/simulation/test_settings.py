"""Settings of the simulation reach its workers."""

from __future__ import annotations

import pytest

from halfmoon.sim.latency_sources.worker_profile import load_profile
from services.simulation.__main__ import _model
from services.simulation.settings import SimulationSettings


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, None), ({"max_running": 4, "max_batch_tokens": 100, "chunk_tokens": 10}, (100, 10, 4))],
)
def test_given_limits_replace_the_profiles(
    given: dict[str, int], expected: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["simulation"])
    settings = SimulationSettings(gateway="x:1", profile="instant", block_tokens=32, **given)  # type: ignore[arg-type]
    model, named = _model(settings), load_profile("instant")
    profile = model.profile
    assert model.layout.block_tokens == 32
    unlimited = named.max_batch_tokens, named.chunk_tokens, named.max_running
    assert (profile.max_batch_tokens, profile.chunk_tokens, profile.max_running) == (expected or unlimited)
