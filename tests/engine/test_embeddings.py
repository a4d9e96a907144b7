"""Embeddings are transformers' hidden states, pooled, whatever the company, the chunks, the cache and preemptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.request import Pooling
from tests.engine.engine_runs import MakeEngine, finish, generate, in_any_steps, request, requests


@in_any_steps
def test_they_are_those_of_transformers(
    options: dict[str, Any],
    make_engine: MakeEngine,
    tiny_checkpoint: Callable[[str], Checkpoint],
    reference: Callable[[Checkpoint], Any],
) -> None:
    model, engine = reference(tiny_checkpoint("llama")), make_engine(**options)
    generate(engine, *requests())  # the prefixes are cached now, where there is room
    for number, one in enumerate(requests()):
        pooling: Pooling | None = (None, "last", "mean")[number % 3]
        engine.add(replace(one, sampling=replace(one.sampling, pooling=pooling)))
    outputs = finish(engine)
    for number, one in enumerate(requests()):
        (first,) = [output for output in outputs if output.request_id == one.request_id and output.position == 0]
        if number % 3 == 0:
            assert first.embedding == ()
            continue
        with torch.no_grad():
            ids = torch.tensor([one.prompt_token_ids])
            hidden = model(ids, output_hidden_states=True).hidden_states[-1][0]
        expected = hidden[-1] if number % 3 == 1 else hidden.mean(dim=0)
        assert first.embedding == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_guesses_behind_the_prompt_are_no_part_of_them(pooling: Pooling, make_engine: MakeEngine) -> None:
    """They run beside a prompt's last token, if that is alone."""
    one = replace(request(max_tokens=6, pooling=pooling), prompt_token_ids=(7, 11, 13) * 3)
    plain, guessing = make_engine(), make_engine(speculation="ngram", max_batch_tokens=8, max_running=2)
    for engine in (plain, guessing):
        engine.add(one)
    expected = plain.step().outputs[0].embedding
    assert guessing.step().outputs == ()
    result = guessing.step()
    assert result.num_drafts > 0
    assert result.outputs[0].embedding == pytest.approx(expected, abs=1e-4)
