"""Decode rates with and without guessed tokens, by turns in one process, over prompts that quote, edit and chat.

    python -m benchmarks.engine.speculation --model demo --repeat 3

Greedy answers, one sequence at a time; the texts are equal, or it says so. Ratios above 1: guessing is better. A model
of the demo's size edits no code, so those answers are dictated: every step computes and draws, and what a good editor
would have written counts as drawn.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.request import EngineRequest, SampledToken, SamplingParams
from halfmoon.engine.scheduling.schedule import ScheduledSequence
from halfmoon.engine.text.tokenizer import Tokenizer
from halfmoon.host_limits import num_threads

_ROOT = Path(__file__).parents[2]
_TOKENS = 128
_PASSAGE = " ".join((_ROOT / "docs" / "architecture.md").read_text().split()[60:220])
_CODE = (_ROOT / "halfmoon" / "engine" / "chunk.py").read_text()
PROMPTS = {
    "quote": f"Repeat this text word for word:\n\n{_PASSAGE}",
    "chat": "Tell me a story about a lighthouse keeper and a storm.",
    "explain": "What is the difference between a list and a tuple in Python?",
    "summarise": f"Say in your own words what this is about:\n\n{_PASSAGE}",
}
_DICTATED = {
    "rename": ("Rename `Chunk` to `Piece` in this file.", _CODE.replace("Chunk", "Piece")),
    "strip": ("Remove the docstrings.", re.sub(r'\n\s*""".*?"""', "", _CODE, flags=re.DOTALL)),
    "log calls": ("Log each call.", re.sub(r"(def (\w+)\(.*?:\n)", r'\1        log.debug("\2")\n', _CODE)),
}


class Subject:
    """One engine, and what its guesses came to."""

    def __init__(self, checkpoint: Checkpoint, speculation: Literal["off", "ngram"]) -> None:
        config = EngineConfig(speculation=speculation, prefix_cache=False, num_blocks=64, num_threads=num_threads())
        self._engine = Engine(checkpoint, config)
        self.num_drafts = self.num_right = 0

    def answer(self, prompt: Sequence[int], dictated: Sequence[int] = ()) -> tuple[list[int], float]:
        """The answer's tokens, and those after the first each second; `dictated`: what is drawn, if anything."""
        runner = self._engine._runner
        assert isinstance(runner, ModelRunner)
        runner.sample = partial(_dictate, dictated, partial(ModelRunner.sample, runner))  # type: ignore[method-assign]
        sampling = SamplingParams(max_tokens=len(dictated) or _TOKENS, temperature=0, ignore_eos=True)
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


def _cases() -> dict[str, tuple[str, str]]:
    """Questions, and the answers that are dictated."""
    edits = {
        name: (f"{what} Answer with the whole file:\n\n```python\n{_CODE}```", f"```python\n{code}```")
        for name, (what, code) in _DICTATED.items()
    }
    return {name: (text, "") for name, text in PROMPTS.items()} | edits


def _dictate(
    text: Sequence[int],
    sample: Callable[[tuple[ScheduledSequence, ...], Tensor], list[SampledToken]],
    scheduled: tuple[ScheduledSequence, ...],
    logits: Tensor,
) -> list[SampledToken]:
    """Draws, then puts the text's tokens in the places of those that were drawn."""
    drawn = sample(scheduled, logits)
    if not text or not drawn:
        return drawn
    (item,) = scheduled
    following = range(item.sequence.num_output, item.sequence.num_output + item.num_drawn)
    return [
        replace(token, token_id=text[min(place, len(text) - 1)]) for token, place in zip(drawn, following, strict=True)
    ]


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
    for name, (text, answer) in _cases().items():
        prompt, dictated = tokenizer.encode_chat([{"role": "user", "content": text}]), tokenizer.encode(answer)
        subjects[1].num_drafts = subjects[1].num_right = 0
        runs = [[subject.answer(prompt, dictated) for subject in subjects] for _ in range(options.repeat)]
        rates = [statistics.median(run[which][1] for run in runs) for which in (0, 1)]
        is_same = all(run[0][0] == run[1][0] for run in runs)
        drafts, right = (count // options.repeat for count in (subjects[1].num_drafts, subjects[1].num_right))
        ratio = f"{rates[1] / rates[0]:.2f}x"
        print(f"{name:12}{rates[0]:10.1f}{rates[1]:10.1f}{ratio:>8}{drafts:8}{right:8}   {is_same}")


if __name__ == "__main__":
    main()
