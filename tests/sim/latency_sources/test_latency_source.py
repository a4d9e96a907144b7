"""Latency sources by their text: what is none is refused, whatever it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.latency_sources.model_catalogue import is_short_name, model_shape
from halfmoon.sim.latency_sources.worker_profile import load_profile

LONG = "n" * 300  # longer than names of files


def test_a_name_longer_than_files_have_is_no_source() -> None:
    with pytest.raises(InvalidRequest, match="is not a latency source: give"):
        latency_source(LONG)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        latency_source(f"{LONG}.json")
    with pytest.raises(InvalidRequest, match="unknown latency profile"):
        load_profile(LONG)


@pytest.mark.parametrize("name", [LONG, "~nobody-of-this-name"])
def test_a_name_that_no_path_can_have_is_no_model(name: str) -> None:
    assert not is_short_name(name)
    with pytest.raises(InvalidRequest, match="unknown model"):
        model_shape(name)


@pytest.mark.parametrize(
    ("text", "says"),
    [("[" * 100_000, "nested too deeply"), ('{"kv_tokens": 1, "kv_tokens": 2}', "'kv_tokens' is written twice")],
)
def test_a_profile_is_read_strictly(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=says):
        latency_source(str(path))
    with pytest.raises(InvalidRequest, match=says):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"step": [0.01, 0, NaN]}', "prefill and step must not be negative, and finite"),
        ('{"prefill": [Infinity, 0, 0]}', "prefill and step must not be negative, and finite"),
        ('{"kv_token_bytes": NaN}', "kv_token_bytes must be finite"),
        ('{"kv_tokens": 1e300}', "kv_tokens must be at least 1, a whole number"),
        ('{"kv_tokens": true}', "kv_tokens must be at least 1, a whole number"),
        ('{"max_running": 1.5}', "max_running must be at least 1, a whole number"),
        ('{"link_latency_s": Infinity}', "the link must not be negative, and finite"),
        ('{"like": []}', r"is like \[\]; there are instant"),
    ],
)
def test_coefficients_are_numbers_of_a_worker(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=says):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"kv_tokens": 10**30}, "wrong at kv_tokens"),
        ({"step": [{"batch": 1, "context_tokens": 9, "seconds": 1e300}]}, r"wrong at step\.0\.seconds"),
        ({"prefill": [{"new_tokens": 1, "seconds": 1e-300}]}, r"wrong at prefill\.0\.seconds"),
    ],
)
def test_measurements_are_of_a_worker(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    step, prefill = {"batch": 1, "context_tokens": 9, "seconds": 0.1}, {"new_tokens": 1, "seconds": 0.1}
    path = tmp_path / "profile.json"
    path.write_text(
        json.dumps({"kv_tokens": 9, "kv_bytes_per_token": 1, "step": [step], "prefill": [prefill], **changed})
    )
    with pytest.raises(InvalidRequest, match=says):
        latency_source(str(path))
