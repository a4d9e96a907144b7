"""What a smaller KV cache costs: KL, top-1 agreement and recall of planted facts against the whole cache.

    python -m benchmarks.smaller_caches --prompts 24 --documents 4 --tokens 256

The whole prompt is computed, then of its KV a budget of tokens is kept, by layer and KV head, and the answer sees that.
In plain torch, float32. `budget` counts tokens, of which the latest are a part:

- `sinks`: the first 4 tokens and the latest (StreamingLLM, arXiv 2309.17453); `sinks, prompt too`: the engine's policy
  `sinks:S+W`, under which tokens of the prompt see no more than that, either, in blocks of 64.
- `h2o`: half latest, half those to which all tokens of the prompt gave most attention (arXiv 2306.14048).
- `snapkv`: the latest 32, and those to which these gave most, smoothed over 7 neighbours (arXiv 2404.14469);
  `snapkv, half latest`: likewise, but half are the latest.
- `pyramidkv`: snapkv, with budgets that shrink from the first layer to the last (arXiv 2406.02069).
- `blocks`: whole blocks of 64 by the same attention, alike for all layers and heads.
- `minicache`: the deeper half of the layers by pairs: one direction for both, their own lengths, 5 % of the tokens as
  they were (arXiv 2405.14366).

`asked`: the question ends the prompt. KL(whole, kept) in nats and agreement of the likeliest token are means over "The
secret number of Alice is" and the whole cache's greedy answer from there; recall: questions whose number is the
likeliest continuation, digit by digit. `asked later`: the question comes when the cache of the documents is small
already; KL and top-1 are also over it.
`depths`: recall by the document that has the fact, first to last. `KV`: bytes kept of the whole prompt's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from benchmarks.plain_model import KV, Model, answered
from benchmarks.planted_facts import Prompt, prompts
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer
from halfmoon.kv.kv_policy import KVPolicy

_ANSWER_TOKENS = 8
_BLOCK_TOKENS = 64
_SINKS = 4
_OBSERVERS = 32  # latest tokens of the prompt whose attention counts
_NEIGHBOURS = 7
_STEEPNESS = 20  # of a pyramid: the last layer has 1/20 of the mean budget for its choice
_UNMERGED = 0.05
_PRINTED_EVERY = 4  # prompts
_TOWARDS_DEEPER = 0.6  # of the angle between two layers, as in the paper


class Prefilled(NamedTuple):
    """A prompt's KV by layer, and the attention that its tokens got, [kv_heads, tokens]."""

    kv: list[KV]
    by_all: list[Tensor]  # from all tokens; empty under a policy
    by_latest: list[Tensor]  # from the latest `_OBSERVERS`
    log_probs: Tensor  # [vocabulary] after the last token


Keep = Callable[[Prefilled, int], list[KV]]  # the KV kept of a budget


@dataclass(slots=True)
class Figures:
    """Measurements of one way, under one way of asking."""

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    recalls: list[list[bool]] = field(default_factory=list)  # by depth
    shares: list[float] = field(default_factory=list)


Results = dict[tuple[str, str], list[Figures]]  # by way and budget: asked, asked later


def prefilled(model: Model, token_ids: Sequence[int], policy: KVPolicy | None = None) -> Prefilled:
    """Computes a prompt; under a policy, tokens see what the engine lets them see."""
    positions = torch.arange(len(token_ids))
    sees = _seen(policy, len(token_ids))
    hidden = model.embedded(token_ids)
    result = Prefilled([], [], [], hidden)
    for index in range(model.num_layers):
        kv = model.kv(index, hidden, positions)
        result.kv.append(kv)
        if policy is None:
            attention = _attention(model.queries(index, hidden, positions), kv.keys, sees)
            result.by_all.append(attention.sum(1))
            result.by_latest.append(attention[:, -_OBSERVERS:].sum(1))
        hidden = model.behind(index, hidden, positions, kv, sees)
    return result._replace(log_probs=model.log_probs(hidden[-1:])[0])


def _seen(policy: KVPolicy | None, num_tokens: int) -> Tensor:
    """Which token sees which, [num_tokens, num_tokens]."""
    result = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    for row in range(num_tokens if policy is not None else 0):
        assert policy is not None
        unseen = policy.unseen(row, _BLOCK_TOKENS)
        result[row, unseen.start * _BLOCK_TOKENS : unseen.stop * _BLOCK_TOKENS] = False
    return result


def _attention(queries: Tensor, keys: Tensor, sees: Tensor) -> Tensor:
    """What tokens give to tokens, [kv_heads, tokens, tokens], the mean of the query heads of each KV head."""
    num_kv_heads, _, head_dim = keys.shape
    grouped = queries.view(num_kv_heads, -1, *queries.shape[1:])
    result = torch.zeros(num_kv_heads, *sees.shape)
    for head in range(grouped.shape[1]):
        scores = grouped[:, head] @ keys.transpose(1, 2) * head_dim**-0.5
        result += scores.masked_fill_(~sees, float("-inf")).softmax(-1) / grouped.shape[1]
    return result


def _taken(kv: KV, chosen: Tensor) -> KV:
    """The KV of `chosen` tokens [kv_heads, tokens]; they are not in order, and before all that follows."""
    where = chosen[..., None].expand(-1, -1, kv.keys.shape[-1])
    return KV(torch.zeros(chosen.shape[1], dtype=torch.long), kv.keys.gather(1, where), kv.values.gather(1, where))


def _heaviest(attention: Tensor, num: int, num_latest: int, num_smoothed: int = 1) -> Tensor:
    """The tokens that got most attention, smoothed over neighbours, and the latest: [kv_heads, num + num_latest]."""
    num_tokens = attention.shape[1]
    smooth = avg_pool1d(attention[None, :, : num_tokens - num_latest], num_smoothed, 1, num_smoothed // 2)[0]
    heavy = smooth.topk(num).indices
    latest = torch.arange(num_tokens - num_latest, num_tokens).expand(len(attention), -1)
    return torch.cat((heavy, latest), 1)


def _share(kept: Sequence[KV], whole: Sequence[KV]) -> float:
    return sum(kv.keys.shape[1] for kv in kept) / sum(kv.keys.shape[1] for kv in whole)


def _sinks(prompt: Prefilled, budget: int) -> list[KV]:
    result = []
    for kv in prompt.kv:
        num_heads, num_tokens, _ = kv.keys.shape
        latest = torch.arange(num_tokens - budget + _SINKS, num_tokens)
        result.append(_taken(kv, torch.cat((torch.arange(_SINKS), latest)).expand(num_heads, -1)))
    return result


def _h2o(prompt: Prefilled, budget: int) -> list[KV]:
    layers = zip(prompt.kv, prompt.by_all, strict=True)
    return [_taken(kv, _heaviest(attention, budget // 2, budget - budget // 2)) for kv, attention in layers]


def _snapkv(prompt: Prefilled, budget: int) -> list[KV]:
    return _observed(prompt, budget, _OBSERVERS)


def _snapkv_half(prompt: Prefilled, budget: int) -> list[KV]:
    return _observed(prompt, budget, budget // 2)


def _observed(prompt: Prefilled, budget: int, num_latest: int) -> list[KV]:
    layers = zip(prompt.kv, prompt.by_latest, strict=True)
    return [_taken(kv, _heaviest(attention, budget - num_latest, num_latest, _NEIGHBOURS)) for kv, attention in layers]


def _pyramidkv(prompt: Prefilled, budget: int) -> list[KV]:
    mean, num_layers = budget - _OBSERVERS, len(prompt.kv)
    least = mean // _STEEPNESS
    most = min(2 * mean - least, prompt.kv[0].keys.shape[1] - _OBSERVERS)
    result = []
    for index, (kv, attention) in enumerate(zip(prompt.kv, prompt.by_latest, strict=True)):
        num = round(most - (most - least) * index / (num_layers - 1))
        result.append(_taken(kv, _heaviest(attention, num, _OBSERVERS, _NEIGHBOURS)))
    return result


def _blocks(prompt: Prefilled, budget: int) -> list[KV]:
    num_tokens = prompt.kv[0].keys.shape[1]
    attention = torch.stack(prompt.by_latest).mean((0, 1))
    starts = torch.arange(0, num_tokens - _OBSERVERS, _BLOCK_TOKENS)
    last = int(starts[-1])  # of the latest tokens, always kept
    by_block = torch.stack([attention[start : start + _BLOCK_TOKENS].sum() for start in starts[:-1]])
    chosen = by_block.topk(max(budget // _BLOCK_TOKENS - 1, 1)).indices
    kept = torch.cat((*(torch.arange(start, start + _BLOCK_TOKENS) for start in starts[chosen]),
                      torch.arange(last, num_tokens)))  # fmt: skip
    return [_taken(kv, kept.expand(len(kv.keys), -1)) for kv in prompt.kv]


def _minicache(prompt: Prefilled) -> tuple[list[KV], float]:
    """The KV, and its share of the whole's bytes."""
    result, saved = list(prompt.kv), 0.0
    num_layers, head_dim = len(result), result[0].keys.shape[-1]
    for deeper in range(num_layers // 2 + 1, num_layers, 2):
        pair = result[deeper - 1], result[deeper]
        keys = _merged(pair[0].keys, pair[1].keys)
        values = _merged(pair[0].values, pair[1].values)
        result[deeper - 1 : deeper + 1] = [
            KV(kv.positions, key, value) for kv, key, value in zip(pair, keys, values, strict=True)
        ]
        saved += 1 - _UNMERGED - 2 / head_dim  # of two layers' vectors one is left, with two lengths
    return result, 1 - saved / num_layers


def _merged(upper: Tensor, deeper: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [kv_heads, tokens, head_dim] of two layers with one direction, but for those that are furthest apart."""
    lengths = [part.norm(dim=-1, keepdim=True) for part in (upper, deeper)]
    one, other = upper / lengths[0], deeper / lengths[1]
    angle = (one * other).sum(-1, keepdim=True).clamp(-1, 1).acos()
    weights = ((1 - _TOWARDS_DEEPER) * angle).sin(), (_TOWARDS_DEEPER * angle).sin()
    direction = (weights[0] * one + weights[1] * other) / angle.sin().clamp_min(1e-6)
    is_kept = angle >= angle.quantile(1 - _UNMERGED, dim=1, keepdim=True)
    return (
        torch.where(is_kept, upper, direction * lengths[0]),
        torch.where(is_kept, deeper, direction * lengths[1]),
    )


_WAYS: dict[str, Keep] = {
    "sinks": _sinks,
    "h2o": _h2o,
    "snapkv": _snapkv,
    "snapkv, half latest": _snapkv_half,
    "pyramidkv": _pyramidkv,
    "blocks": _blocks,
}


class Case(NamedTuple):
    """One way of asking: what the whole cache says behind a prompt, and what it should recall."""

    model: Model
    token_ids: list[int]  # of the prompt
    behind: list[int]  # what the answer follows
    whole: Prefilled
    answer: list[int]  # greedy
    number: list[int]
    depth: int
    expected: Tensor  # of the whole cache

    def note(self, figures: Figures, prompt: Prefilled, kept: Sequence[KV], share: float | None = None) -> None:
        """Adds the figures of kept KV; `share`: of the whole's bytes, None if its tokens say it."""
        expected, got = self.expected, self.after(prompt, kept, self.answer)
        figures.kl += (expected.exp() * (expected - got)).sum(-1).tolist()
        figures.agrees += (expected.argmax(-1) == got.argmax(-1)).tolist()
        num = len(self.number)
        said = got if self.answer[: num - 1] == self.number[:-1] else self.after(prompt, kept, self.number)
        figures.recalls[self.depth].append(said[len(self.behind) :][:num].argmax(-1).tolist() == self.number)
        figures.shares.append(_share(kept, prompt.kv) if share is None else share)

    def after(self, prompt: Prefilled, kept: Sequence[KV], answer: Sequence[int]) -> Tensor:
        """Log-probabilities after the prompt, what follows it, and each but the last token of an answer."""
        behind = answered(self.model, kept, len(self.token_ids), [*self.behind, *answer[:-1]])
        return torch.cat((prompt.log_probs[None], behind))


def asked(model: Model, prompt: Prompt, *, is_later: bool) -> Case:
    """Computes the whole cache and its answer; `is_later`: the question is not in the cache."""
    documents = [*prompt.system, *(token for ids in prompt.documents for token in ids)]
    token_ids = documents if is_later else documents + prompt.question
    behind = [*prompt.question, *prompt.opening] if is_later else prompt.opening
    whole, answer = prefilled(model, token_ids), list[int]()
    for _ in range(_ANSWER_TOKENS):
        answer.append(int(answered(model, whole.kv, len(token_ids), behind + answer)[-1].argmax()))
    case = Case(model, token_ids, behind, whole, answer, prompt.number, prompt.depth, whole.log_probs)
    return case._replace(expected=case.after(whole, whole.kv, answer))


@torch.inference_mode()
def measure(model: Model, prompt: Prompt, budgets: Sequence[int], results: Results) -> None:
    """Adds the figures of one prompt."""
    num_depths = len(prompt.documents)
    for is_later in (False, True):
        case = asked(model, prompt, is_later=is_later)

        def figures(way: str, budget: str, index: int = int(is_later)) -> Figures:
            empty = [Figures(recalls=[[] for _ in range(num_depths)]) for _ in range(2)]
            return results.setdefault((way, budget), empty)[index]

        case.note(figures("whole", "-"), case.whole, case.whole.kv)
        for budget in budgets:
            for way, keep in _WAYS.items():
                case.note(figures(way, str(budget)), case.whole, keep(case.whole, budget))
            policy = KVPolicy(_SINKS, budget - _BLOCK_TOKENS)
            streamed = prefilled(model, case.token_ids, policy)
            case.note(figures("sinks, prompt too", str(policy)), streamed, _streamed(streamed, policy))
        case.note(figures("minicache", "-"), case.whole, *_minicache(case.whole))


def _streamed(prompt: Prefilled, policy: KVPolicy) -> list[KV]:
    """What the engine keeps of a prompt that was computed under its policy."""
    result = []
    for kv in prompt.kv:
        unseen = policy.unseen(len(kv.positions), _BLOCK_TOKENS)
        parts = kv.positions[: unseen.start * _BLOCK_TOKENS], kv.positions[unseen.stop * _BLOCK_TOKENS :]
        result.append(_taken(kv, torch.cat(parts).expand(len(kv.keys), -1)))
    return result


def table(results: Results) -> str:
    """A row for each way and budget, in Markdown."""
    rows = [
        "| way | budget | KV | asked: KL | top-1 | recall | depths | asked later: KL | top-1 | recall | depths |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (way, budget), measured in results.items():
        cells = [way, budget, f"{fmean(measured[0].shares):.0%}"]
        for figures in measured:
            by_depth = [f"{fmean(depth):.0%}" if depth else "-" for depth in figures.recalls]
            recall = fmean(value for depth in figures.recalls for value in depth)
            cells += [f"{fmean(figures.kl):.4f}", f"{fmean(figures.agrees):.1%}", f"{recall:.0%}", "/".join(by_depth)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Prints the table after every fourth prompt, so that a run that is stopped has figures, and at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of each document")
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 256, 128])
    options = parser.parse_args()
    checkpoint = prepare_checkpoint(options.model, as_numbers=True)
    model, tokenizer = Model(checkpoint), Tokenizer(checkpoint)
    results: Results = {}
    for number, prompt in enumerate(prompts(tokenizer, options.prompts, options.documents, options.tokens), 1):
        measure(model, prompt, options.budgets, results)
        if number % _PRINTED_EVERY == 0 or number == options.prompts:
            print(f"{number} prompts\n{table(results)}\n", flush=True)


if __name__ == "__main__":
    main()
