"""Requests for an engine of a tiny model, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams, TokenOutput

MakeEngine = Callable[..., Engine]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def request(name: str = "a", length: int = 20, max_tokens: int = 12, **options: Any) -> EngineRequest:
    fields = {key: options.pop(key) for key in ("output_token_ids", "prefill_only", "priority") if key in options}
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **options})
    return EngineRequest(name, prompt(length, length), sampling, **fields)


def finish(engine: Engine) -> list[TokenOutput]:
    """All outputs until no work is left, with the books checked after every step."""
    outputs: list[TokenOutput] = []
    for _ in range(500):
        if not engine.has_work():
            return outputs
        outputs += engine.step().outputs
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


def tokens(outputs: Iterable[TokenOutput], name: str = "a") -> list[int]:
    return [output.token_id for output in outputs if output.request_id == name]


def generate(engine: Engine, *requests: EngineRequest) -> dict[str, list[int]]:
    for one in requests:
        engine.add(one)
    outputs = finish(engine)
    return {one.request_id: tokens(outputs, one.request_id) for one in requests}


def requests() -> list[EngineRequest]:
    return [request(f"r{length}", length, max_tokens=14) for length in (1, 7, 8, 19, 33, 40)]


in_any_steps = pytest.mark.parametrize(
    "options",
    [{}, {"max_batch_tokens": 9, "chunk_tokens": 3}, {"num_blocks": 9}],
    ids=["batched", "small chunks", "preempted"],
)
