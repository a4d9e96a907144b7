"""Log-probabilities of a prompt are transformers', whatever the company, the chunks, the cache and preemptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.request import TokenLogprobs
from halfmoon.worker.servicers.wire import prompt_logprob_message
from tests.engine.engine_runs import MakeEngine, finish, generate, in_any_steps, request, requests, tokens


@in_any_steps
def test_they_are_those_of_transformers(
    options: dict[str, Any],
    make_engine: MakeEngine,
    tiny_checkpoint: Callable[[str], Checkpoint],
    reference: Callable[[Checkpoint], Any],
) -> None:
    model, engine = reference(tiny_checkpoint("llama")), make_engine(**options)
    plain = generate(make_engine(), *requests())
    generate(engine, *requests())  # the prefixes are cached now, where there is room
    for one in requests():
        wanted = one.request_id != "r19"  # others beside them have none
        sampling = replace(one.sampling, num_prompt_logprobs=2 if wanted else None)
        engine.add(replace(one, sampling=sampling))
    outputs = finish(engine)
    for one in requests():
        (first,) = [output for output in outputs if output.request_id == one.request_id and output.position == 0]
        assert tokens(outputs, one.request_id) == plain[one.request_id]
        if one.request_id == "r19":
            assert first.prompt_logprobs == ()
            continue
        ids = torch.tensor(one.prompt_token_ids)
        with torch.no_grad():
            expected = model(ids.unsqueeze(0)).logits[0, :-1].log_softmax(dim=-1)
        assert len(first.prompt_logprobs) == len(ids) - 1
        for target, logprobs, found in zip(ids[1:].tolist(), expected, first.prompt_logprobs, strict=True):
            assert found.logprob == pytest.approx(float(logprobs[target]), abs=1e-4)
            assert found.rank == int((logprobs > logprobs[target]).sum()) + 1
            assert [token for token, _ in found.top] == logprobs.topk(2).indices.tolist()


def test_another_worker_that_goes_on_computes_none(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(request(output_token_ids=(5, 6), num_prompt_logprobs=1))
    assert all(not output.prompt_logprobs for output in finish(engine))


def test_they_travel() -> None:
    message = prompt_logprob_message(TokenLogprobs(-2.5, ((7, -0.5), (3, -1.5)), 4))
    assert (message.logprob, message.rank) == (-2.5, 4)
    assert [(top.token_id, top.logprob) for top in message.top_logprobs] == [(7, -0.5), (3, -1.5)]
