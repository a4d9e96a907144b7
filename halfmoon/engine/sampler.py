"""Draws tokens from logits. Stateless: the token at output position i depends on logits, parameters and (seed, i).

Order of operations as in vLLM (v1/sample/sampler.py): bans and bias, penalties, temperature, min-p, top-k, top-p;
tokens that a constraint does not allow are banned before all. Bans of `min_tokens` and `bad_words` that would leave no
token give way. The remaining distribution, in the order of ids, is inverted at one uniform number, which Philox (Salmon
et al., 2011) generates from (seed, i). Penalties and what follows them are written twice, by the same rules: for torch
here, and for CPUs in C (`native/sampling.py`).
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfmoon.engine.constraint import TokenMasks
from halfmoon.engine.request import CONSTRAINT_TOKEN_ID, ERROR_TOKEN_ID, SampledToken, SamplingParams, TokenLogprobs
from halfmoon.errors import InvalidRequest

logger = logging.getLogger(__name__)

_GREEDY_BELOW = 1e-5  # temperature; logits divided by less would exceed float32 (also vLLM's limit)
_FIRST_CANDIDATES = 256  # most likely tokens that are tried before the whole vocabulary is sorted
_ROWS_AT_ONCE = 8  # for which numbers of the whole vocabulary's size are made besides the logits


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One sequence whose next token is drawn. `token_ids` holds prompt and output."""

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt: int
    forbidden: NDArray[np.bool_] | None = None  # the parameters', made once a request; None: made here
    ids: array[int] | None = None  # token_ids once more (int64), where there are penalties; None: made where needed

    @property
    def position(self) -> int:
        """Returns the output position of the next token."""
        return len(self.token_ids) - self.num_prompt


@dataclass(frozen=True, slots=True)
class SamplerOps:
    """Functions of logits [num_rows, vocab_size] of any float, which they do not change.

    A row's results do not depend on the other rows. If a function raises because of a row, it also does so for that row
    alone.

    choose: (logits, rows, adjusted) -> a token for each row, from penalties on; -1 for a row with NaN or infinity, or
    without any allowed token. `adjusted` replaces the logits of some rows, by their index: [vocab_size] float32.
    logprobs: (logits, token_ids, num_top) -> for each row the log-probabilities of its token and of its `num_top` most
    likely ones, under the model's own distribution.
    """

    choose: Callable[[Tensor, Sequence[SamplingRow], Mapping[int, Tensor]], list[int]]
    logprobs: Callable[[Tensor, Sequence[int], Sequence[int]], list[TokenLogprobs]]


def sample(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    eos_token_ids: frozenset[int],
    masks: TokenMasks | None = None,
    ops: SamplerOps | None = None,
) -> list[SampledToken]:
    """Draws one token per row; ERROR_TOKEN_ID for a row that fails, CONSTRAINT_TOKEN_ID for one whose constraint does.

    logits: [num_rows, vocab_size], any float; not changed. `masks` are needed for rows with a constraint; without
    `ops` it is torch's code.
    """
    try:
        return _sample(logits, rows, eos_token_ids, masks, ops or TORCH_SAMPLER)
    except Exception as error:
        if len(rows) == 1:
            if isinstance(error, InvalidRequest):  # the client's doing
                logger.info("constraint_failed", extra={"reason": error.message})
                return [SampledToken(CONSTRAINT_TOKEN_ID)]
            logger.exception("sampling_failed")
            return [SampledToken(ERROR_TOKEN_ID)]
        # One row must not fail the others, and does not depend on them.
        return [
            sample(logits[index : index + 1], [row], eos_token_ids, masks, ops)[0] for index, row in enumerate(rows)
        ]


def _sample(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    eos_token_ids: frozenset[int],
    masks: TokenMasks | None,
    ops: SamplerOps,
) -> list[SampledToken]:
    adjusted = {
        index: _adjusted(logits[index], row, eos_token_ids, masks)
        for index, row in enumerate(rows)
        if _is_adjusted(row, eos_token_ids)
    }
    token_ids = ops.choose(logits, rows, adjusted)
    if min(token_ids) < 0:
        raise ValueError("the logits hold NaN or infinity, or every token is banned")
    tokens = [SampledToken(token_id) for token_id in token_ids]
    wanted = {index: num for index, row in enumerate(rows) if (num := row.params.num_top_logprobs) is not None}
    if wanted:
        raw = logits if len(wanted) == len(rows) else logits[list(wanted)]
        found = ops.logprobs(raw, [token_ids[index] for index in wanted], list(wanted.values()))
        for index, logprobs in zip(wanted, found, strict=True):
            tokens[index] = SampledToken(token_ids[index], logprobs)
    return tokens


def _choose(logits: Tensor, rows: Sequence[SamplingRow], adjusted: Mapping[int, Tensor]) -> list[int]:
    """See `SamplerOps.choose`, on any device."""
    penalised = [index for index, row in enumerate(rows) if has_penalties(row.params)]
    if penalised or adjusted:
        logits = logits.float().clone()
        for index, values in adjusted.items():
            logits[index] = values
        for index in penalised:
            penalise(logits[index], rows[index])
    most, likeliest = logits.max(dim=-1)
    token_ids: list[int] = torch.where(most.isfinite(), likeliest, -1).tolist()  # read back at once
    random = [index for index, row in enumerate(rows) if not is_greedy(row.params) and token_ids[index] >= 0]
    random.sort(key=lambda index: _is_cut(rows[index].params, logits.shape[1]))
    if random:
        drawn = _draw(logits[random].float(), [rows[index] for index in random])
        for index, token_id in zip(random, drawn, strict=True):
            token_ids[index] = token_id
    return token_ids


def is_greedy(params: SamplingParams) -> bool:
    """Whether the likeliest token is taken."""
    return params.temperature < _GREEDY_BELOW or params.top_k == 1


def has_penalties(params: SamplingParams) -> bool:
    """Whether a token's logit depends on those before."""
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)


def _is_adjusted(row: SamplingRow, eos_token_ids: frozenset[int]) -> bool:
    """Whether tokens are banned or biased."""
    params = row.params
    if params.constraint is not None or params.logit_bias or params.allowed_token_ids or params.bad_words:
        return True
    ends = params.stop_token_ids or (eos_token_ids and not params.ignore_eos)
    return row.position < params.min_tokens and bool(ends)


def _adjusted(logits: Tensor, row: SamplingRow, eos_token_ids: frozenset[int], masks: TokenMasks | None) -> Tensor:
    """A row's logits [vocab_size] under its constraint, bans and bias, in float32."""
    values = logits.float().clone()
    if row.params.constraint is not None:
        assert masks is not None
        allowed = masks.allowed(row.params.constraint, row.token_ids[row.num_prompt :])
        values.masked_fill_(torch.from_numpy(~allowed).to(values.device), float("-inf"))
    ban_and_bias(values, row, eos_token_ids)
    return values


def ban_and_bias(values: Tensor, row: SamplingRow, eos_token_ids: frozenset[int]) -> None:
    """Applies bans and bias in place. values: [vocab_size] float32."""
    _ban(values, row, eos_token_ids)
    if bias := row.params.logit_bias:
        ids = torch.tensor(list(bias), device=values.device)
        values[ids] += torch.tensor(list(bias.values()), device=values.device)


def penalise(values: Tensor, row: SamplingRow) -> None:
    """Applies penalties in place. values: [vocab_size] float32."""
    params, output = row.params, row.token_ids[row.num_prompt :]
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.token_ids)), device=values.device)
        picked = values[seen]
        factor = params.repetition_penalty
        values[seen] = torch.where(picked > 0, picked / factor, picked * factor)
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.unique(torch.tensor(output, device=values.device), return_counts=True)
        values[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _ban(values: Tensor, row: SamplingRow, eos_token_ids: frozenset[int]) -> None:
    """Leaves the allowed tokens without those that are banned for now, unless none would be left. values: as above."""
    params = row.params
    if params.allowed_token_ids:
        forbidden = torch.from_numpy(params.forbidden() if row.forbidden is None else row.forbidden)
        values[: len(forbidden)].masked_fill_(forbidden.to(values.device), float("-inf"))
        values[len(forbidden) :] = float("-inf")
    output = tuple(row.token_ids[row.num_prompt :]) if params.bad_words else ()
    banned = [word[-1] for word in params.bad_words if output[len(output) - len(word) + 1 :] == word[:-1]]
    if row.position < params.min_tokens:
        banned += [*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids]
    if banned:
        ids = torch.tensor(banned, device=values.device)
        before = values[ids]
        values[ids] = float("-inf")
        if values.max() == float("-inf"):
            values[ids] = before


def uniform(seed: int, position: int) -> float:
    """Returns the number in [0, 1) for (seed, position), the same on every machine."""
    bits = np.random.Philox(key=seed % (1 << 64), counter=position)
    return float(np.random.Generator(bits).random())


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draws one token per row. logits: [num_rows, vocab_size] float32. Raises ValueError for unusable ones.

    Rows that are cut come last. The others are drawn together, and what cut ones that want alike need is read back
    together: each time that the host waits for a GPU costs more than the draw.
    """
    temperatures = torch.tensor([row.params.temperature for row in rows], device=logits.device)
    probabilities = torch.softmax(logits / temperatures.unsqueeze(1), dim=-1)
    points = [uniform(row.params.seed, row.position) for row in rows]
    num_whole = sum(not _is_cut(row.params, logits.shape[1]) for row in rows)
    drawn: list[int] = []
    for begin in range(0, num_whole, _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, num_whole)
        drawn += _invert(probabilities[begin:end], points[begin:end])
    if num_whole == len(rows):
        return drawn
    probabilities, rows, points = probabilities[num_whole:], rows[num_whole:], points[num_whole:]
    candidates = _candidates(probabilities, rows)
    for one, (likely, ids), row, point in zip(probabilities, candidates, rows, points, strict=True):
        drawn.append(_draw_cut(one, likely, ids, row.params, point))
    return drawn


def _candidates(probabilities: Tensor, rows: Sequence[SamplingRow]) -> list[tuple[Tensor, Tensor]]:
    """The most likely tokens of each row on the host, in order, as probabilities and ids.

    As many as the row itself asks for: equal ones come in another order among more of them.
    """
    wanted = [min(max(_FIRST_CANDIDATES, row.params.top_k), probabilities.shape[1]) for row in rows]
    alike = [[index for index, own in enumerate(wanted) if own == number] for number in sorted(set(wanted))]
    groups = [probabilities] if len(alike) == 1 else [probabilities[indices] for indices in alike]  # usually uncopied
    found = [group.topk(wanted[indices[0]], dim=-1) for group, indices in zip(groups, alike, strict=True)]
    by_row: dict[int, tuple[Tensor, Tensor]] = {}
    for indices, (top, top_ids) in zip(alike, found, strict=True):
        by_row |= zip(indices, zip(top.cpu(), top_ids.cpu(), strict=True), strict=True)
    return [by_row[index] for index in range(len(rows))]


def _is_cut(params: SamplingParams, vocab_size: int) -> bool:
    """Whether less likely tokens may be left out."""
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def _draw_cut(probabilities: Tensor, top: Tensor, top_ids: Tensor, params: SamplingParams, point: float) -> int:
    """Draws from the tokens that survive.

    probabilities: [vocab_size]; top, top_ids: [num_candidates] on the host, the most likely, in order.
    """
    if len(top) < len(probabilities) and _reaches_past(top, params):
        top, top_ids = (ranked.cpu() for ranked in probabilities.sort(descending=True))
    num = num_kept(top, params)
    ids, order = top_ids[:num].sort()
    return int(ids[_invert(top[:num][order].unsqueeze(0), [point])[0]])


def _reaches_past(top: Tensor, params: SamplingParams) -> bool:
    """Whether tokens less likely than all of `top` may survive."""
    if 0 < params.top_k <= len(top):
        return False
    if params.min_p > 0:
        return bool(top[-1] >= params.min_p * top[0])
    return float(top.double().sum()) < params.top_p


def num_kept(top: Tensor, params: SamplingParams) -> int:
    """Counts the tokens of `top` (probabilities in falling order) that survive min-p, top-k and top-p."""
    kept = len(top) if params.top_k <= 0 else min(params.top_k, len(top))
    if params.min_p > 0:
        kept = min(kept, int((top >= params.min_p * top[0]).sum()))
    if params.top_p < 1:
        cumulative = top[:kept].double().cumsum(0)
        mass = cumulative[-1] if params.top_k > 0 or params.min_p > 0 else 1.0
        kept = min(kept, int((cumulative < params.top_p * mass).sum()) + 1)
    return max(kept, 1)


def _invert(weights: Tensor, points: Sequence[float]) -> list[int]:
    """Returns the index in each row of the token whose share of its cumulative weights contains the row's point.

    weights: [num_rows, num_tokens].
    """
    cumulative = weights.double().cumsum(-1)
    wanted = torch.tensor(points, dtype=torch.float64, device=weights.device).unsqueeze(1) * cumulative[:, -1:]
    indices = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    return indices.clamp(max=weights.shape[1] - 1).tolist()


def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens, with the most likely ones. logits: [num_tokens, vocab_size], any float."""
    return [
        one
        for begin in range(0, len(token_ids), _ROWS_AT_ONCE)
        for one in _some_logprobs(
            logits[begin : begin + _ROWS_AT_ONCE], token_ids[begin : begin + _ROWS_AT_ONCE], num_top
        )
    ]


def _some_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> Iterator[TokenLogprobs]:
    logprobs = logits.float().log_softmax(dim=-1)
    given = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))  # [num_tokens, 1]
    ranks = (logprobs > given).sum(dim=-1) + 1
    top, ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    rows = zip(given[:, 0].tolist(), ranks.tolist(), top.tolist(), ids.tolist(), strict=True)
    return (TokenLogprobs(one, tuple(zip(of, best, strict=True)), rank) for one, rank, best, of in rows)


def _logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """See `SamplerOps.logprobs`, on any device."""
    found = []
    for values, token_id, num in zip(logits, token_ids, num_top, strict=True):
        logprobs = values.float().log_softmax(dim=-1)
        top, ids = logprobs.topk(min(num, len(values)))
        found.append(TokenLogprobs(float(logprobs[token_id]), tuple(zip(ids.tolist(), top.tolist(), strict=True))))
    return found


TORCH_SAMPLER = SamplerOps(_choose, _logprobs)  # on any device
