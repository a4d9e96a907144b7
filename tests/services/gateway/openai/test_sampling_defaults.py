"""What a request leaves out is as the model's generation_config.json says, and neutral without one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from halfmoon.errors import InvalidRequest
from services.gateway.openai.endpoint_bodies import generation_request_of, read_body
from services.gateway.openai.sampling_defaults import NEUTRAL, SamplingDefaults
from tests.services.gateway.fakes import CONTEXT_TOKENS, served_model

OWN: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 30,
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def defaults_of(directory: Path, **fields: Any) -> SamplingDefaults:
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return SamplingDefaults.of_model(directory)


def sampled(defaults: SamplingDefaults, endpoint: str = "chat.completions", **fields: Any) -> dict[str, Any]:
    model = dataclasses.replace(served_model(), defaults=defaults)
    body = read_body(endpoint, json.dumps(fields).encode(), model, CONTEXT_TOKENS).body
    sampling = generation_request_of(body, model, CONTEXT_TOKENS, b"").sampling
    return {name: pytest.approx(getattr(sampling, name)) for name in (*OWN.keys() - {"max_new_tokens"}, "max_tokens")}


def test_the_models_own_values_apply_where_a_request_names_nothing(tmp_path: Path) -> None:
    defaults = defaults_of(tmp_path, **OWN, do_sample=True, eos_token_id=[1, 2], transformers_version="4.51.0")
    expected = {**OWN, "max_tokens": 30}
    del expected["max_new_tokens"]
    assert sampled(defaults, **CHAT) == expected
    assert sampled(defaults, "responses", input="hi") == expected
    assert sampled(defaults, "completions", prompt="hi") == expected | {"max_tokens": 16}


def test_what_a_request_names_wins(tmp_path: Path) -> None:
    said: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 7,
    }
    assert sampled(defaults_of(tmp_path, **OWN), **CHAT, **said) == said


def test_without_a_file_or_with_nulls_sampling_is_neutral(tmp_path: Path) -> None:
    neutral = sampled(NEUTRAL, **CHAT)
    assert neutral["temperature"] == neutral["top_p"] == neutral["repetition_penalty"] == 1
    assert neutral["top_k"] == neutral["min_p"] == 0
    assert neutral["max_tokens"] == CONTEXT_TOKENS - 8
    assert SamplingDefaults.of_model(tmp_path) == defaults_of(tmp_path, top_k=None) == NEUTRAL


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"top_k": "many"}, {"max_new_tokens": 0}])
def test_a_bad_value_in_the_file_says_what_to_do(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(bad))}: .*--generation-config neutral"):
        defaults_of(tmp_path, **bad)
