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
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer

_SYSTEM = "<|im_start|>system\nYou answer questions about the documents below, briefly.<|im_end|>\n<|im_start|>user\n"
_QUESTION = "\n\nWhat is the secret number of {name}?<|im_end|>\n<|im_start|>assistant\nThe secret number of {name} is"
_NAMES = ("Alice", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo")
_ANSWER_TOKENS = 12
_SHARES = (0.05, 0.15, 0.3, 0.5, 1.0)

_WAYS = [("-", 0.0), *((way, share) for way in ("deviation", "head") for share in _SHARES)]


class KV(NamedTuple):
    """Of one layer."""

    positions: Tensor  # [tokens]
    keys: Tensor  # [heads, tokens, head_dim], rotated
    values: Tensor  # likewise


class Way(NamedTuple):
    """One way to reuse."""

    kept: str
    chosen_by: str
    share: float


class Prompt(NamedTuple):
    """Token ids of the parts."""

    system: list[int]
    documents: list[list[int]]
    question: list[int]
    number: list[int]

    @property
    def starts(self) -> list[int]:
        """Where each document begins, and the question."""
        return list(accumulate(map(len, self.documents), initial=len(self.system)))


@dataclass(slots=True)
class Figures:
    """Measurements of one way."""

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    recalls: list[bool] = field(default_factory=list)
    share: list[float] = field(default_factory=list)  # of the products of computing everything


class Model:
    """A Llama-like model in plain torch, layer by layer, over KV of our choice."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()
        self.num_layers = len(self._model.model.layers)

    def embedded(self, token_ids: Sequence[int]) -> Tensor:
        """Hidden states [tokens, width] before the first layer."""
        result: Tensor = self._model.model.embed_tokens(torch.tensor(token_ids))
        return result

    def kv(self, index: int, hidden: Tensor, positions: Tensor) -> KV:
        """Keys and values of a layer."""
        layer = self._model.model.layers[index]
        normed = layer.input_layernorm(hidden)
        keys, values = layer.self_attn.k_proj(normed), layer.self_attn.v_proj(normed)
        return KV(positions, self._rotated(self._heads(keys), positions), self._heads(values))

    def behind(self, index: int, hidden: Tensor, positions: Tensor, kv: KV) -> Tensor:
        """The hidden states of some tokens behind a layer."""
        layer = self._model.model.layers[index]
        queries = self._rotated(self._heads(layer.self_attn.q_proj(layer.input_layernorm(hidden))), positions)
        keys, values = (part.repeat_interleave(len(queries) // len(part), 0) for part in (kv.keys, kv.values))
        sees = kv.positions[None] <= positions[:, None]
        mixed = torch.nn.functional.scaled_dot_product_attention(queries[None], keys[None], values[None], sees)[0]
        hidden = hidden + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
        result: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return result

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [tokens, vocabulary] behind the last layer."""
        return torch.log_softmax(self._model.lm_head(self._model.model.norm(hidden)), -1)

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(len(states), -1, int(self._model.config.head_dim)).transpose(0, 1)

    def _rotated(self, states: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self._model.model.rotary_emb(states, positions[None])
        result: Tensor = apply_rotary_pos_emb(states[None], states[None], cos, sin)[0][0]
        return result


def computed(model: Model, token_ids: Sequence[int], first: int, before: Sequence[KV] | None = None) -> list[KV]:
    """KV by layer of tokens from position `first` on, which see each other and what is `before` them."""
    positions = torch.arange(first, first + len(token_ids))
    hidden, result = model.embedded(token_ids), []
    for index in range(model.num_layers):
        kv = model.kv(index, hidden, positions)
        hidden = model.behind(index, hidden, positions, kv if before is None else joined([before[index], kv]))
        result.append(kv)
    return result


def joined(parts: Sequence[KV]) -> KV:
    """KV of several ranges of positions."""
    positions, keys, values = zip(*parts, strict=True)
    return KV(torch.cat(positions), torch.cat(keys, 1), torch.cat(values, 1))


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


def answered(model: Model, kv: Sequence[KV], first: int, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities [tokens, vocabulary] after each of `token_ids`, which follow the KV from `first` on."""
    positions = torch.arange(first, first + len(token_ids))
    hidden = model.embedded(token_ids)
    for index in range(model.num_layers):
        hidden = model.behind(index, hidden, positions, joined([kv[index], model.kv(index, hidden, positions)]))
    return model.log_probs(hidden)


def greedy(model: Model, kv: Sequence[KV], prompt: Prompt) -> list[int]:
    """The greedy answer to the question."""
    token_ids = list(prompt.question)
    for _ in range(_ANSWER_TOKENS):
        token_ids.append(int(answered(model, kv, prompt.starts[-1], token_ids)[-1].argmax()))
    return token_ids[len(prompt.question) :]


def recalls(model: Model, kv: Sequence[KV], prompt: Prompt) -> bool:
    """Whether each token of the number is the likeliest one."""
    log_probs = answered(model, kv, prompt.starts[-1], [*prompt.question, *prompt.number[:-1]])
    return log_probs[-len(prompt.number) :].argmax(-1).tolist() == prompt.number


def prompts(tokenizer: Tokenizer, num: int, num_documents: int, num_tokens: int) -> list[Prompt]:
    """Prompts of different passages; in the middle of one document is what the question asks for."""
    draw = random.Random(1)
    passages = [tokenizer.encode(text)[:num_tokens] for text in topics.values() if len(text) > 6 * num_tokens]
    result = []
    for _ in range(num):
        documents = [list(ids) for ids in draw.sample(passages, num_documents)]
        numbers = [str(draw.randrange(1000, 10000)) for _ in documents]
        names = draw.sample(_NAMES, num_documents)
        for ids, name, number in zip(documents, names, numbers, strict=True):
            middle = draw.randrange(num_tokens // 4, 3 * num_tokens // 4)
            fact = tokenizer.encode(f"\nThe secret number of {name} is {number}.\n")
            ids[middle : middle + len(fact)] = fact
        asked = draw.randrange(num_documents)
        question = tokenizer.encode(_QUESTION.format(name=names[asked]))
        result.append(Prompt(tokenizer.encode(_SYSTEM), documents, question, tokenizer.encode(f" {numbers[asked]}")))
    return result


@torch.inference_mode()
def measure(model: Model, prompt: Prompt, results: dict[Way, Figures]) -> None:
    """Adds the figures of one prompt."""
    token_ids = [*prompt.system, *(token for ids in prompt.documents for token in ids)]
    whole = computed(model, token_ids, 0)
    answer = greedy(model, whole, prompt)
    asked = [*prompt.question, *answer[:-1]]
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
    checkpoint = prepare_checkpoint(options.model)
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
