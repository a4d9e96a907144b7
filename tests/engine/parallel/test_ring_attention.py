"""Shares of a step, and a running softmax over keys that come in pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.engine.attention.attention_backend import AttentionRule
from halfmoon.engine.attention.running_softmax import RunningSoftmax, attend_part, attend_part_reference
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.parallel.token_shares import TokenShares

BLOCK_TOKENS = 4

chunks_of = st.lists(
    st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 40), st.integers(1, 20)), max_size=4
)


def chunk(blocks: list[int], start: int, length: int, num_logits: int = 1) -> Chunk:
    end = min(start + length, len(blocks) * BLOCK_TOKENS)
    start = min(start, end - 1)
    return Chunk(list(range(start, end)), start, blocks, min(num_logits, end - start))


@given(chunks_of, st.integers(1, 4), st.integers(1, 30), st.integers(1, 5))
def test_each_token_key_and_logit_has_one_rank(
    drawn: list[tuple[list[int], int, int]], num_ranks: int, window: int, num_logits: int
) -> None:
    chunks = [chunk(*one, num_logits) for one in drawn]
    shares = TokenShares(chunks, BLOCK_TOKENS, num_ranks)
    places = sorted(place for rank in range(num_ranks) for _, place in shares.logit_places(rank))
    assert places == list(range(sum(one.num_logits for one in chunks)))
    for number, one in enumerate(chunks):
        rows = [run for rank in range(num_ranks) for run in shares.rows(rank)[number]]
        assert sorted(p for run in rows for p in range(run.start, run.end)) == list(range(one.start, one.end))
        for limit, first in ((None, 0), (window, max(one.start - window + 1, 0))):
            seen = {}
            for rank in range(num_ranks):
                positions = [p for run in shares.keys(rank, limit)[number] for p in range(run.start, run.end)]
                assert positions == sorted(positions)
                for run in shares.keys(rank, limit)[number]:
                    for offset in range(run.length):
                        seen[run.start + offset] = (run.slot + offset) * num_ranks, rank
            assert sorted(seen) == list(range(first, one.end))
            for position, (slot, rank) in seen.items():
                block = one.blocks[position // BLOCK_TOKENS]
                assert rank == block % num_ranks
                assert slot // num_ranks == block // num_ranks * BLOCK_TOKENS + position % BLOCK_TOKENS


def test_a_step_is_local_where_each_prompt_is_on_one_rank() -> None:
    here, there = chunk([0, 2, 4], 0, 12), chunk([1, 3], 5, 3)
    shares = TokenShares([here, there], BLOCK_TOKENS, 2)
    assert shares.is_local
    assert [one.blocks for one in shares.own_chunks(1)] == [[0, 1]]
    assert not TokenShares([here, chunk([0, 1], 2, 4)], BLOCK_TOKENS, 2).is_local
    assert TokenShares([chunk([0, 1], 0, 4)], BLOCK_TOKENS, 2).is_local, "a block for later tokens counts"


RULES = {
    "plain": AttentionRule(0.3),
    "window": AttentionRule(0.3, window=5),
    "capped": AttentionRule(0.3, softcap=2.0),
    "latent": AttentionRule(0.3, latent_size=12),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_pieces_in_any_order_give_the_attention_over_all_keys(rule: AttentionRule) -> None:
    """Of very unequal scores, too: the greatest one may be in any piece."""
    generator = torch.Generator().manual_seed(7)
    num_kv_heads = 1 if rule.latent_size else 2
    for first, num_rows, scale in ((0, 6, 1.0), (9, 8, 1.0), (13, 1, 100.0)):
        num_keys = first + num_rows
        q = torch.randn(num_rows, 4, 16 if rule.latent_size else 8, generator=generator) * scale
        memory = torch.randn(2, num_kv_heads, num_keys, 8, generator=generator)
        positions = torch.arange(num_keys)
        expected, lse = attend_part_reference(q, memory, first, positions, rule)
        own = positions >= first
        pieces = [torch.nonzero(own)[:, 0], *torch.split(torch.nonzero(~own)[:, 0], 3)]
        for order in torch.randperm(len(pieces), generator=generator), range(len(pieces)):
            softmax = RunningSoftmax.empty(num_rows, 4, expected.shape[2], q.device)
            for number in order:
                where = pieces[int(number)]
                softmax.add(slice(None), *attend_part(q, memory[:, :, where], first, where, rule))
            torch.testing.assert_close(softmax.out, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(softmax.sums[..., -1], lse, atol=1e-4, rtol=1e-5)


def test_rows_that_see_no_key_of_a_piece_keep_what_they_have() -> None:
    softmax = RunningSoftmax.empty(2, 1, 3, torch.device("cpu"))
    nothing = torch.full((2, 1), float("-inf"))
    softmax.add(slice(None), torch.zeros(2, 1, 3), nothing)
    assert softmax.out.eq(0).all()
    softmax.add(slice(1, 2), torch.ones(1, 1, 3), torch.zeros(1, 1))
    softmax.add(slice(None), torch.zeros(2, 1, 3), nothing)
    assert softmax.sums.tolist() == [[[0.0, 0.0, 0.0, float("-inf")]], [[1.0, 1.0, 1.0, 0.0]]]
