"""vLLM prefills for us and we for it: each pair of engines gives the tokens that transformers gives.

Skipped without HALFMOON_VLLM_PYTHON, an interpreter with vLLM and our base dependencies: `make test-vllm` has one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer
from tests.e2e.conftest import Reference
from tests.e2e.system import System, running_system
from tests.e2e.test_golden import PROMPTS, check, completion

PYTHON = os.environ.get("HALFMOON_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not PYTHON, reason="HALFMOON_VLLM_PYTHON names no interpreter that has vLLM"),
]

_START_S = 600.0  # vLLM imports and compiles for minutes on busy cores
_ENGINES: Mapping[str, Mapping[str, Any]] = {
    "halfmoon": {},
    "vllm": {
        "engine": "vllm",
        "engine_python": PYTHON,
        "engine_args": "--enforce-eager",
        "kv_memory": "512MiB",
        "max_context_tokens": 2048,
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm-vllm", "vllm-halfmoon", "halfmoon-vllm"])
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """A prefill worker with the first engine and a decode worker with the second, float32, a hand-over each time."""
    prefill, decode = request.param.split("-")
    directory = tmp_path_factory.mktemp("pair")
    file = directory / "halfmoon.yaml"
    workers = {"all": {"dtype": "float32"}, "prefill": [_ENGINES[prefill]], "decode": [_ENGINES[decode]]}
    file.write_text(yaml.safe_dump({"workers": workers, "gateway": {"conditional_disaggregation": "off"}}))
    options = ("--config", str(file))
    async with running_system(directory / "state", *options, start_timeout_s=_START_S) as system:
        yield system


async def test_golden(pair: System, reference: Reference, checkpoint: Checkpoint) -> None:
    tokenizer = Tokenizer(checkpoint)
    async with aiohttp.ClientSession(pair.url) as http:
        for prompt in PROMPTS:
            check(await completion(http, prompt), prompt, reference, tokenizer)
        answers = await asyncio.gather(*(completion(http, prompt) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            check(answer, prompt, reference, tokenizer)
