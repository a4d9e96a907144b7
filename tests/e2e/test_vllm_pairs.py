"""vLLM prefills for us and we for it: each pair of engines gives the tokens that transformers gives.

Skipped without HALFMOON_VLLM_PYTHON, an interpreter with vLLM and our base dependencies: `make test-vllm` has one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from halfmoon.engine.checkpoint.adapters import read_adapters
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.rpc.credentials.child_environment import child_environment
from tests.e2e.conftest import Reference
from tests.e2e.system import System, running_system, stored
from tests.e2e.test_golden import MAX_TOKENS, PROMPTS, check, completion
from tests.vllm_engine.real_vllm import merged
from tests.vllm_engine.test_with_vllm import adapter, llama, saved

PYTHON = os.environ.get("HALFMOON_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not PYTHON, reason="HALFMOON_VLLM_PYTHON names no interpreter that has vLLM"),
]

_BLOCK_TOKENS = 64
_UNCHANGED = MappingProxyType({"quantization": "none"})  # the demo model as numbers
NAMES = ("sql", "fr")  # of adapters
_LONG_TOKENS = 200  # so many that workers report their load several times meanwhile
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


@asynccontextmanager
async def started(
    directory: Path,
    prefill: Sequence[str],
    decode: Sequence[str],
    placement: PlacementMode = "kvcache-centric",
    model: Mapping[str, Any] = _UNCHANGED,
    **settings: Any,
) -> AsyncIterator[System]:
    """Workers with these engines and further settings, float32, and a hand-over for each request."""
    file = directory / "halfmoon.yaml"
    groups = {"prefill": [_ENGINES[name] for name in prefill], "decode": [_ENGINES[name] for name in decode]}
    everywhere: dict[str, Any] = {"dtype": "float32", **settings}
    workers = {"all": everywhere, **groups}
    gateway = {"conditional_disaggregation": "off", "placement": placement}
    config = {"model": dict(model), "workers": workers, "gateway": gateway}
    file.write_text(yaml.safe_dump(config))
    options = ("--config", str(file))
    async with running_system(directory / "state", *options, start_timeout_s=_START_S) as system:
        yield system


@pytest.mark.parametrize(("prefill", "decode"), [("vllm", "vllm"), ("vllm", "halfmoon"), ("halfmoon", "vllm")])
async def test_golden(prefill: str, decode: str, reference: Reference, checkpoint: Checkpoint, tmp_path: Path) -> None:
    tokenizer = Tokenizer(checkpoint)
    async with started(tmp_path, [prefill], [decode]) as system, aiohttp.ClientSession(system.url) as http:
        for prompt in PROMPTS:
            check(await completion(http, prompt), prompt, reference, tokenizer)
        answers = await asyncio.gather(*(completion(http, prompt) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            check(answer, prompt, reference, tokenizer)


@pytest.mark.parametrize(
    ("state", "prompts", "settings"),
    [
        ("num_running", [f"{prompt} {number}" for number, prompt in enumerate(PROMPTS[3:6] * 2)], {}),
        ("num_reserved", [f"{number} {PROMPTS[7]}" for number in range(4)], {"kv_link_mbps": 10}),  # 2 s of KV each
    ],
    ids=["while it decodes", "before its KV is whole"],
)
async def test_answers_go_on_at_our_engine_when_vllm_is_killed(
    state: str, prompts: Sequence[str], settings: Mapping[str, Any], reference: Reference, tmp_path: Path
) -> None:
    async with (
        started(tmp_path, ["halfmoon"], ["vllm", "halfmoon"], "least-loaded", **settings) as system,
        aiohttp.ClientSession(system.url) as http,
        asyncio.TaskGroup() as group,
    ):
        long: dict[str, Any] = {"max_tokens": _LONG_TOKENS, "ignore_eos": True}
        tasks = [group.create_task(completion(http, prompt, **long)) for prompt in prompts]
        while True:
            (worker,) = [one for one in await system.cluster(http) if one["device"].startswith("vllm")]
            if worker["load"][state] > 0:
                break
            assert not all(task.done() for task in tasks), "no report of the worker's showed what it did"
            await asyncio.sleep(0.02)
        vllm = psutil.Process(worker["pid"]).children(recursive=True)
        known = psutil.Process(worker["pid"]).environ()
        secrets = known.keys() - child_environment(known, "vllm").keys()
        assert secrets
        assert not any(secrets & process.environ().keys() for process in vllm)
        os.kill(worker["pid"], signal.SIGKILL)
        for prompt, task in zip(prompts, tasks, strict=True):
            (choice,) = (await task)["choices"]
            assert choice["token_ids"][:24] == reference(prompt, 24)[:24]
            assert len(choice["token_ids"]) == _LONG_TOKENS
        _, alive = await asyncio.to_thread(psutil.wait_procs, vllm, 30)
        assert not alive, "vLLM outlives its worker"


async def test_a_second_turn_finds_the_answer_in_the_pool(
    reference: Reference, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The decode worker computed the answer: the prefill worker loads its KV, and sends it back with the rest."""
    prompt, num_tokens = PROMPTS[7], len(Tokenizer(checkpoint).encode(PROMPTS[7]))
    async with started(tmp_path, ["vllm"], ["vllm"]) as system, aiohttp.ClientSession(system.url) as http:
        first = await completion(http, prompt, max_tokens=160, ignore_eos=True)
        assert first["choices"][0]["token_ids"][:MAX_TOKENS] == reference(prompt, MAX_TOKENS)
        await stored(http, (num_tokens + 160 - 1) // _BLOCK_TOKENS)
        follow_up = prompt + first["choices"][0]["text"] + " Then the wind turned, and all of them went home."
        second = await completion(http, follow_up)
        assert second["choices"][0]["token_ids"] == reference(follow_up, MAX_TOKENS)
    ((_, plan),) = restores(tmp_path)
    num_found = plan["load_blocks"] + plan["compute_blocks"]  # it may be quicker to compute them
    assert num_found == (num_tokens + 160 - 1) // _BLOCK_TOKENS - num_tokens // _BLOCK_TOKENS


async def test_a_new_vllm_loads_a_known_prompt_and_is_killed_meanwhile(reference: Reference, tmp_path: Path) -> None:
    """Whichever of two computed the prompt is killed, then whichever of the other and the new one loads it."""
    slow: dict[str, Any] = {"max_batch_tokens": 72, "kv_store_mbps": 100}
    prompt = PROMPTS[-1]  # loading takes 0.6 s, computing longer
    async with (
        started(tmp_path, ["vllm", "vllm"], ["halfmoon"], **slow) as system,
        aiohttp.ClientSession(system.url) as http,
    ):

        async def prefills() -> list[dict[str, Any]]:
            return [one for one in await system.cluster(http) if one["role"] == "prefill"]

        first = await completion(http, prompt)
        await stored(http, first["usage"]["prompt_tokens"] // _BLOCK_TOKENS)
        (placement,) = await placements(http)
        (known,) = [one for one in await prefills() if one["worker_id"] == placement["prefill_worker"]]
        os.kill(known["pid"], signal.SIGKILL)
        while len(new := [one for one in await prefills() if one["pid"] != known["pid"]]) < 2:
            await asyncio.sleep(0.5)
        task = asyncio.create_task(completion(http, prompt))
        while not (loading := [worker_id for worker_id, plan in restores(tmp_path) if plan["load_blocks"]]):
            assert not task.done(), await task
            await asyncio.sleep(0.02)
        (process,) = (one["pid"] for one in new if one["worker_id"] == loading[0])
        os.kill(process, signal.SIGKILL)
        again = await task
        (placement, _) = await placements(http)
    workers = [placement["prefill_worker"], *(move["prefill_worker"] for move in placement["moves"])]
    assert sorted(workers) == sorted(one["worker_id"] for one in new)
    assert workers[0] == loading[0]
    for answer in (first, again):
        assert answer["choices"][0]["token_ids"] == reference(prompt, MAX_TOKENS)
    assert (
        first["usage"]["prompt_tokens_details"]["cached_tokens"]
        == 0
        < again["usage"]["prompt_tokens_details"]["cached_tokens"]
    )


def restores(directory: Path) -> list[tuple[str, dict[str, Any]]]:
    """By worker id, how prefill workers planned to load known prefixes, as their logs say."""
    found = []
    for log in (directory / "state" / "logs").glob("prefill-*"):
        lines = log.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]
        ready = [str(event["worker_id"]) for event in events if event["event"] == "service.ready"]
        found += [(ready[-1], event) for event in events if event["event"] == "restore.planned"]
    return found


async def placements(http: aiohttp.ClientSession) -> list[dict[str, Any]]:
    """The newest first."""
    async with http.get("/halfmoon/v1/placements") as response:
        found: list[dict[str, Any]] = await response.json()
        return found


async def test_adapters_are_models_of_the_api(tmp_path: Path) -> None:
    config = llama()
    config.max_position_embeddings = _ENGINES["vllm"]["max_context_tokens"]
    path = saved(config, tmp_path / "tiny")
    named = [adapter(config, tmp_path / name, seed, 4) for seed, name in enumerate(NAMES)]
    model, prompt = {"path": str(path), "lora": named}, [7, *range(100, 190)]
    load = partial(AutoModelForCausalLM.from_pretrained, path, dtype=torch.float32)
    references = {
        "tiny": load(),
        **{name: merged(load(), one) for name, one in zip(NAMES, read_adapters(named), strict=True)},
    }
    async with started(tmp_path, ["vllm"], ["vllm"], model=model) as system, aiohttp.ClientSession(system.url) as http:
        async with http.get("/v1/models") as response:
            parents = {one["id"]: one.get("parent") for one in (await response.json())["data"]}
        assert parents == {"tiny": None, "sql": "tiny", "fr": "tiny"}
        answers = [await completion(http, prompt, model=name, ignore_eos=True) for name in [*references] * 2]
        async with http.post("/v1/completions", json={"model": "en", "prompt": prompt}) as response:
            assert response.status == 404
    for answer in answers:
        (choice,) = answer["choices"]
        assert choice["token_ids"] == greedy(references[answer["model"]], prompt, MAX_TOKENS)
    assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 3


def greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Tokens of `transformers`."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False
        )
    found: list[int] = output[0, len(prompt) :].tolist()
    return found
