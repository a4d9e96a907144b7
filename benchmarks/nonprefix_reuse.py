"""KV of documents that are reused at other places of a prompt (CacheBlend's idea): error and saving.

    python -m benchmarks.nonprefix_reuse --prompts 20 --documents 4 --tokens 256

A prompt is a system text, documents, and a question. The KV of every document comes from a computation without the
other documents, at the positions that it has in the prompt (for rotary positions that is the same as rotating keys
later). A share of their tokens is computed again in the whole prompt; the question always is. Ways to choose the share:

- `deviation`: CacheBlend (arXiv 2405.16444): the tokens whose values of the second layer deviate most. All tokens pass
  the first layer for that.
- `head`: the first tokens of each document (EPIC, arXiv 2410.15332).

`alone`: the documents' KV was computed with nothing before them; `system`: behind the system text, which they share.
KL(whole, reused) in nats and agreement of the likeliest token are means over the tokens of the whole computation's
greedy answer. Recall: questions whose number is the likeliest continuation, digit by digit; one document has it. In
float32. The first document follows the system text and is as exact as any cached prefix.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.plain_model import KV, Model, answered, computed, joined
from benchmarks.planted_facts import Prompt, prompts
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer

_ANSWER_TOKENS = 12
_SHARES = (0.05, 0.15, 0.3, 0.5, 1.0)

_WAYS = [("-", 0.0), *((way, share) for way in ("deviation", "head") for share in _SHARES)]


class Way(NamedTuple):
    """One way to reuse."""

    kept: str
    chosen_by: str
    share: float


@dataclass(slots=True)
class Figures:
    """Measurements of one way."""

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    recalls: list[bool] = field(default_factory=list)
    share: list[float] = field(default_factory=list)  # of the products of computing everything


def reused(model: Model, prompt: Prompt, *, is_alone: bool) -> list[KV]:
    """KV by layer of the system text and of documents that do not see each other."""
    system = computed(model, prompt.system, 0)
    before = None if is_alone else system
    first = computed(model, prompt.documents[0], prompt.starts[0], system)  # a prefix, as it is cached today
    others = zip(prompt.documents[1:], prompt.starts[1:-1], strict=True)
    parts = [first, *(computed(model, ids, at, before) for ids, at in others)]
    return [joined([of_system, *of_layer]) for of_system, *of_layer in zip(system, *parts, strict=True)]


def blended(model: Model, prompt: Prompt, kept: Sequence[KV], way: str, share: float) -> tuple[Sequence[KV], float]:
    """KV of which a share was computed again in the whole prompt, and the share of all documents that this took.

    The system text and the first document are a prefix: nothing changes there.
    """
    if not share:
        return kept, 0.0
    token_ids = [*prompt.system, *(token for ids in prompt.documents for token in ids)]
    num_prefix, num_changed = prompt.starts[1], len(token_ids) - prompt.starts[1]
    chosen = torch.arange(num_prefix, len(token_ids)) if way == "deviation" else _heads_of(prompt, share)
    hidden = model.embedded([token_ids[at] for at in chosen])
    result, num_computed = list[KV](), 0
    for index, old in enumerate(kept):
        fresh = model.kv(index, hidden, chosen)
        if way == "deviation" and index == 1:
            deviation = (fresh.values - old.values[:, chosen]).square().sum((0, 2))
            among = deviation.topk(round(share * num_changed)).indices.sort().values
            chosen, hidden = chosen[among], hidden[among]
            fresh = KV(chosen, fresh.keys[:, among], fresh.values[:, among])
        keys, values = old.keys.clone(), old.values.clone()
        keys[:, chosen], values[:, chosen] = fresh.keys, fresh.values
        result.append(KV(old.positions, keys, values))
        num_computed += len(chosen)
        hidden = model.behind(index, hidden, chosen, result[-1])
    return result, num_computed / (len(kept) * num_changed)


def _heads_of(prompt: Prompt, share: float) -> Tensor:
    """The first tokens of all documents but the first, which nothing precedes but the system text."""
    starts = prompt.starts[1:-1]
    parts = [
        torch.arange(at, at + round(share * len(ids))) for at, ids in zip(starts, prompt.documents[1:], strict=True)
    ]
    return torch.cat(parts)


def greedy(model: Model, kv: Sequence[KV], prompt: Prompt) -> list[int]:
    """The greedy answer to the question."""
    token_ids = [*prompt.question, *prompt.opening]
    for _ in range(_ANSWER_TOKENS):
        token_ids.append(int(answered(model, kv, prompt.starts[-1], token_ids)[-1].argmax()))
    return token_ids[-_ANSWER_TOKENS:]


def recalls(model: Model, kv: Sequence[KV], prompt: Prompt) -> bool:
    """Whether each token of the number is the likeliest one."""
    log_probs = answered(model, kv, prompt.starts[-1], [*prompt.question, *prompt.opening, *prompt.number[:-1]])
    return log_probs[-len(prompt.number) :].argmax(-1).tolist() == prompt.number


@torch.inference_mode()
def measure(model: Model, prompt: Prompt, results: dict[Way, Figures]) -> None:
    """Adds the figures of one prompt."""
    token_ids = [*prompt.system, *(token for ids in prompt.documents for token in ids)]
    whole = computed(model, token_ids, 0)
    answer = greedy(model, whole, prompt)
    asked = [*prompt.question, *prompt.opening, *answer[:-1]]
    expected = answered(model, whole, len(token_ids), asked)[-len(answer) :]
    for is_alone in (True, False):
        kept = reused(model, prompt, is_alone=is_alone)
        for kind, share in _WAYS:
            kv, num = blended(model, prompt, kept, kind, share)
            got = answered(model, kv, len(token_ids), asked)[-len(answer) :]
            figures = results.setdefault(Way("alone" if is_alone else "system", kind, share), Figures())
            figures.kl += (expected.exp() * (expected - got)).sum(-1).tolist()
            figures.agrees += (expected.argmax(-1) == got.argmax(-1)).tolist()
            figures.recalls.append(recalls(model, kv, prompt))
            figures.share.append(num)
    figures = results.setdefault(Way("-", "everything", 1.0), Figures())
    figures.recalls.append(recalls(model, whole, prompt))


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of each document")
    options = parser.parse_args()
    checkpoint = prepare_checkpoint(options.model, as_numbers=True)
    model, tokenizer = Model(checkpoint), Tokenizer(checkpoint)
    results: dict[Way, Figures] = {}
    for prompt in prompts(tokenizer, options.prompts, options.documents, options.tokens):
        measure(model, prompt, results)
    print("| KV computed | chosen by | share | computed again | KL | top-1 | recall |\n|---|---|---|---|---|---|---|")
    for way, figures in results.items():
        means = (
            (f"{fmean(figures.share):.1%}", f"{fmean(figures.kl):.4f}", f"{fmean(figures.agrees):.1%}")
            if figures.kl
            else ("100 %", "0", "100 %")
        )
        print(
            f"| {way.kept} | {way.chosen_by} | {way.share:.0%} | {' | '.join(means)} | {fmean(figures.recalls):.0%} |"
        )


if __name__ == "__main__":
    main()
