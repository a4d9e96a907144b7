"""POST /v1/embeddings: what is asked of the prefill worker, and what its vectors become."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from halfmoon.pb.types_pb2 import LAST_TOKEN, MEAN
from tests.services.gateway.fakes import MODEL, Fleet, running_fleet

PATH = "/v1/embeddings"


async def answer(fleet: Fleet, path: str = PATH, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession(fleet.http) as session, session.post(path, json=body) as response:
        return response.status, await response.json()


async def test_each_input_has_a_vector_of_length_1(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair()
        made = await fleet.client.embeddings.create(model=MODEL, input=["ab", "abc"])  # the SDK asks for base64
        _, tokens = await answer(fleet, input=[1, 2, 3], pooling="mean")
        await fleet.until_idle()
        asked = [one.generation.sampling for one in prefill.calls.prefills]
        assert not decode.calls.prefills
    assert [one.index for one in made.data] == [0, 1]
    for one, num_tokens in zip(made.data, (2, 3), strict=True):
        expected = np.array([3.0, 4.0, num_tokens])
        assert one.embedding == pytest.approx(list(expected / np.linalg.norm(expected)))
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (5, 5)
    assert (tokens["object"], tokens["model"], len(tokens["data"])) == ("list", MODEL, 1)
    assert tokens["id"].startswith("embd-")
    assert tokens["created"] > 0
    assert [(one.max_tokens, one.pooling) for one in asked] == [(1, LAST_TOKEN), (1, LAST_TOKEN), (1, MEAN)]


async def test_form_and_size_are_as_asked(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        _, short = await answer(fleet, input="ab", dimensions=2)
        _, raw = await answer(fleet, input="ab", normalize=False)
        _, coded = await answer(fleet, input="ab", normalize=False, encoding_format="base64")
        status, wide = await answer(fleet, input="ab", dimensions=4)
    assert short["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    assert raw["data"][0]["embedding"] == [3.0, 4.0, 2.0]
    assert np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), dtype="<f4").tolist() == [3.0, 4.0, 2.0]
    assert (status, wide["error"]["param"]) == (400, "dimensions")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [257]}, "input"),
        ({"input": "a" * 300}, "input"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "temperature": 1}, "temperature"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        status, said = await answer(fleet, **body)
        assert (status, said["error"]["param"]) == (400, param), said


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank", "/classify"])
async def test_what_other_models_do_is_refused(tmp_path: Path, path: str) -> None:
    async with running_fleet(tmp_path) as fleet:
        status, said = await answer(fleet, path, query="a", documents=["b"])
    assert status == 400
    assert path in said["error"]["message"]
