"""How far numbers, weights and KV of fewer bits are from float32: over a text, and in answers to questions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, Quantization, prepare_checkpoint
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.text.tokenizer import Tokenizer

_TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"
_TEXT_WINDOWS, _WINDOW_TOKENS = 4, 512

_COUNTRIES = (  # noqa: SIM905
    "France Germany Italy Spain Portugal Poland Norway Sweden Finland Denmark Greece Turkey Egypt Kenya Nigeria Ghana "
    "Morocco Japan China India Nepal Vietnam Thailand Indonesia Australia Canada Mexico Cuba Brazil Argentina Chile "
    "Peru Colombia Austria Hungary Ireland Iceland Belgium Romania Russia"
).split()
_ANIMALS = "cat dog horse whale bee eagle spider frog shark bat".split()  # noqa: SIM905
_TERMS = "gravity photosynthesis democracy inflation electricity evolution magnetism friction osmosis erosion".split()  # noqa: SIM905
_KINDS = "fruits colours rivers planets metals tools sports birds cities games".split()  # noqa: SIM905
QUESTIONS = (
    *(f"What is the capital of {country}?" for country in _COUNTRIES),
    *(f"Which language is spoken in {country}?" for country in _COUNTRIES),
    *(f"On which continent is {country}?" for country in _COUNTRIES),
    *(f"How many legs does a {animal} have?" for animal in _ANIMALS),
    *(f"Write one sentence about a {animal}." for animal in _ANIMALS),
    *(f"Explain {term} in one sentence." for term in _TERMS),
    *(f"Why is {term} important?" for term in _TERMS),
    *(f"What is {number} plus {number * 3 % 17}?" for number in range(2, 22)),
    *(f"Name {number} {kind}." for number in ("three", "five") for kind in _KINDS),
)
_ANSWER_TOKENS = 32

Dtype = Literal["float32", "bfloat16", "float16"]
KV = Literal["auto", "int8", "fp8"]


@torch.inference_mode()
def text_logprobs(
    checkpoint: Checkpoint, dtype: Dtype, windows: Sequence[Sequence[int]], kv_dtype: KV = "auto"
) -> list[Tensor]:
    """Log-probabilities of what follows each token, [num_tokens, vocab_size] float32, for each window on its own."""
    config = EngineConfig(dtype=dtype, kv_dtype=kv_dtype, prefix_cache=False, num_blocks=_WINDOW_TOKENS // 64)
    engine = Engine(checkpoint, config)
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    blocks = range(_WINDOW_TOKENS // 64)
    chunks = [Chunk(window, 0, blocks, len(window)) for window in windows]
    logprobs = [runner.forward(runner.batch([chunk])).log_softmax(-1) for chunk in chunks]
    engine.close()
    return logprobs


def greedy_answers(checkpoint: Checkpoint, dtype: Dtype, kv_dtype: KV = "auto") -> list[list[int]]:
    """The tokens of the answer to each question."""
    config = EngineConfig(dtype=dtype, kv_dtype=kv_dtype, prefix_cache=False, max_running=64, num_blocks=256)
    engine, tokenizer = Engine(checkpoint, config), Tokenizer(checkpoint)
    sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0)
    for index, question in enumerate(QUESTIONS):
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        engine.add(EngineRequest(str(index), tuple(prompt), sampling))
    answers: list[list[int]] = [[] for _ in QUESTIONS]
    while engine.has_work():
        for output in engine.step().outputs:
            answers[int(output.request_id)].append(output.token_id)
    engine.close()
    return answers


def print_accuracy(
    model: str, dtype: Dtype, quantizations: Sequence[Quantization], kv_dtypes: Sequence[KV] = ()
) -> None:
    """Compares weights and KV in `dtype` and quantised ones with those in float32, over the same text."""
    numbers = prepare_checkpoint(model, quantization="none")
    tokens = Tokenizer(numbers).encode(_TEXT.read_text())[: _TEXT_WINDOWS * _WINDOW_TOKENS]
    windows = [tokens[start : start + _WINDOW_TOKENS] for start in range(0, len(tokens), _WINDOW_TOKENS)]
    exact, exact_answers = text_logprobs(numbers, "float32", windows), greedy_answers(numbers, "float32")
    subjects: dict[str, tuple[Quantization, Dtype, KV]] = {
        "float32": ("none", "float32", "auto"),
        dtype: ("none", dtype, "auto"),
        **{f"{name}, {dtype}": (name, dtype, "auto") for name in quantizations},
        **{f"KV {kv}, {own}": ("none", own, kv) for kv in kv_dtypes for own in dict.fromkeys(("float32", dtype))},
    }
    print(f"{'':28}{'perplexity':>14}{'KL':>12}{'same token':>14}{'same answers':>16}")
    for name, (quantization, own_dtype, kv_dtype) in subjects.items():
        checkpoint = prepare_checkpoint(model, quantization=quantization)
        got = text_logprobs(checkpoint, own_dtype, windows, kv_dtype)
        pairs = list(zip(exact, got, strict=True))
        divergence = torch.cat([(one.exp() * (one - other)).sum(-1) for one, other in pairs]).mean()
        same = torch.cat([one.argmax(-1) == other.argmax(-1) for one, other in pairs]).float().mean()
        nexts = [
            rows[:-1].gather(1, torch.tensor(window[1:]).unsqueeze(1))
            for rows, window in zip(got, windows, strict=True)
        ]
        perplexity = torch.cat(nexts).mean().neg().exp()
        answers = greedy_answers(checkpoint, own_dtype, kv_dtype)
        num_same = sum(one == other for one, other in zip(exact_answers, answers, strict=True))
        print(f"{name:28}{perplexity:14.3f}{divergence:12.5f}{same:14.2%}{num_same:16}")
