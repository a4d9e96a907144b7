"""Decode rates with and without guessed tokens, by turns in one process, over prompts that quote, edit and chat.

    python -m benchmarks.speculation --model demo --repeat 3

Greedy answers, one sequence at a time; the texts are equal, or it says so. Ratios above 1: guessing is better.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.text.tokenizer import Tokenizer

_ROOT = Path(__file__).parents[1]
_TOKENS = 128
_PASSAGE = " ".join((_ROOT / "docs" / "architecture.md").read_text().split()[60:220])
_CODE = (_ROOT / "halfmoon" / "engine" / "chunk.py").read_text()
PROMPTS = {
    "quote": f"Repeat this text word for word:\n\n{_PASSAGE}",
    "edit code": f"Rename `Chunk` to `Piece` in this file. Answer with the whole file:\n\n```python\n{_CODE}```",
    "chat": "Tell me a story about a lighthouse keeper and a storm.",
    "explain": "What is the difference between a list and a tuple in Python?",
    "summarise": f"Say in your own words what this is about:\n\n{_PASSAGE}",
}


class Subject:
    """One engine, and what its guesses came to."""

    def __init__(self, checkpoint: Checkpoint, speculation: Literal["off", "ngram"]) -> None:
        config = EngineConfig(speculation=speculation, prefix_cache=False, num_blocks=64)
        self._engine = Engine(checkpoint, config)
        self.num_drafts = self.num_right = 0

    def answer(self, prompt: Sequence[int]) -> tuple[list[int], float]:
        """The answer's tokens, and those after the first each second."""
        sampling = SamplingParams(max_tokens=_TOKENS, temperature=0, ignore_eos=True)
        self._engine.add(EngineRequest("one", tuple(prompt), sampling))
        tokens = [output.token_id for output in self._engine.step().outputs]
        while not tokens:
            tokens += [output.token_id for output in self._engine.step().outputs]
        started_s, first = time.perf_counter(), len(tokens)
        while self._engine.has_work():
            result = self._engine.step()
            tokens += [output.token_id for output in result.outputs]
            self.num_drafts += result.num_drafts
            self.num_right += result.num_right_drafts
        return tokens, (len(tokens) - first) / (time.perf_counter() - started_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    checkpoint = prepare_checkpoint(options.model)
    tokenizer = Tokenizer(checkpoint)
    subjects = (Subject(checkpoint, "off"), Subject(checkpoint, "ngram"))
    print(f"{'':12}{'off':>10}{'ngram':>10}{'ratio':>8}{'drafts':>8}{'right':>8}   same text")
    for name, text in PROMPTS.items():
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        subjects[1].num_drafts = subjects[1].num_right = 0
        runs = [[subject.answer(prompt) for subject in subjects] for _ in range(options.repeat)]
        rates = [statistics.median(run[which][1] for run in runs) for which in (0, 1)]
        is_same = all(run[0][0] == run[1][0] for run in runs)
        drafts, right = (count // options.repeat for count in (subjects[1].num_drafts, subjects[1].num_right))
        ratio = f"{rates[1] / rates[0]:.2f}x"
        print(f"{name:12}{rates[0]:10.1f}{rates[1]:10.1f}{ratio:>8}{drafts:8}{right:8}   {is_same}")


if __name__ == "__main__":
    main()
