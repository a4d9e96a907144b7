"""The demo model says what transformers says with the same weights, greedily."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.text.tokenizer import Tokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the moon.",
    "Count from one to ten.",
)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def prompts(demo: Checkpoint) -> list[list[int]]:
    tokenizer = Tokenizer(demo)
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


def test_greedy_answers_equal_transformers(
    demo: Checkpoint, prompts: list[list[int]], reference: Callable[[Checkpoint], Any]
) -> None:
    numbers = replace(demo, quantization="none")  # not the file's blocks, with which x has eight bits
    engine = Engine(numbers, EngineConfig(dtype="float32", num_blocks=16, chunk_tokens=16))
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        engine.add(EngineRequest(str(index), tuple(prompt), sampling))
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    while engine.has_work():
        for output in engine.step().outputs:
            answers[output.request_id].append(output.token_id)
    model = reference(demo)
    for index, prompt in enumerate(prompts):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answers[str(index)]])).logits[0]
        # Greedy decoding is right exactly if each token is the likeliest one after all that precede it.
        assert answers[str(index)] == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        assert len(answers[str(index)]) == NUM_TOKENS or answers[str(index)][-1] in demo.eos_token_ids


def test_it_knows_the_capital_of_france_in_the_dtype_of_this_machine(
    demo: Checkpoint, reference: Callable[[Checkpoint], Any]
) -> None:
    tokenizer = Tokenizer(demo)
    question = "What is the capital of France? Begin with 'The capital of France is'."
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    engine = Engine(demo, EngineConfig(num_blocks=4))
    engine.add(EngineRequest("a", tuple(prompt), SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)))
    tokens = []
    while engine.has_work():
        tokens += [output.token_id for output in engine.step().outputs]
    assert tokenizer.decode(tokens) == "The capital of France is Paris."
    with torch.no_grad():
        logits = reference(demo)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    likeliest, second = logits.topk(2).values.unbind(-1)
    assert float((likeliest - second).min()) > 1.5  # no question for here: bfloat16 moves logits by up to one
